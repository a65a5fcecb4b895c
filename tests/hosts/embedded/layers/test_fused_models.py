"""Whole models: fused layers give what transformers' modules give, and hold nothing twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded.models import (
    FusedMTPLayer,
    LoadedModel,
    fuse,
    load_model,
)
from tests.ops.on_device import DEVICE

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="models on a CPU need interpreted kernels; see test_on_gpu"
)
LENGTHS = (4, 1, 5)
POSITIONS = torch.tensor([[*range(4), *range(1), *range(5)]])
IDS = torch.tensor([7, 300, 11, 12, 2, 500, 44, 44, 9, 63])
SPARSE = {"first_k_dense_replace": 1}
WIDE_SHARED = {**SPARSE, "n_shared_experts": 2}
MODELS = [
    ("glm4_moe", SPARSE),
    ("glm4_moe", WIDE_SHARED),
    ("glm4_moe", {**SPARSE, "use_qk_norm": False, "attention_bias": False}),
    ("glm4_moe", {**SPARSE, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5}),
    ("deepseek_v3", {}),
    ("mimo", {}),
    ("qwen3_next", {}),
]


def run_mtp(
    model: LoadedModel,
    states: torch.Tensor,
    attention: object,
    output_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    return model.mtp_layers[0](
        embed_tokens=model.embed_tokens,
        input_ids=IDS,
        position_ids=POSITIONS,
        hidden_states=states,
        attn_metadata=attention,
        output_rows=output_rows,
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "kernels"),
    [(*model, "triton") for model in MODELS] + [(*MODELS[3], "reference")],
)
def test_target_and_mtp_layer(
    twins: Callable[..., Any],
    plain_attention: type,
    family: str,
    options: dict[str, Any],
    kernels: str,
) -> None:
    plain, fused = twins(family, kernels, **options)
    ours, theirs = plain_attention(*LENGTHS), plain_attention(*LENGTHS)
    states = fused.forward_target(IDS, POSITIONS, ours)
    expected = plain.forward_target(IDS, POSITIONS, theirs)
    assert_close(states, expected)
    logits, expected_logits = fused.lm_head(states), plain.lm_head(expected)
    assert_close(logits, expected_logits)
    assert torch.equal(logits.argmax(-1), expected_logits.argmax(-1))
    state, expected_state = (
        run_mtp(model, expected, attention) for model, attention in ((fused, ours), (plain, theirs))
    )
    assert_close(state, expected_state)
    for all_rows in (False, True):
        drafts = fused.mtp_layers[0].shared_head(state, fused.lm_head, ours, all_rows)
        wanted = plain.mtp_layers[0].shared_head(expected_state, plain.lm_head, theirs, all_rows)
        assert_close(drafts, wanted)
        assert torch.equal(drafts.argmax(-1), wanted.argmax(-1))


def test_report_of_each_family(twins: Callable[..., Any]) -> None:
    glm = twins("glm4_moe", **SPARSE).fused.report
    assert glm.left == ()
    layers = [f"layers.{i}{part}" for i in (0, 1) for part in ("", ".self_attn", ".mlp")]
    mtp = [f"mtp_layers.0{part}" for part in (".block", ".block.self_attn", ".block.mlp", "")]
    assert glm.fused == (*layers, "norm", *mtp)
    assert str(glm) == "fused with triton: 11 modules; left: none"
    assert twins("mimo").fused.report.left == ()
    deepseek = twins("deepseek_v3").fused.report
    assert set(deepseek.left) == {
        f"{layer}.self_attn" for layer in ("layers.0", "layers.1", "mtp_layers.0.block")
    }
    assert str(deepseek) == "fused with triton: 8 modules; left: 3 self_attn"
    qwen = twins("qwen3_next").fused
    assert qwen.report.fused == ()
    assert qwen.report.left == ("decoder", "mtp_layers.0.block", "mtp_layers.0")
    assert (
        str(qwen.report) == "fused with triton: 0 modules; left: 1 block, 1 decoder, 1 mtp_layers"
    )
    assert not isinstance(qwen.mtp_layers[0], FusedMTPLayer)
    reference = twins("glm4_moe", "reference", **SPARSE).fused.report
    assert reference.left == ("layers.1.mlp", "mtp_layers.0.block.mlp")
    assert str(reference) == "fused with torch: 9 modules; left: 2 mlp"


def bytes_of(*modules: nn.Module) -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for module in modules
        for tensor in module.state_dict().values()
    }
    return sum(storages.values())


@pytest.mark.parametrize(("family", "options"), MODELS[1:2] + MODELS[4:6])
def test_nothing_is_stored_twice_and_the_modules_still_work(
    checkpoint: Callable[..., Path], plain_attention: type, family: str, options: dict[str, Any]
) -> None:
    path = checkpoint(family, **options)
    plain, model = load_model(path), load_model(path)
    before = {name: tensor.clone() for name, tensor in model.target.state_dict().items()}
    size = bytes_of(model.target, model.mtp_layers)
    fused = fuse(model, kernels="triton")
    assert bytes_of(fused.target, fused.mtp_layers) == size
    for name, tensor in fused.target.state_dict().items():
        assert torch.equal(tensor, before[name])
    states = LoadedModel.forward_target(fused, IDS, POSITIONS, plain_attention(*LENGTHS))
    assert torch.equal(states, plain.forward_target(IDS, POSITIONS, plain_attention(*LENGTHS)))
    assert fused.target is model.target


class _Attending:
    """Attention metadata of one sequence with a method of its own for a whole layer."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls: list[tuple[int, tuple[int, ...], tuple[int, ...], float]] = []

    @property
    def _seq_lens_cuda(self) -> torch.Tensor:
        return self.inner._seq_lens_cuda

    def model_kwargs(self) -> dict[str, Any]:
        raise AssertionError("transformers' forward must not be called")

    def attend(
        self, layer_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        self.calls.append((layer_idx, tuple(q.shape), tuple(k.shape), scaling))
        kwargs = self.inner.model_kwargs()
        keys, values = kwargs["past_key_values"].update(
            k.transpose(0, 1)[None], v.transpose(0, 1)[None], layer_idx
        )
        out = nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=kwargs["attention_mask"],
            scale=scaling,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


@pytest.mark.parametrize("family", ["glm4_moe", "mimo"])
def test_attention_of_the_metadata(
    twins: Callable[..., Any], plain_attention: type, family: str
) -> None:
    plain, fused = twins(family)
    attending, theirs = _Attending(plain_attention(*LENGTHS)), plain_attention(*LENGTHS)
    states = fused.forward_target(IDS, POSITIONS, attending)
    expected = plain.forward_target(IDS, POSITIONS, theirs)
    assert_close(states, expected)
    assert_close(run_mtp(fused, expected, attending), run_mtp(plain, expected, theirs))
    assert attending.calls == [(i, (10, 4, 16), (10, 2, 16), 16**-0.5) for i in range(3)]


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
@pytest.mark.parametrize("rows", [[3, 4, 9], []])
def test_an_mtp_layer_may_return_some_rows(
    twins: Callable[..., Any], plain_attention: type, family: str, rows: list[int]
) -> None:
    """Their states are those of a full pass, and all rows leave keys and values."""
    wanted = torch.tensor(rows, dtype=torch.int64)
    states = torch.randn(len(IDS), 64, generator=torch.Generator().manual_seed(1))
    for model in twins(family):
        whole, part = plain_attention(*LENGTHS), plain_attention(*LENGTHS)
        every = run_mtp(model, states, whole)
        assert_close(run_mtp(model, states, part, wanted), every[wanted])
        for ours, theirs in zip(part.cache.layers, whole.cache.layers, strict=True):
            if theirs.is_initialized:
                assert torch.equal(ours.keys, theirs.keys)
                assert torch.equal(ours.values, theirs.values)
        assert part.cache.layers[-1].keys.shape[-2] == len(IDS)


LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("rope_type", "more"), [("linear", {}), ("llama3", LLAMA3), ("dynamic", {})]
)
def test_other_rope_types_ask_the_module(
    edited: Callable[..., Path], plain_attention: type, rope_type: str, more: dict[str, float]
) -> None:
    scaling = {
        "rope_type": rope_type,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "factor": 4.0,
        **more,
    }
    path = edited("glm4_moe", lambda config: config.update(rope_parameters=scaling))
    model, plain = load_model(path), load_model(path)
    assert model.target.model.rotary_emb.rope_type == rope_type
    fused = fuse(model, kernels="triton")
    states = fused.forward_target(IDS, POSITIONS + 40, plain_attention(*LENGTHS))
    expected = plain.forward_target(IDS, POSITIONS + 40, plain_attention(*LENGTHS))
    assert_close(states, expected)


