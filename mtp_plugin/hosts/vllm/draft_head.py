"""A reduced LM head for drafts, with the rows of the ids that may be drafted."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn import functional

from mtp_plugin.errors import ConfigError
from mtp_plugin.speculative.rows.options import rows_per_rank

KEY = "additional_config.mtp_plugin.draft_vocab"
_UNQUANTIZED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")


class DraftHead(nn.Module):
    """The first rows of another head, read where they lie.

    Nothing is copied, so that new weights of the target are those of the drafts too.

    Args:
        head: vLLM's ``ParallelLMHead``. num_ids: V', at most its rows.
    """

    tp_size = 1
    """Read by vLLM's ``LogitsProcessor``."""

    def __init__(self, head: Any, num_ids: int) -> None:
        super().__init__()
        self.whole = (head,)  # in a tuple: its weight is no parameter of the draft model
        self.num_ids = num_ids
        self.quant_method = head.quant_method

    @property
    def weight(self) -> torch.Tensor:
        """[V', H], and rows of padding if the head has them."""
        weight: torch.Tensor = self.whole[0].weight
        padded = rows_per_rank(self.num_ids)
        return weight[: padded if padded <= len(weight) else self.num_ids]

    @staticmethod
    def cpu_linear(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Called by vLLM on a CPU, in place of a product with packed weights."""
        return functional.linear(x, weight, bias)


class CopiedDraftHead(DraftHead):
    """Listed rows of another head, copied.

    The ranks of tensor parallelism have equal parts of the list, in ascending order of ids; rows
    that pad the last parts are 0. The copy keeps its address, which captured graphs read.

    Args:
        head: vLLM's ``ParallelLMHead``; its ranks have consecutive ranges of ids.
        ids: [V'] ascending.
        group: vLLM's ``GroupCoordinator`` of the ranks; not read with one rank.
    """

    def __init__(self, head: Any, ids: Sequence[int], group: Any) -> None:
        super().__init__(head, len(ids))
        self.tp_size = getattr(head, "tp_size", 1)
        self._group = group
        part = rows_per_rank(len(ids), self.tp_size)
        # on the host: sleep of level 2 discards what was allocated on the device while loading
        self._ids = torch.full((self.tp_size, part), -1)
        self._ids.view(-1)[: len(ids)] = torch.tensor(ids)
        rows: torch.Tensor = head.weight.new_empty(part, head.weight.shape[1])
        self._rows = rows
        self.refresh()
        _copies.add(self)

    @property
    def weight(self) -> torch.Tensor:
        """[V' / ranks, H], V' with padding"""
        return self._rows

    @torch.inference_mode()
    def refresh(self) -> None:
        """Copy the rows again; all ranks call it."""
        self.is_stale = False
        head = self.whole[0]
        weight = head.weight
        if self.tp_size == 1:
            ids = self._ids[0, : self.num_ids]
            torch.index_select(weight, 0, ids.to(weight.device), out=self._rows[: self.num_ids])
            self._rows[self.num_ids :] = 0
            return
        first, end = (
            head.shard_indices.org_vocab_start_index,
            head.shard_indices.org_vocab_end_index,
        )
        for rank, ids in enumerate(self._ids):
            is_own = rank == self._group.rank_in_group
            rows = self._rows if is_own else torch.empty_like(self._rows)
            rows.zero_()
            (found,) = torch.where((ids >= first) & (ids < end))
            source = (ids[found] - first).to(weight.device)
            rows.index_copy_(0, found.to(weight.device), weight.index_select(0, source))
            # every row is 0 on all ranks but one: the sum of its bytes is the row
            torch.distributed.reduce(
                rows.view(torch.uint8), self._group.ranks[rank], group=self._group.device_group
            )


_copies: WeakSet[CopiedDraftHead] = WeakSet()


def mark_stale() -> None:
    """Let every copy be refreshed before the next draft pass."""
    for head in _copies:
        head.is_stale = True


def reduce_heads(model: Any, ids: Sequence[int]) -> list[DraftHead]:
    """Replace the heads of a draft model by their rows of the ids that may be drafted.

    The lowest ids of a head that is not split are read where they lie, others are copied.

    Args:
        model: vLLM's MTP model, after it shares the target's head. ids: ascending; a range: the
            lowest ones.

    Raises:
        ConfigError: the model has no head of its own class, or one that cannot be cut.
    """
    model_name = type(model).__name__
    if model_name.startswith("Gemma4"):  # it selects rows of the whole head by itself
        raise ConfigError(f"{KEY}: {model_name} is not supported; leave it out")
    reduced: dict[int, DraftHead] = {}
    for owner, name in list(_heads(model)):
        head = getattr(owner, name)
        if id(head) not in reduced:
            _check(head, model_name, ids)
            reduced[id(head)] = _reduced(head, ids)
        setattr(owner, name, reduced[id(head)])
    if not reduced:
        raise ConfigError(f"{KEY}: {model_name} has no LM head that is known; leave it out")
    return list(reduced.values())


def _reduced(head: Any, ids: Sequence[int]) -> DraftHead:
    if getattr(head, "tp_size", 1) > 1:
        from vllm.distributed.parallel_state import get_tp_group

        return CopiedDraftHead(head, ids, get_tp_group())
    return DraftHead(head, len(ids)) if isinstance(ids, range) else CopiedDraftHead(head, ids, None)


def follow_weights(speculator: Any, target: Any, heads: Sequence[DraftHead]) -> None:
    """Refresh the copies before the first draft pass after either model loaded weights.

    Methods of these objects are replaced, since vLLM and RL frameworks call them on objects. What
    `mark_stale` marks is copied in `propose`, outside of captured graphs.
    """
    draft = speculator.model
    places = [(owner, name, getattr(owner, name)) for owner, name in _heads(draft)]

    def before_draft_weights() -> None:  # a loader expects the parameters of the whole heads
        for owner, name, head in places:
            setattr(owner, name, head.whole[0])

    def after_draft_weights() -> None:
        for owner, name, head in places:
            setattr(owner, name, head)
        mark_stale()

    def refresh() -> None:
        for head in copies:
            if head.is_stale:
                head.refresh()

    _surround(draft, "load_weights", before_draft_weights, after_draft_weights)
    copies = [head for head in heads if isinstance(head, CopiedDraftHead)]
    if copies:
        _surround(target, "load_weights", _nothing, mark_stale)
        _surround(speculator, "propose", refresh, _nothing)


def reload_drafts(vllm_config: Any, draft: Any, path: str | None) -> None:
    """Read the weights of a draft model from its checkpoint, in place.

    Args:
        draft: vLLM's draft model. path: of the checkpoint that the target was read from; None: the
            one that both were read from before. A draft model of its own keeps its own.
    """
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    speculative = vllm_config.speculative_config
    config = copy.copy(speculative.draft_model_config)
    if path is not None and speculative.method == "mtp":
        config.model, config.revision = path, None
    loader = get_model_loader(vllm_config.load_config)
    initialize_layerwise_reload(draft)
    draft.load_weights(loader.get_all_weights(config, draft))
    finalize_layerwise_reload(draft, config)


def _surround(owner: Any, name: str, before: Any, after: Any) -> None:
    """Let a method of an object call ``before`` and ``after``, also if it raises."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return original(*args, **kwargs)
        finally:
            after()

    setattr(owner, name, method)


def _nothing() -> None:
    return None


def _heads(model: Any) -> Iterator[tuple[Any, str]]:
    """Yield the owner and the attribute of every head."""
    if isinstance(getattr(model, "lm_head", None), nn.Module):
        yield model, "lm_head"
    layers = getattr(getattr(model, "model", None), "layers", ())
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        shared = getattr(layer, "shared_head", None)
        if isinstance(getattr(shared, "head", None), nn.Module):
            yield shared, "head"


def _check(head: Any, model: str, ids: Sequence[int]) -> None:
    method = type(getattr(head, "quant_method", None)).__name__
    if method not in _UNQUANTIZED or not hasattr(head, "weight"):
        raise ConfigError(f"{KEY}: {model} has a quantized LM head ({method}); leave it out")
    if getattr(head, "bias", None) is not None:
        raise ConfigError(f"{KEY}: {model} has an LM head with a bias; leave it out")
    if getattr(head, "parallel_group", None) is not None:
        raise ConfigError(
            f"{KEY}: {model} has an LM head that is split over another group than that of tensor "
            "parallelism; leave it out"
        )
    vocab = getattr(head, "org_vocab_size", head.weight.shape[0])
    if ids[-1] >= vocab:
        raise ConfigError(
            f"{KEY}: expected ids of the LM head's vocabulary of {vocab}, got {ids[-1]}"
        )
