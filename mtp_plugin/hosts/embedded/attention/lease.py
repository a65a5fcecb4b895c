"""Replaces a model's attention while executors use it, and restores it afterwards."""

from __future__ import annotations

from threading import Lock
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

from torch import nn


class SharedModel(Protocol):
    """A model whose attention can be chosen."""

    @property
    def target(self) -> Any:
        """With a config that names the attention."""
        ...

    def set_attn_implementation(self, name: str) -> None:
        """Choose it by its name."""
        ...


class AttentionLease:
    """Selects paged attention for a model until :meth:`release`.

    Executors may share a model: the first one replaces its attention, the last one restores it.

    Args:
        function: name of the attention function registered with transformers.
    """

    _lock = Lock()
    _held: ClassVar[WeakKeyDictionary[nn.Module, tuple[str, int]]] = WeakKeyDictionary()
    """Original attention and number of leases, by target."""

    def __init__(self, model: SharedModel, function: str) -> None:
        self._model: SharedModel | None = model
        with self._lock:
            former = str(model.target.config._attn_implementation)
            former, holders = self._held.get(model.target, (former, 0))
            model.set_attn_implementation(function)
            self._held[model.target] = former, holders + 1

    def release(self) -> None:
        """Release the lease; the last release restores the original attention."""
        with self._lock:
            model, self._model = self._model, None
            if model is None:
                return
            former, holders = self._held.pop(model.target)
            if holders > 1:
                self._held[model.target] = former, holders - 1
            else:
                model.set_attn_implementation(former)
