"""The reduced LM head of drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.vllm.draft_head import (
    CopiedDraftHead,
    DraftHead,
    follow_weights,
    mark_stale,
    reduce_heads,
)
from tests.hosts.vllm import head_ranks


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
    assert len(reduce_heads(model, range(5))) == 1
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
    with pytest.raises(
        ConfigError, match=r"draft_vocab: expected ids of the LM head's vocabulary of 9, got 9"
    ):
        reduce_heads(make_model(make_head()), [1, 9])
    with pytest.raises(ConfigError, match=r"quantized LM head \(Fp8Method\); leave it out"):
        reduce_heads(make_model(make_head(Fp8Method)), range(5))
    biased, grouped = make_head(), make_head()
    biased.bias = nn.Parameter(torch.zeros(9))
    with pytest.raises(ConfigError, match="has an LM head with a bias; leave it out"):
        reduce_heads(make_model(biased), range(5))
    grouped.parallel_group = object()
    with pytest.raises(ConfigError, match="split over another group than that of tensor"):
        reduce_heads(make_model(grouped), range(5))
    model = type("Gemma4MTP", (SimpleNamespace,), {})(lm_head=make_head())
    with pytest.raises(ConfigError, match="Gemma4MTP is not supported; leave it out"):
        reduce_heads(model, range(5))
    with pytest.raises(ConfigError, match="SimpleNamespace has no LM head that is known"):
        reduce_heads(SimpleNamespace(), range(5))


LISTED = [1, 4, 5, 8]


def test_modules_with_heads_of_their_own_have_a_copy_each() -> None:
    heads = [make_head(), make_head()]
    model = make_model(heads[0], of_layers=True)
    model.model.layers["4"] = make_model(heads[1], of_layers=True).model.layers["3"]
    reduced = reduce_heads(model, LISTED)
    modules = [layer.shared_head.head for layer in model.model.layers.values()]
    assert modules == reduced
    assert model.lm_head is reduced[0]
    for head, copied in zip(heads, reduced, strict=True):
        assert torch.equal(copied.weight[: len(LISTED)], head.weight[LISTED])
        assert not copied.weight[len(LISTED) :].any()
        assert len(copied.weight) == 64


def test_rows_of_padding_are_no_ids() -> None:
    head = make_head()
    head.org_vocab_size = 8
    with pytest.raises(ConfigError, match=r"LM head's vocabulary of 8, got 8$"):
        reduce_heads(make_model(head), LISTED)
    assert len(reduce_heads(make_model(head), LISTED[:-1])) == 1


class Target(nn.Module):
    """A model whose weights are loaded by name."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = make_head()

    def load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights.items():
            parameters[name].data.copy_(weight)


class Speculator:
    """Returns the draft logits of one hidden state per row."""

    def __init__(self, target: Target) -> None:
        self.model = Target()
        self.model.lm_head = target.lm_head

    def propose(self, x: torch.Tensor) -> torch.Tensor:
        head = self.model.lm_head
        return head.quant_method.apply(head, x, None)[:, : head.num_ids]


@pytest.mark.parametrize("ids", [range(5), LISTED])
def test_drafts_follow_weights_that_either_model_loads(ids: list[int] | range) -> None:
    target = Target()
    speculator, x = Speculator(target), torch.eye(4)  # products are exact
    (head,) = heads = reduce_heads(speculator.model, ids)
    follow_weights(speculator, target, heads)
    assert isinstance(head, CopiedDraftHead) == (ids is LISTED)
    address = head.weight.data_ptr()
    for model in (target, speculator.model, target):
        model.load_weights({"lm_head.weight": torch.randn(9, 4)})
        expected = functional.linear(x, target.lm_head.weight[list(ids)])
        assert torch.equal(speculator.propose(x), expected)
    target.lm_head.weight.data.normal_()  # by other means, after which vLLM's methods mark it
    mark_stale()
    assert torch.equal(
        speculator.propose(x), functional.linear(x, target.lm_head.weight[list(ids)])
    )
    assert head.weight.data_ptr() == address
    assert list(speculator.model.parameters()) == []


def test_weights_are_copied_once_for_many_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target()
    speculator, count = Speculator(target), 0
    heads = reduce_heads(speculator.model, LISTED)
    follow_weights(speculator, target, heads)
    refresh = CopiedDraftHead.refresh

    def counted(head: CopiedDraftHead) -> None:
        nonlocal count
        count += 1
        refresh(head)

    monkeypatch.setattr(CopiedDraftHead, "refresh", counted)
    speculator.propose(torch.randn(1, 4))
    assert count == 0
    for _ in range(3):
        target.load_weights({"lm_head.weight": torch.randn(9, 4)})
    for _ in range(2):
        speculator.propose(torch.randn(1, 4))
    assert count == 1


def test_ranks_have_equal_parts_of_the_list() -> None:
    """Two processes; of an odd number of ids the second one has a row of padding."""
    head_ranks.main()
