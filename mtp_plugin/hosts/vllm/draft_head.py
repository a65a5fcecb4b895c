"""A reduced LM head for drafts: that of the lowest token ids, which are the most frequent ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from mtp_plugin.errors import ConfigError

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
        self._whole = (head,)  # in a tuple: its weight is no parameter of the draft model
        self.num_ids = num_ids
        self.quant_method = head.quant_method

    @property
    def weight(self) -> torch.Tensor:
        """[V', H]"""
        weight: torch.Tensor = self._whole[0].weight
        return weight[: self.num_ids]

    @staticmethod
    def cpu_linear(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Called by vLLM on a CPU, in place of a product with packed weights."""
        return functional.linear(x, weight, bias)


def reduce_heads(model: Any, num_ids: int) -> int:
    """Replace the heads of a draft model by their first rows; returns how many.

    Args:
        model: vLLM's MTP model, after it shares the target's head.

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
            _check(head, model_name, num_ids)
            reduced[id(head)] = DraftHead(head, num_ids)
        setattr(owner, name, reduced[id(head)])
    if not reduced:
        raise ConfigError(f"{KEY}: {model_name} has no LM head that is known; leave it out")
    return len(reduced)


def _heads(model: Any) -> Iterator[tuple[Any, str]]:
    """Yield the owner and the attribute of every head."""
    if isinstance(getattr(model, "lm_head", None), nn.Module):
        yield model, "lm_head"
    layers = getattr(getattr(model, "model", None), "layers", ())
    for layer in layers.values() if isinstance(layers, nn.ModuleDict) else layers:
        shared = getattr(layer, "shared_head", None)
        if isinstance(getattr(shared, "head", None), nn.Module):
            yield shared, "head"


def _check(head: Any, model: str, num_ids: int) -> None:
    method = type(getattr(head, "quant_method", None)).__name__
    if method not in _UNQUANTIZED or not hasattr(head, "weight"):
        raise ConfigError(f"{KEY}: {model} has a quantized LM head ({method}); leave it out")
    if getattr(head, "bias", None) is not None:
        raise ConfigError(f"{KEY}: {model} has an LM head with a bias; leave it out")
    if num_ids > head.weight.shape[0]:
        raise ConfigError(
            f"{KEY}: expected at most the vocabulary of {head.weight.shape[0]}, got {num_ids}"
        )