def test_a_layer_of_another_class_runs_as_it_is(
    checkpoint: Callable[..., Path], plain_attention: type
) -> None:
    """Fused and plain layers alternate over one stream."""
    path = checkpoint("glm4_moe", num_hidden_layers=4, **SPARSE)
    model, plain = load_model(path), load_model(path)
    for layer in (model.target.model.layers[1], model.target.model.layers[3]):
        layer.input_layernorm.register_forward_hook(lambda *_: None)
    model.target.model.norm.register_forward_hook(lambda *_: None)
    fused = fuse(model, kernels="triton")
    assert fused.report.left == ("layers.1", "layers.3", "norm")
    states = fused.forward_target(IDS, POSITIONS, plain_attention(*LENGTHS))
    assert_close(states, plain.forward_target(IDS, POSITIONS, plain_attention(*LENGTHS)))


def test_an_embedding_that_does_more_is_called(
    twins: Callable[..., Any], plain_attention: type
) -> None:
    plain, fused = twins("glm4_moe")

    class Doubled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    doubled = Doubled(512, 64)
    doubled.weight = plain.embed_tokens.weight
    states = plain.forward_target(IDS, POSITIONS, plain_attention(*LENGTHS))
    outs = [
        model.mtp_layers[0](
            embed_tokens=doubled,
            input_ids=IDS,
            position_ids=POSITIONS,
            hidden_states=states,
            attn_metadata=plain_attention(*LENGTHS),
        )
        for model in (fused, plain)
    ]
    assert_close(*outs)


