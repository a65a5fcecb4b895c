"""The reduced LM head of drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.vllm.draft_head import DraftHead, reduce_heads


class UnquantizedEmbeddingMethod:
    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, layer.weight, bias)


class Fp8Method(UnquantizedEmbeddingMethod):
    pass


def make_head(method: type = UnquantizedEmbeddingMethod) -> nn.Module:
    head = nn.Module()
    head.weight = nn.Parameter(torch.randn(9, 4), requires_grad=False)
    head.quant_method = method()
    return head


def make_model(head: nn.Module, *, of_layers: bool = False) -> nn.Module:
    model = nn.Module()
    model.lm_head = head
    if of_layers:
        model.model = nn.Module()
        layer = nn.Module()
        layer.shared_head = nn.Module()
        layer.shared_head.head = head
        model.model.layers = nn.ModuleDict({"3": layer})
    return model


@pytest.mark.parametrize("of_layers", [False, True])
def test_heads_are_the_first_rows_of_the_target(of_layers: bool) -> None:
    head, x = make_head(), torch.randn(2, 4)
    model = make_model(head, of_layers=of_layers)
    assert reduce_heads(model, 5) == 1
    reduced = model.model.layers["3"].shared_head.head if of_layers else model.lm_head
    assert isinstance(reduced, DraftHead)
    assert list(model.parameters()) == []
    for _ in range(2):
        logits = reduced.quant_method.apply(reduced, x, None)
        assert torch.equal(logits, functional.linear(x, head.weight[:5]))
        head.weight.data.copy_(torch.randn(9, 4))  # new weights are seen
    head.weight = nn.Parameter(torch.randn(9, 4), requires_grad=False)
    assert torch.equal(reduced.weight, head.weight[:5])


def test_heads_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft_vocab: expected at most the vocabulary of 9"):
        reduce_heads(make_model(make_head()), 10)
    with pytest.raises(ConfigError, match=r"quantized LM head \(Fp8Method\); leave it out"):
        reduce_heads(make_model(make_head(Fp8Method)), 5)
    model = type("Gemma4MTP", (SimpleNamespace,), {})(lm_head=make_head())
    with pytest.raises(ConfigError, match="Gemma4MTP is not supported; leave it out"):
        reduce_heads(model, 5)
    with pytest.raises(ConfigError, match="SimpleNamespace has no LM head that is known"):
        reduce_heads(SimpleNamespace(), 5)
