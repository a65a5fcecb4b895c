"""A head over some rows gives the columns of the whole head's logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded.models import FAMILIES, fuse, load_model
from mtp_plugin.hosts.embedded.models.draft_head import cut_head

IDS = torch.tensor([0, 3, 4, 17], dtype=torch.int32)


@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_columns_of_the_whole(bias: bool) -> None:
    rng = torch.Generator().manual_seed(1)
    head = nn.Linear(8, 20, bias=bias, dtype=torch.bfloat16)
    # few bits, so that no order of additions rounds
    for parameter in head.parameters():
        parameter.data.copy_(torch.randint(-4, 5, parameter.shape, generator=rng))
    states = torch.randint(-2, 3, (5, 8), generator=rng).bfloat16()
    cut, whole = cut_head(head, IDS), head(states)
    for parameter in head.parameters():
        parameter.data.zero_()
    # of its own memory, and of no more than it needs
    assert torch.equal(cut(states), whole[:, IDS.long()])
    assert cut.weight.untyped_storage().nbytes() == 4 * 8 * 2
    assert (cut.in_features, cut.out_features) == (8, 4)
    assert not any(parameter.requires_grad for parameter in cut.parameters())


class Capped(nn.Linear):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states).tanh()


@pytest.mark.parametrize("head", [Capped(8, 20), nn.Sequential(nn.Linear(8, 20))])
def test_heads_that_have_no_rows(head: nn.Module) -> None:
    expected = "mtp.draft_vocab: expected an LM head that is a linear layer, "
    with pytest.raises(ConfigError, match=rf"^{expected}.* got {type(head).__name__}$"):
        cut_head(head, IDS)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_and_layer(
    checkpoint: Callable[..., Path], plain_attention: type, family: str
) -> None:
    """`shared_head` takes the cut head of its model, fused or not."""
    model = load_model(checkpoint(family))
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    for each in (model, fuse(model, kernels="reference")):
        layer, head = each.mtp_layers[0], each.draft_head(IDS)
        whole = layer.shared_head(states, each.lm_head, plain_attention(2, 3))
        cut = layer.shared_head(states, head, plain_attention(2, 3))
        torch.testing.assert_close(cut, whole[:, IDS.long()])
        assert cut.shape == (2, 4)
        assert layer.shared_head(states, head, None, True).shape == (5, 4)
