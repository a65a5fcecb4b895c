from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integration.random_models import write_random_checkpoint
from mtp_plugin.errors import ConfigError, UnsupportedModelError
from mtp_plugin.hosts.embedded.models import FAMILIES, LoadedModel, load_model

Checkpoint = Callable[..., Path]
FIRST_PROMPT = torch.arange(2, 34)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_same_arguments_same_bytes(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    again = write_random_checkpoint(tmp_path / "deeper" / "again", family)
    assert {file.name for file in again.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    for file in again.iterdir():
        assert file.read_bytes() == (checkpoint(family) / file.name).read_bytes()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_seeds_differ(checkpoint: Checkpoint, family: str) -> None:
    first, second = (
        load_file(checkpoint(family, seed=seed) / "model.safetensors") for seed in (0, 1)
    )
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_next_tokens_vary(checkpoint: Checkpoint, family: str) -> None:
    model = load_model(checkpoint(family))
    next_tokens = model.target(input_ids=FIRST_PROMPT[None]).logits[0].argmax(dim=-1)
    assert len(set(next_tokens.tolist())) > 20


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_context_matters(checkpoint: Checkpoint, family: str) -> None:
    model = load_model(checkpoint(family))
    other = FIRST_PROMPT.clone()
    other[0] += 1
    one, two = (model.target(input_ids=ids[None]).logits[0, -1] for ids in (FIRST_PROMPT, other))
    assert (one - two).abs().max() > 1e-3


def share_of_right_drafts(model: LoadedModel, plain_attention: type) -> float:
    """Along given tokens: the draft after a pair against what the target says one token on."""
    ids = torch.randint(2, 512, (200,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(len(ids))[None]
    attention = plain_attention(len(ids))
    states = model.forward_target(ids, positions, attention)
    wanted = model.lm_head(states[1:]).argmax(dim=-1)
    layer = model.mtp_layers[0]
    attention = plain_attention(len(ids) - 1)
    handed_on = layer(
        embed_tokens=model.embed_tokens,
        input_ids=ids[1:],
        position_ids=positions[:, :-1],
        hidden_states=states[:-1],
        attn_metadata=attention,
    )
    drafts = layer.shared_head(handed_on, model.lm_head, attention, return_all=True).argmax(dim=-1)
    return (drafts == wanted).float().mean().item()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_share_of_right_drafts(checkpoint: Checkpoint, plain_attention: type, family: str) -> None:
    def share(residual_scale: float) -> float:
        path = checkpoint(family, echo_draft=True, residual_scale=residual_scale)
        return share_of_right_drafts(load_model(path), plain_attention)

    assert share(0.0) == 1.0
    assert 0.3 < share(0.3) < 1.0


def test_overrides_reach_config_and_tensors(tmp_path: Path) -> None:
    path = write_random_checkpoint(
        tmp_path,
        "glm4_moe",
        num_mtp_layers=2,
        dtype=torch.bfloat16,
        vocab_size=100,
        num_hidden_layers=3,
        eos_token_id=[5, 6],
    )
    config = json.loads((path / "config.json").read_text())
    assert (config["vocab_size"], config["torch_dtype"]) == (100, "bfloat16")
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == [5, 6]
    stored = load_file(path / "model.safetensors")
    assert stored["model.embed_tokens.weight"].shape == (100, 64)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "model.layers.4.eh_proj.weight" in stored
    assert "model.layers.5.eh_proj.weight" not in stored


def test_layer_types_follow_the_number_of_layers(tmp_path: Path) -> None:
    path = write_random_checkpoint(tmp_path, "qwen3_next", num_hidden_layers=3)
    assert len(load_model(path).target.model.layers) == 3


def test_stored_copies_of_shared_tensors(checkpoint: Checkpoint) -> None:
    stored = load_file(checkpoint("deepseek_v3") / "model.safetensors")
    assert torch.equal(
        stored["model.layers.2.embed_tokens.weight"], stored["model.embed_tokens.weight"]
    )
    assert torch.equal(stored["model.layers.2.shared_head.head.weight"], stored["lm_head.weight"])


def test_unknown_family(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        write_random_checkpoint(tmp_path, "llama")


def test_count_that_the_family_cannot_declare(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_random_checkpoint(tmp_path, "qwen3_next", num_mtp_layers=2)
    assert str(caught.value) == "num_mtp_layers: qwen3_next checkpoints always have 1, got 2"
