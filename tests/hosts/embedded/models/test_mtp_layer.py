from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mtp_plugin.errors import UnsupportedModelError
from mtp_plugin.hosts.embedded.models import FAMILIES, DraftTraits, MTPLayer, load_model
from mtp_plugin.infer.language_model import cache_argument

H = 4


class PlusOneNorm(nn.Module):
    """Counts as a norm and is easy to see: adds its weight."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


class RecordingBlock(nn.Module):
    """A decoder layer that returns its input and keeps what it was called with."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.calls: list[dict[str, Any]] = []

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.calls.append(kwargs)
        return x


class RecordingRotary(nn.Module):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, position_ids


class Config:
    hidden_size = H
    rms_norm_eps = 1e-3


class Metadata:
    _seq_lens_cuda = torch.tensor([2, 1, 3], dtype=torch.int32)

    def model_kwargs(self) -> dict[str, Any]:
        return {
            "past_key_values": "pool",
            "attention_mask": None,
            "use_cache": True,
            "attn_metadata": self,
        }


def make_layer(**traits: Any) -> MTPLayer:
    declared = {
        "concat": "embed_hidden",
        "target_state": "post_norm",
        "recycle": "post_norm",
        **traits,
    }
    layer = MTPLayer(
        Config(),
        block_class=RecordingBlock,
        norm_class=PlusOneNorm,
        layer_idx=7,
        traits=DraftTraits(**declared),
        rotary=RecordingRotary(),
    )
    # the two halves of the joined input differ by their factor
    first, second = torch.eye(H), 10 * torch.eye(H)
    layer.eh_proj.weight.data = torch.cat([first, second], dim=1)
    return layer


def run(layer: MTPLayer, metadata: Any, **extra: Any) -> torch.Tensor:
    embedding = nn.Embedding.from_pretrained(torch.arange(5.0)[:, None].expand(5, H))
    rows = 6
    return layer(
        embed_tokens=embedding,
        input_ids=torch.full((rows,), 3, dtype=torch.int32),
        position_ids=torch.arange(rows)[None],
        hidden_states=torch.full((rows, H), 0.5),
        attn_metadata=metadata,
        **extra,
    )


@pytest.mark.parametrize(
    ("concat", "expected"),
    # embedding 3, state 0.5, each plus 1 by its norm; the last norm adds 1
    [("embed_hidden", 4 + 15 + 1), ("hidden_embed", 1.5 + 40 + 1)],
)
def test_order_of_the_two_halves(concat: str, expected: float) -> None:
    out = run(make_layer(concat=concat), Metadata())
    assert torch.equal(out, torch.full((6, H), expected))


def test_the_head_sees_one_norm() -> None:
    handed_on = {}
    for recycle in ("post_norm", "pre_norm"):
        layer = make_layer(recycle=recycle)
        handed_on[recycle] = run(layer, Metadata())
        logits = layer.shared_head(handed_on[recycle], nn.Identity(), Metadata(), return_all=True)
        assert torch.equal(logits, torch.full((6, H), 20.0))
    assert torch.equal(handed_on["post_norm"], handed_on["pre_norm"] + 1)


@pytest.mark.parametrize(("position", "shift"), [("state", 0), ("token", 1)])
def test_position_ids_of_the_rotary_embedding(position: str, shift: int) -> None:
    layer = make_layer(position=position)
    run(layer, Metadata())
    (call,) = layer.block.calls
    assert torch.equal(call["position_ids"], torch.arange(6)[None] + shift)
    assert torch.equal(call["position_embeddings"][1], torch.arange(6)[None] + shift)


def test_keyword_arguments_come_from_the_metadata() -> None:
    layer, metadata = make_layer(), Metadata()
    run(layer, metadata, all_rank_num_tokens=None, all_rank_max_num_tokens=6)
    (call,) = layer.block.calls
    assert set(call) == {
        "position_embeddings",
        "position_ids",
        cache_argument(),
        "attention_mask",
        "use_cache",
        "attn_metadata",
    }
    assert call["attn_metadata"] is metadata
    assert call[cache_argument()] == "pool"


def test_head_rows() -> None:
    layer = make_layer()
    hidden = torch.arange(6.0)[:, None].expand(6, H)
    last = layer.shared_head(hidden, nn.Identity(), Metadata())
    assert last[:, 0].tolist() == [1, 2, 5]
    # as many rows as are given, whatever the sequence lengths say
    all_rows = layer.shared_head(hidden[:4], nn.Identity(), Metadata(), return_all=True)
    assert torch.equal(all_rows, hidden[:4])


def test_layer_index_and_eps_reach_the_modules() -> None:
    layer = make_layer()
    assert (layer.layer_idx, layer.block.layer_idx) == (7, 7)
    assert layer.enorm.eps == layer.hnorm.eps == layer.norm.eps == 1e-3


def test_the_shared_rotary_embedding_is_not_a_child() -> None:
    layer = make_layer()
    assert isinstance(layer.rotary, RecordingRotary)
    assert not any(isinstance(module, RecordingRotary) for module in layer.modules())


def test_own_heads_are_refused() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        make_layer(head="own")
    assert str(caught.value) == (
        "MTP layer: expected a family with a shared LM head, got head='own'"
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sequences_of_a_batch_do_not_see_each_other(
    checkpoint: Callable[..., Path], plain_attention: type, family: str
) -> None:
    model = load_model(checkpoint(family))
    layer = model.mtp_layers[0]
    prompts = [torch.arange(3, 3 + n) for n in (4, 1, 6)]

    def drafts(prompts: list[torch.Tensor]) -> torch.Tensor:
        metadata = plain_attention(*map(len, prompts))
        ids = torch.cat(prompts)
        positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])[None]
        states = model.forward_target(ids, positions, metadata)
        handed_on = layer(
            embed_tokens=model.embed_tokens,
            input_ids=ids + 1,
            position_ids=positions,
            hidden_states=states,
            attn_metadata=metadata,
        )
        return layer.shared_head(handed_on, model.lm_head, metadata)

    together = drafts(prompts)
    alone = torch.cat([drafts([prompt]) for prompt in prompts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
