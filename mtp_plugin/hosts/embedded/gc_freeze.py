"""Excludes long-lived objects from Python's garbage collection while executors run."""

from __future__ import annotations

import atexit
import gc
import weakref
from collections.abc import Callable
from typing import Any


class GCFreeze:
    """Freezes the objects that exist when an executor is ready (``gc.freeze``).

    Otherwise the collector traverses all objects once in a few hundred steps, which takes longer
    than many steps because of a model's modules. If the host process has frozen objects itself,
    nothing is changed.
    """

    HOST_FROZE = 10_000
    """At least this many frozen objects: the host process froze them. Python itself freezes some
    hundreds."""

    def __init__(self) -> None:
        self._num_owners = 0
        self._num_imported = 0

    def freeze_imports(self) -> None:
        """Freeze imported modules; for the commands of this package, not for host processes."""
        gc.freeze()
        # Triton reports what is frozen at exit as leaks
        atexit.register(gc.unfreeze)
        self._num_imported = gc.get_freeze_count()

    def hold(self, owner: object) -> Callable[[], Any]:
        """Freeze all objects until the returned function is called or ``owner`` is collected."""
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
"""Shared by all executors of the process."""
