"""What a loaded model is: each stored tensor in its place, exactly, and shared where it must be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2ForCausalLM, Qwen3NextForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mtp_plugin.checkpoint import describe, read_checkpoint
from mtp_plugin.checkpoint.check import OTHER_COPIES, OWN_HEAD
from mtp_plugin.errors import CheckpointError, ConfigError
from mtp_plugin.hosts.embedded.models import FAMILIES, LoadedModel, load_model

Edited = Callable[..., Path]
Checkpoint = Callable[..., Path]
Tensors = dict[str, torch.Tensor]

MODULES = ("enorm", "hnorm", "eh_proj", "norm")
LAYERS = {
    # family: begin of the names of the block, then of the other modules
    "mimo": ("model.mtp_layers.0.", "token_layernorm hidden_layernorm input_proj final_layernorm"),
    "qwen3_next": ("mtp.layers.0.", "pre_fc_norm_embedding pre_fc_norm_hidden fc norm"),
    "glm4_moe": ("model.layers.2.", "enorm hnorm eh_proj shared_head.norm"),
    "deepseek_v3": ("model.layers.2.", "enorm hnorm eh_proj shared_head.norm"),
}


def names_of(family: str) -> tuple[str, dict[str, str]]:
    """Begin of the stored names of an MTP block, and the stored name of each other module."""
    block, names = LAYERS[family]
    stem = "mtp." if family == "qwen3_next" else block
    return block, dict(zip(MODULES, [stem + name for name in names.split()], strict=True))


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_tensor_is_in_its_place(
    checkpoint: Checkpoint, plain_attention: type, family: str
) -> None:
    path = checkpoint(family)
    model = load_model(path)
    stored = load_file(path / "model.safetensors")
    block, modules = names_of(family)
    for key, tensor in model.mtp_layers[0].state_dict().items():
        module, _, rest = key.partition(".")
        if ".experts." not in key:
            name = f"{modules[module]}.{rest}" if module in modules else block + rest
            assert torch.equal(tensor, stored[name]), key
    experts = getattr(model.mtp_layers[0].block.mlp, "experts", None)
    for expert in range(0 if experts is None else len(experts.down_proj)):
        name = f"{block}mlp.experts.{expert}"
        gate, up = experts.gate_up_proj[expert].chunk(2)
        assert torch.equal(gate, stored[f"{name}.gate_proj.weight"])
        assert torch.equal(up, stored[f"{name}.up_proj.weight"])
        assert torch.equal(experts.down_proj[expert], stored[f"{name}.down_proj.weight"])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(model.target.state_dict()[name], stored[name])
    for part in (model.target, model.mtp_layers):
        assert not any(parameter.requires_grad for parameter in part.parameters())
        assert not any(module.training for module in part.modules())
        assert not any(t.is_meta for t in [*part.parameters(), *part.buffers()])
    ids = torch.arange(5, 16)
    states = model.forward_target(ids, torch.arange(11)[None], plain_attention(11))
    logits = model.target(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(model.lm_head(states), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_target_equals_transformers_own_loading(checkpoint: Checkpoint, family: str) -> None:
    path = checkpoint(family)
    model = load_model(path, dtype=torch.bfloat16)
    theirs = type(model.target).from_pretrained(path, dtype=torch.bfloat16)
    assert_equal(model.target, theirs)
    for ours, other in zip(model.target.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(ours, other)
    for part in (model.target, model.mtp_layers):
        for name, tensor in part.state_dict().items():
            # routers choose experts by these, and transformers keeps them as they are
            kept = any(part in name for part in model.target._keep_in_fp32_modules_strict or ())
            assert tensor.dtype is (torch.float32 if kept else torch.bfloat16), name


def test_classes_and_shared_modules(checkpoint: Checkpoint) -> None:
    # all fields of the config count, under whatever class it runs
    mimo = load_model(checkpoint("mimo", rope_theta=640000.0))
    assert type(mimo.target) is Qwen2ForCausalLM
    assert mimo.target.config.rope_parameters["rope_theta"] == 640000.0
    assert mimo.target.model.layers[0].self_attn.head_dim == 16
    # the norm that multiplies by 1 + weight follows from the target's own class
    qwen = load_model(checkpoint("qwen3_next"))
    assert type(qwen.target) is Qwen3NextForCausalLM
    assert type(qwen.mtp_layers[0].enorm) is type(qwen.target.model.norm)
    assert qwen.embed_tokens is qwen.target.model.embed_tokens
    assert qwen.lm_head is qwen.target.lm_head
    assert qwen.mtp_layers[0].rotary is qwen.target.model.rotary_emb


@pytest.mark.parametrize(
    ("family", "change"),
    [("glm4_moe", {"first_k_dense_replace": 9}), ("qwen3_next", {"mlp_only_layers": [0, 1, 2]})],
)
def test_mtp_blocks_are_mixtures_after_dense_targets(
    checkpoint: Checkpoint, family: str, change: dict[str, object]
) -> None:
    model = load_model(checkpoint(family, **change))
    assert not hasattr(model.target.model.layers[1].mlp, "experts")
    assert hasattr(model.mtp_layers[0].block.mlp, "experts")


def test_tied_head(checkpoint: Checkpoint) -> None:
    path = checkpoint("mimo", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    model = load_model(path)
    assert model.lm_head.weight is model.embed_tokens.weight


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stored_head_that_the_config_ties(
    edited: Edited, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    """As in transformers and vLLM, the stored head is used, unless it equals the embedding."""
    path = edited(family, edit_config=lambda config: config.update(tie_word_embeddings=True))
    model = load_model(path)
    assert caplog.messages == [f"{path}: lm_head.weight, {OWN_HEAD}"]
    checkpoint = read_checkpoint(path)
    assert f"lm_head, {OWN_HEAD}" in dict(describe(checkpoint))["head"]
    assert not checkpoint.problems
    theirs = type(model.target).from_pretrained(path)
    ids = torch.arange(5, 16)[None]
    assert torch.equal(model.target(input_ids=ids).logits, theirs(input_ids=ids).logits)
    assert not torch.equal(model.lm_head.weight, model.embed_tokens.weight)
    caplog.clear()
    tensors = load_file(path / "model.safetensors")
    copies = [name for name in tensors if name.endswith("shared_head.head.weight")]
    for name in ("lm_head.weight", *copies):
        tensors[name] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    model = load_model(path)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert not caplog.messages


def test_copies_that_differ_are_reported(edited: Edited, caplog: pytest.LogCaptureFixture) -> None:
    name = "model.layers.2.shared_head.head.weight"
    path = edited("glm4_moe", edit_tensors=lambda tensors: tensors[name][-1].add_(1))
    load_model(path, num_mtp_layers=0)
    assert not caplog.messages
    load_model(path)
    assert caplog.messages == [f"{path}: {name}: {OTHER_COPIES}"]
    assert dict(describe(read_checkpoint(path)))["head"].endswith(f"; {name}: {OTHER_COPIES}")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_concat_order_reaches_the_draft(
    checkpoint: Checkpoint, edited: Edited, plain_attention: type, family: str
) -> None:
    """With the embedding's half of the projection zeroed, drafts cannot depend on the token."""
    embedding_half = slice(64, 128) if family == "mimo" else slice(0, 64)
    name = f"{names_of(family)[1]['eh_proj']}.weight"

    def zero(tensors: Tensors) -> None:
        tensors[name][:, embedding_half] = 0

    def next_states(model: LoadedModel, token: int) -> torch.Tensor:
        return model.mtp_layers[0](
            embed_tokens=model.embed_tokens,
            input_ids=torch.tensor([token]),
            position_ids=torch.tensor([[0]]),
            hidden_states=torch.linspace(-1, 1, 64)[None],
            attn_metadata=plain_attention(1),
        )

    blind = load_model(edited(family, edit_tensors=zero))
    assert torch.equal(next_states(blind, 3), next_states(blind, 4))
    seeing = load_model(checkpoint(family))
    assert not torch.equal(next_states(seeing, 3), next_states(seeing, 4))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_single_layer_is_repeated(checkpoint: Checkpoint, family: str) -> None:
    """The layers share its tensors, each with its own index."""
    model = load_model(checkpoint(family), num_mtp_layers=3)
    first, *others = model.mtp_layers
    for other in others:
        own, shared = (dict(layer.state_dict(keep_vars=True)) for layer in (first, other))
        assert own.keys() == shared.keys()
        assert all(own[key] is shared[key] for key in own)
    assert [layer.layer_idx for layer in model.mtp_layers] == [2, 3, 4]
    assert [layer.block.self_attn.layer_idx for layer in model.mtp_layers] == [2, 3, 4]


