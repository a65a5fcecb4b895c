"""Saves the state of an object graph and restores it in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

import torch


class Snapshot:
    """State of all containers, tensors and objects of this package that a root refers to.

    Args:
        root: an object.
        skipped: types whose instances are neither saved nor searched.
    """

    def __init__(self, root: object, skipped: tuple[type, ...] = ()) -> None:
        self._restore: list[Callable[[], object]] = []
        self._kept: list[object] = []  # ids stay unique while these exist
        seen: set[int] = set()
        stack = [root]
        while stack:
            value = stack.pop()
            if id(value) in seen or isinstance(value, (*skipped, type, Enum)):
                continue
            seen.add(id(value))
            self._kept.append(value)
            stack += self._save(value)

    @torch.inference_mode()  # some tensors were made in it
    def restore(self) -> None:
        """Write the saved state back."""
        for each in self._restore:
            each()

    def _save(self, value: Any) -> list[Any]:
        """Save one object; return what it refers to."""
        if isinstance(value, torch.Tensor):
            self._restore.append(partial(value.copy_, value.clone()))
            return []
        if isinstance(value, dict):
            self._restore.append(partial(_refill, value, value.copy(), value.update))
            return list(value.values())
        if isinstance(value, (list, deque)):
            self._restore.append(partial(_refill, value, value.copy(), value.extend))
            return list(value)
        if isinstance(value, set):
            self._restore.append(partial(_refill, value, value.copy(), value.update))
            return list(value)
        if isinstance(value, tuple):
            return list(value)
        if type(value).__module__.startswith("mtp_plugin.") and hasattr(value, "__dict__"):
            return self._save(vars(value))
        return []


def _refill(container: Any, saved: Any, fill: Callable[[Any], object]) -> None:
    container.clear()
    fill(saved)