def test_states_before_the_last_norm(
    twins: Callable[..., Any], plain_attention: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families that hand on unnormed states, and read them at the token's position."""
    plain, fused = twins("glm4_moe")
    traits = json.loads(json.dumps(vars(plain.traits)))
    odd = type(plain.traits)(
        **{**traits, "recycle": "pre_norm", "position": "token", "concat": "hidden_embed"}
    )
    for layer in (plain.mtp_layers[0], fused.mtp_layers[0].layer):
        monkeypatch.setattr(layer, "traits", odd)
    ours, theirs = plain_attention(*LENGTHS), plain_attention(*LENGTHS)
    states = plain.forward_target(IDS, POSITIONS, theirs)
    fused.forward_target(IDS, POSITIONS, ours)
    out, expected = run_mtp(fused, states, ours), run_mtp(plain, states, theirs)
    assert_close(out, expected)
    assert_close(
        fused.mtp_layers[0].shared_head(out, fused.lm_head, ours),
        plain.mtp_layers[0].shared_head(expected, plain.lm_head, theirs),
    )


def test_choice_of_kernels(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(checkpoint("glm4_moe"))
    assert fuse(model).report.kernels == "torch"
    with pytest.raises(
        ConfigError, match="kernels: expected auto, torch, triton or reference, got 'c'"
    ):
        fuse(model, kernels="c")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="'triton' needs a CUDA device"):
        fuse(model, kernels="triton")
    monkeypatch.setattr("mtp_plugin.ops.backend._is_triton_installed", lambda: False)
    with pytest.raises(ConfigError, match="package triton is not installed"):
        fuse(model, kernels="triton")


def test_repeated_mtp_layers_go_on_sharing(checkpoint: Callable[..., Path]) -> None:
    model = load_model(checkpoint("glm4_moe", **SPARSE), num_mtp_layers=3)
    size = bytes_of(model.mtp_layers)
    fused = fuse(model, kernels="triton")
    assert bytes_of(fused.mtp_layers) == size
    assert [layer.layer_idx for layer in fused.mtp_layers] == [2, 3, 4]
    assert fused.report.left == ()
