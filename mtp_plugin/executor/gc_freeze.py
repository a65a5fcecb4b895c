"""Python's collector and executors: what is there when they are ready is none of its business."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any


class GCFreeze:
    """Keeps Python's collector from what is there when executors are ready.

    While requests come and go the collector runs over everything once in a few hundred steps, and
    over the modules of a model that takes longer than many steps. Where a host has frozen objects
    of its own, it is left to the host.
    """

    HOST_FROZE = 10_000
    """Frozen objects from which a host must have done it: Python itself keeps some hundreds."""

    def __init__(self) -> None:
        self._num_owners = 0
        self._num_imported = 0

    def freeze_imports(self) -> None:
        """Freeze what was imported, for a process that is no host but a command of this package."""
        gc.freeze()
        self._num_imported = gc.get_freeze_count()

    def hold(self, owner: object) -> Callable[[], Any]:
        """Freeze what is there; calling the result, or the owner's end, undoes it."""
        frozen_by_host = gc.get_freeze_count() - self._num_imported
        if self._num_owners == 0 and frozen_by_host >= self.HOST_FROZE:
            return lambda: None
        gc.collect()
        gc.freeze()
        self._num_owners += 1
        return weakref.finalize(owner, self._leave)

    def _leave(self) -> None:
        self._num_owners -= 1
        if self._num_owners == 0:
            gc.unfreeze()
            self._num_imported = 0


of_process = GCFreeze()
"""Every executor's, since a process has one collector."""
