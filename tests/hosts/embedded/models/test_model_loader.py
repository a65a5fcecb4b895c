from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2ForCausalLM, Qwen3NextForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mtp_plugin.errors import CheckpointError, ConfigError
from mtp_plugin.hosts.embedded.models import FAMILIES, LoadedModel, load_model

Edited = Callable[..., Path]
Checkpoint = Callable[..., Path]

MIMO = "model.mtp_layers.0"
PLAIN_PLACES = {
    "mimo": {
        f"{MIMO}.token_layernorm.weight": "enorm.weight",
        f"{MIMO}.hidden_layernorm.weight": "hnorm.weight",
        f"{MIMO}.input_proj.weight": "eh_proj.weight",
        f"{MIMO}.final_layernorm.weight": "norm.weight",
        f"{MIMO}.input_layernorm.weight": "block.input_layernorm.weight",
        f"{MIMO}.post_attention_layernorm.weight": "block.post_attention_layernorm.weight",
        f"{MIMO}.self_attn.q_proj.weight": "block.self_attn.q_proj.weight",
        f"{MIMO}.self_attn.q_proj.bias": "block.self_attn.q_proj.bias",
        f"{MIMO}.self_attn.k_proj.weight": "block.self_attn.k_proj.weight",
        f"{MIMO}.self_attn.k_proj.bias": "block.self_attn.k_proj.bias",
        f"{MIMO}.self_attn.v_proj.weight": "block.self_attn.v_proj.weight",
        f"{MIMO}.self_attn.v_proj.bias": "block.self_attn.v_proj.bias",
        f"{MIMO}.self_attn.o_proj.weight": "block.self_attn.o_proj.weight",
        f"{MIMO}.mlp.gate_proj.weight": "block.mlp.gate_proj.weight",
        f"{MIMO}.mlp.up_proj.weight": "block.mlp.up_proj.weight",
        f"{MIMO}.mlp.down_proj.weight": "block.mlp.down_proj.weight",
    },
    "qwen3_next": {
        "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
        "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
        "mtp.fc.weight": "eh_proj.weight",
        "mtp.norm.weight": "norm.weight",
        "mtp.layers.0.input_layernorm.weight": "block.input_layernorm.weight",
        "mtp.layers.0.post_attention_layernorm.weight": "block.post_attention_layernorm.weight",
        "mtp.layers.0.self_attn.q_proj.weight": "block.self_attn.q_proj.weight",
        "mtp.layers.0.self_attn.k_proj.weight": "block.self_attn.k_proj.weight",
        "mtp.layers.0.self_attn.v_proj.weight": "block.self_attn.v_proj.weight",
        "mtp.layers.0.self_attn.o_proj.weight": "block.self_attn.o_proj.weight",
        "mtp.layers.0.self_attn.q_norm.weight": "block.self_attn.q_norm.weight",
        "mtp.layers.0.self_attn.k_norm.weight": "block.self_attn.k_norm.weight",
        "mtp.layers.0.mlp.gate.weight": "block.mlp.gate.weight",
        "mtp.layers.0.mlp.shared_expert_gate.weight": "block.mlp.shared_expert_gate.weight",
        "mtp.layers.0.mlp.shared_expert.gate_proj.weight": (
            "block.mlp.shared_expert.gate_proj.weight"
        ),
        "mtp.layers.0.mlp.shared_expert.up_proj.weight": "block.mlp.shared_expert.up_proj.weight",
        "mtp.layers.0.mlp.shared_expert.down_proj.weight": (
            "block.mlp.shared_expert.down_proj.weight"
        ),
    },
    "glm4_moe": {
        "model.layers.2.enorm.weight": "enorm.weight",
        "model.layers.2.hnorm.weight": "hnorm.weight",
        "model.layers.2.eh_proj.weight": "eh_proj.weight",
        "model.layers.2.shared_head.norm.weight": "norm.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias": (
            "block.mlp.gate.e_score_correction_bias"
        ),
    },
}


@pytest.mark.parametrize("family", sorted(PLAIN_PLACES))
def test_every_tensor_lands_in_its_place(checkpoint: Checkpoint, family: str) -> None:
    path = checkpoint(family)
    stored = load_file(path / "model.safetensors")
    state = load_model(path).mtp_layers[0].state_dict()
    for name, place in PLAIN_PLACES[family].items():
        assert torch.equal(state[place], stored[name]), place
    if family == "mimo":
        assert set(state) == set(PLAIN_PLACES[family].values())