def test_number_of_layers(checkpoint: Checkpoint, edited: Edited) -> None:
    path = checkpoint("glm4_moe", num_mtp_layers=2)
    assert [len(load_model(path, num_mtp_layers=n).mtp_layers) for n in (None, 0, 1)] == [2, 0, 1]
    with pytest.raises(CheckpointError, match="expected at most 2 requested MTP layers, got 3"):
        load_model(path, num_mtp_layers=3)
    path = edited("qwen3_next", edit_tensors=lambda tensors: tensors.pop("mtp.fc.weight"))
    assert len(load_model(path, num_mtp_layers=0).mtp_layers) == 0


@pytest.mark.parametrize("form", ["shards", "unlisted", "no index"])
def test_forms_of_files(
    checkpoint: Checkpoint, edited: Edited, sharded: Callable[[Path], Path], form: str
) -> None:
    """Shards, also with MTP tensors in a file that the index does not name, or without an index."""
    path = edited("mimo")
    tensors = load_file(path / "model.safetensors")
    mtp = {n: tensors.pop(n) for n in list(tensors) if "mtp" in n and form != "shards"}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    sharded(path)
    if mtp:
        save_file(mtp, path / "mtp.safetensors", {"format": "pt"})
    if form == "no index":
        (path / "model.safetensors.index.json").unlink()
    loaded, expected = load_model(path), load_model(checkpoint("mimo"))
    assert_equal(loaded.target, expected.target)
    assert_equal(loaded.mtp_layers, expected.mtp_layers)


