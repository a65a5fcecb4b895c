from __future__ import annotations

import dataclasses

import pytest

from mtp_plugin.errors import UnsupportedModelError
from mtp_plugin.hosts.embedded.models import FAMILIES, NOT_RUNNABLE, DraftTraits, family_of

RUNNABLE = "deepseek_v3, glm4_moe, mimo, qwen3_next"


def test_the_families_that_run() -> None:
    assert ", ".join(sorted(FAMILIES)) == RUNNABLE
    assert all(family_of(name) is FAMILIES[name] for name in FAMILIES)
    assert not set(FAMILIES) & set(NOT_RUNNABLE)


@pytest.mark.parametrize(
    ("family", "concat"),
    [
        ("glm4_moe", "embed_hidden"),
        ("deepseek_v3", "embed_hidden"),
        ("qwen3_next", "embed_hidden"),
        ("mimo", "hidden_embed"),
    ],
)
def test_traits(family: str, concat: str) -> None:
    # what `forward_target` returns, and what the layers are built for
    assert FAMILIES[family].traits == DraftTraits(
        concat=concat,  # type: ignore[arg-type]
        target_state="post_norm",
        recycle="post_norm",
        chain="output",
        head="shared",
        position="state",
    )


def test_entries_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FAMILIES["mimo"].traits.concat = "embed_hidden"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        FAMILIES["mimo"].default_count = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("family", "key", "name"),
    [
        ("glm4_moe", "norm.weight", "model.layers.48.shared_head.norm.weight"),
        ("deepseek_v3", "block.mlp.gate.weight", "model.layers.48.mlp.gate.weight"),
        ("qwen3_next", "eh_proj.weight", "mtp.fc.weight"),
        ("qwen3_next", "block.input_layernorm.weight", "mtp.layers.2.input_layernorm.weight"),
        ("mimo", "enorm.weight", "model.mtp_layers.2.token_layernorm.weight"),
    ],
)
def test_tensor_names(family: str, key: str, name: str) -> None:
    assert FAMILIES[family].names.of(key, layer=48, depth=2) == name


def test_unknown_family() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        family_of("llama")
    assert str(caught.value) == (
        f"model family 'llama' is not in the family table; families that run: {RUNNABLE}"
    )


def test_known_family_that_does_not_run() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        family_of("step3p7")
    assert str(caught.value) == (
        "model family 'step3p7' carries MTP layers but does not run here: it has an own LM head "
        f"per depth and reads pre-norm states; families that run: {RUNNABLE}"
    )