@pytest.mark.parametrize(
    ("family", "stem"), [("qwen3_next", "mtp.layers.0"), ("deepseek_v3", "model.layers.2")]
)
def test_experts_land_in_their_place(checkpoint: Checkpoint, family: str, stem: str) -> None:
    path = checkpoint(family)
    stored = load_file(path / "model.safetensors")
    experts = load_model(path).mtp_layers[0].block.mlp.experts
    for expert in range(len(experts.down_proj)):
        name = f"{stem}.mlp.experts.{expert}"
        gate, up = experts.gate_up_proj[expert].chunk(2)
        assert torch.equal(gate, stored[f"{name}.gate_proj.weight"])
        assert torch.equal(up, stored[f"{name}.up_proj.weight"])
        assert torch.equal(experts.down_proj[expert], stored[f"{name}.down_proj.weight"])


def test_classes_of_the_targets(checkpoint: Checkpoint) -> None:
    mimo = load_model(checkpoint("mimo", rope_theta=640000.0))
    assert type(mimo.target) is Qwen2ForCausalLM
    # all fields of the config count, under whatever class it runs
    assert mimo.target.config.rope_parameters["rope_theta"] == 640000.0
    assert mimo.target.model.layers[0].self_attn.head_dim == 16
    qwen = load_model(checkpoint("qwen3_next"))
    assert type(qwen.target) is Qwen3NextForCausalLM
    # the norm that multiplies by 1 + weight follows from the target's own class
    assert type(qwen.mtp_layers[0].enorm) is type(qwen.target.model.norm)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_target_equals_transformers_own_loading(
    checkpoint: Checkpoint, plain_attention: type, family: str
) -> None:
    path = checkpoint(family)
    model = load_model(path)
    stored = load_file(path / "model.safetensors")
    assert torch.equal(model.embed_tokens.weight, stored["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    ids = torch.arange(5, 16)
    states = model.forward_target(ids, torch.arange(11)[None], plain_attention(11))
    logits = model.target(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(model.lm_head(states), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_concat_order_reaches_the_draft(
    checkpoint: Checkpoint, edited: Edited, plain_attention: type, family: str
) -> None:
    """With the embedding's half of the projection zeroed, drafts cannot depend on the token."""
    embedding_half = slice(64, 128) if family == "mimo" else slice(0, 64)
    name = {"mimo": f"{MIMO}.input_proj.weight", "qwen3_next": "mtp.fc.weight"}.get(
        family, "model.layers.2.eh_proj.weight"
    )

    def zero(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][:, embedding_half] = 0

    def handed_on(model: LoadedModel, token: int) -> torch.Tensor:
        return model.mtp_layers[0](
            embed_tokens=model.embed_tokens,
            input_ids=torch.tensor([token]),
            position_ids=torch.tensor([[0]]),
            hidden_states=torch.linspace(-1, 1, 64)[None],
            attn_metadata=plain_attention(1),
        )

    blind = load_model(edited(family, edit_tensors=zero))
    assert torch.equal(handed_on(blind, 3), handed_on(blind, 4))
    seeing = load_model(checkpoint(family))
    assert not torch.equal(handed_on(seeing, 3), handed_on(seeing, 4))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layer_indices_follow_the_target(checkpoint: Checkpoint, family: str) -> None:
    model = load_model(checkpoint(family), num_mtp_layers=3)
    assert [layer.layer_idx for layer in model.mtp_layers] == [2, 3, 4]
    assert [layer.block.self_attn.layer_idx for layer in model.mtp_layers] == [2, 3, 4]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_single_layer_requested_three_times_shares_its_tensors(
    checkpoint: Checkpoint, family: str
) -> None:
    first, *others = load_model(checkpoint(family), num_mtp_layers=3).mtp_layers
    for other in others:
        own, shared = (dict(layer.state_dict(keep_vars=True)) for layer in (first, other))
        assert own.keys() == shared.keys()
        assert all(own[key] is shared[key] for key in own)


def test_number_of_layers(checkpoint: Checkpoint) -> None:
    path = checkpoint("glm4_moe", num_mtp_layers=2)
    assert [len(load_model(path, num_mtp_layers=n).mtp_layers) for n in (None, 0, 1)] == [2, 0, 1]
    with pytest.raises(CheckpointError, match="expected at most 2 requested MTP layers, got 3"):
        load_model(path, num_mtp_layers=3)


def test_no_layers_without_the_tensors(edited: Edited) -> None:
    path = edited("glm4_moe", lambda config: config.pop("num_nextn_predict_layers"))
    assert len(load_model(path, num_mtp_layers=0).mtp_layers) == 0


@pytest.mark.parametrize("family", ["glm4_moe", "mimo"])
def test_shards_load_like_one_file(
    checkpoint: Checkpoint, edited: Edited, sharded: Callable[[Path], Path], family: str
) -> None:
    whole = load_model(checkpoint(family))
    parts = load_model(sharded(edited(family)))
    for one, other in [(whole.target, parts.target), (whole.mtp_layers, parts.mtp_layers)]:
        expected, got = one.state_dict(), other.state_dict()
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[key], got[key]) for key in expected)


@pytest.mark.parametrize("has_index", [True, False])
def test_files_that_no_index_names(
    checkpoint: Checkpoint, edited: Edited, sharded: Callable[[Path], Path], has_index: bool
) -> None:
    """MTP tensors in a file of their own, with an index of the other files, or none at all."""
    path = edited("mimo")
    tensors = load_file(path / "model.safetensors")
    mtp = {name: tensors.pop(name) for name in list(tensors) if "mtp" in name}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    sharded(path)
    save_file(mtp, path / "mtp.safetensors", {"format": "pt"})
    if not has_index:
        (path / "model.safetensors.index.json").unlink()
    loaded, expected = load_model(path), load_model(checkpoint("mimo"))
    for part in ("target", "mtp_layers"):
        states = [getattr(model, part).state_dict() for model in (loaded, expected)]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_fused_experts_load_like_single_ones(checkpoint: Checkpoint, edited: Edited) -> None:
    stem = "mtp.layers.0.mlp.experts"
    expected = load_model(checkpoint("qwen3_next")).mtp_layers[0].block.mlp.experts

    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(stem)]:
            del tensors[name]
        tensors[f"{stem}.gate_up_proj"] = expected.gate_up_proj.clone()
        tensors[f"{stem}.down_proj"] = expected.down_proj.clone()

    experts = load_model(edited("qwen3_next", edit_tensors=fuse)).mtp_layers[0].block.mlp.experts
    assert torch.equal(experts.gate_up_proj, expected.gate_up_proj)
    assert torch.equal(experts.down_proj, expected.down_proj)


def test_frozen_and_in_eval_mode(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("deepseek_v3"))
    for part in (model.target, model.mtp_layers):
        assert not any(parameter.requires_grad for parameter in part.parameters())
        assert not any(module.training for module in part.modules())
        assert not any(t.is_meta for t in [*part.parameters(), *part.buffers()])


def test_shared_modules_are_the_targets_own(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("glm4_moe", num_mtp_layers=2))
    assert model.embed_tokens is model.target.model.embed_tokens
    assert model.lm_head is model.target.lm_head
    assert all(layer.rotary is model.target.model.rotary_emb for layer in model.mtp_layers)
    assert model.traits is FAMILIES["glm4_moe"].traits


def test_tied_head(checkpoint: Checkpoint) -> None:
    path = checkpoint("mimo", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    model = load_model(path)
    assert model.lm_head.weight is model.embed_tokens.weight


class TestDtypes:
    @pytest.mark.parametrize("family", sorted(FAMILIES))
    def test_cast_of_both_parts(self, checkpoint: Checkpoint, family: str) -> None:
        model = load_model(checkpoint(family), dtype=torch.bfloat16)
        for part in (model.target, model.mtp_layers):
            for name, tensor in part.state_dict().items():
                # routers choose experts by these, and transformers keeps them as they are
                kept = any(part in name for part in model.target._keep_in_fp32_modules_strict or ())
                assert tensor.dtype is (torch.float32 if kept else torch.bfloat16), name

    def test_mixed_checkpoint(self, checkpoint: Checkpoint, edited: Edited) -> None:
        def to_bf16(tensors: dict[str, torch.Tensor]) -> None:
            for name in tensors:
                if name.startswith("model.layers.2."):
                    tensors[name] = tensors[name].bfloat16()

        model = load_model(edited("glm4_moe", edit_tensors=to_bf16))
        exact = load_model(checkpoint("glm4_moe")).mtp_layers.state_dict()
        for name, tensor in model.mtp_layers.state_dict().items():
            assert torch.equal(tensor, exact[name].bfloat16().float()), name

    def test_refused(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(ConfigError) as caught:
            load_model(checkpoint("mimo"), dtype=torch.float64)
        assert str(caught.value) == (
            "dtype: expected float32, float16 or bfloat16, got torch.float64"
        )


class TestAttention:
    def test_reaches_target_and_layers(self, checkpoint: Checkpoint, plain_attention: type) -> None:
        seen = []

        def recording(module: nn.Module, *args: object, **kwargs: object) -> object:
            seen.append((module.layer_idx, type(kwargs["attn_metadata"])))
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)

        ALL_ATTENTION_FUNCTIONS.register("recording", recording)
        try:
            model = load_model(checkpoint("qwen3_next"), attn_implementation="recording")
            attention = plain_attention(3)
            states = model.forward_target(torch.tensor([3, 4, 5]), torch.arange(3)[None], attention)
            model.mtp_layers[0](
                embed_tokens=model.embed_tokens,
                input_ids=torch.tensor([4, 5, 6]),
                position_ids=torch.arange(3)[None],
                hidden_states=states,
                attn_metadata=attention,
            )
            assert seen == [(index, plain_attention) for index in (0, 1, 2)]
            model.set_attn_implementation("sdpa")
            model.forward_target(torch.tensor([3]), torch.zeros(1, 1).long(), plain_attention(1))
            assert len(seen) == 3
        finally:
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop("recording")

    def test_unknown_name(self, checkpoint: Checkpoint) -> None:
        expected = r"^attn_implementation: expected a function registered with transformers \(eager"
        with pytest.raises(ConfigError, match=expected) as caught:
            load_model(checkpoint("mimo"), attn_implementation="none_such")
        assert str(caught.value).endswith("got 'none_such'")
        with pytest.raises(ConfigError, match=expected):
            load_model(checkpoint("mimo")).set_attn_implementation("none_such")

    def test_missing_package(self, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
        def lack(*_: object, **__: object) -> None:
            raise ImportError("the package fast_attention")

        monkeypatch.setattr(Qwen2ForCausalLM, "from_pretrained", lack)
        with pytest.raises(ConfigError) as caught:
            load_model(checkpoint("mimo"), attn_implementation="flash_attention_2")
        assert str(caught.value) == (
            "attn_implementation: 'flash_attention_2' is refused: the package fast_attention"
        )


class TestBrokenTargets:
    def refusal(self, path: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_model(path)
        return str(caught.value).replace(str(path), "PATH")

    def test_what_transformers_refuses(
        self, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("no room")

        monkeypatch.setattr(Qwen2ForCausalLM, "from_pretrained", refuse)
        path = checkpoint("mimo")
        assert self.refusal(path) == (
            "checkpoint PATH: transformers cannot load the target: no room"
        )

    def test_what_transformers_leaves_unfilled(
        self, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forget(*_: object, **__: object) -> tuple[None, dict[str, set[str]]]:
            return None, {"missing_keys": {"model.norm.weight"}}

        monkeypatch.setattr(Qwen2ForCausalLM, "from_pretrained", forget)
        path = checkpoint("mimo")
        assert self.refusal(path) == (
            "checkpoint PATH: transformers left 1 target tensor(s) unfilled: model.norm.weight"
        )

    def test_stale_rotary_buffers_are_fine(self, edited: Edited) -> None:
        def add(tensors: dict[str, torch.Tensor]) -> None:
            tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

        load_model(edited("mimo", edit_tensors=add))


def test_loading_is_quiet(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("transformers").propagate = True
    try:
        load_model(checkpoint("glm4_moe"))
    finally:
        logging.getLogger("transformers").propagate = False
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