def test_experts_as_one_tensor_and_without_copies(checkpoint: Checkpoint, edited: Edited) -> None:
    expected = load_model(checkpoint("glm4_moe"))
    experts = expected.mtp_layers[0].block.mlp.experts

    def edit(tensors: Tensors) -> None:
        stem = "model.layers.2.mlp.experts"
        for name in [n for n in tensors if n.startswith(stem) or n.endswith("head.head.weight")]:
            del tensors[name]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # ignored
        tensors[f"{stem}.gate_up_proj"] = experts.gate_up_proj.clone()
        tensors[f"{stem}.down_proj"] = experts.down_proj.clone()

    loaded = load_model(edited("glm4_moe", edit_tensors=edit))
    assert_equal(loaded.mtp_layers, expected.mtp_layers)
    assert_equal(loaded.target, expected.target)


def test_attention_reaches_target_and_layers(checkpoint: Checkpoint, plain_attention: type) -> None:
    seen = []

    def recording(module: nn.Module, *args: object, **kwargs: object) -> object:
        seen.append((module.layer_idx, type(kwargs["attn_metadata"])))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("recording", recording)
    try:
        model = load_model(checkpoint("qwen3_next"), attn_implementation="recording")
        attention = plain_attention(3)
        states = model.forward_target(torch.tensor([3, 4, 5]), torch.arange(3)[None], attention)
        arguments = {
            "embed_tokens": model.embed_tokens,
            "input_ids": torch.tensor([4, 5, 6]),
            "position_ids": torch.arange(3)[None],
            "hidden_states": states,
            "attn_metadata": attention,
        }
        model.mtp_layers[0](**arguments)
        assert seen == [(index, plain_attention) for index in (0, 1, 2)]
        model.set_attn_implementation("sdpa")
        model.forward_target(torch.tensor([3]), torch.zeros(1, 1).long(), plain_attention(1))
        model.mtp_layers[0](**{**arguments, "attn_metadata": plain_attention(3)})
        assert len(seen) == 3
        with pytest.raises(ConfigError, match="expected a function registered with transformers"):
            model.set_attn_implementation("none_such")
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop("recording")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.float64}, "dtype: expected float32, float16 or bfloat16, got torch.f"),
        ({"attn_implementation": "none_such"}, "attn_implementation: expected a function regis"),
        (
            {"attn_implementation": "flash_attention_2"},
            "attn_implementation: 'flash_attention_2' is refused: ",
        ),
        ({"num_mtp_layers": -1}, "num_mtp_layers: expected at least 0, got -1"),
    ],
)
def test_refused_arguments(
    checkpoint: Checkpoint, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model(checkpoint("mimo"), **arguments)
    assert str(caught.value).startswith(message)


def test_loading_is_quiet(checkpoint: Checkpoint, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(checkpoint("glm4_moe"))
    assert capfd.readouterr() == ("", "")
