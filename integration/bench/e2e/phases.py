"""Time the phases of a step with marks at their boundaries, read after every step.

The marks are set by forward hooks. Where a step is captured in a CUDA graph they become event nodes
of the graph, so that every replay records them anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from mtp_plugin.hosts.embedded.models import LoadedModel
from mtp_plugin.speculative.drafting.worker import SpecWorker

TARGET = "target"
"""The target's layers, and its head."""
ACCEPTANCE = "acceptance"
"""Acceptance and bookkeeping: all of the worker but draft layers and heads."""
LAYERS = "draft_layers"
HEAD = "draft_head"
PHASES = (TARGET, ACCEPTANCE, LAYERS, HEAD)


class PhaseClock(Protocol):
    """Times the phases of steps."""

    def mark(self, phase: str | None) -> None:
        """Mark the start of a phase; None marks the end of the step."""

    def begin(self) -> None:
        """Prepare for the launch of a step."""

    def read(self) -> dict[str, float] | None:
        """Return the milliseconds per phase since :meth:`begin`; the device must be idle.

        None if no whole step was marked.
        """


class HostClock:
    """Time the phases of steps that run on the CPU.

    Args:
        now: seconds.
    """

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now = now
        self._marks: list[tuple[str | None, float]] = []

    def mark(self, phase: str | None) -> None:
        if phase == TARGET:
            self._marks = []
        self._marks.append((phase, self._now()))

    def begin(self) -> None:
        self._marks = []

    def read(self) -> dict[str, float] | None:
        if not _is_whole(self._marks):
            return None
        return _durations(self._marks, lambda start, end: (end - start) * 1000)


class DeviceClock:
    """Time the phases of steps on a CUDA device, eager or replayed from graphs."""

    def __init__(self) -> None:
        self._marks: list[tuple[str | None, torch.cuda.Event]] = []
        self._captured: list[list[tuple[str | None, torch.cuda.Event]]] = []
        self._capturing = False
        self._began: torch.cuda.Event | None = None

    def mark(self, phase: str | None) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        if phase == TARGET or capturing != self._capturing:
            self._marks, self._capturing = [], capturing
        # outside of a capture an external event is like any other
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self._marks.append((phase, event))
        if phase is None and capturing and _is_whole(self._marks):
            self._captured.append(self._marks)
            self._marks = []

    def begin(self) -> None:
        self._marks = []
        self._began = torch.cuda.Event(enable_timing=True)
        self._began.record()

    def read(self) -> dict[str, float] | None:
        if _is_whole(self._marks):
            return _durations(self._marks, _elapsed)
        began = self._began
        if began is None:
            return None
        for marks in self._captured:
            if _was_recorded_after(began, marks[0][1]):
                return _durations(marks, _elapsed)
        return None


class GapClock:
    """Time the gaps between graph replays: sampler, copies, and waiting."""

    def __init__(self) -> None:
        self._replays: list[tuple[torch.cuda.Event, torch.cuda.Event] | None] = []
        self._counts_next = False

    def count_next(self) -> None:
        """Time the next replay; gaps are measured between two timed replays."""
        self._counts_next = True

    @contextmanager
    def around(self) -> Iterator[None]:
        """Context of the launch of a replay."""
        if not self._counts_next:
            self._replays.append(None)
            yield
            return
        self._counts_next = False
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._replays.append((start, end))

    def read(self) -> list[float]:
        """Return the milliseconds between consecutive replays; the device must be idle."""
        return [
            _elapsed(before[1], later[0])
            for before, later in itertools.pairwise(self._replays)
            if before is not None and later is not None
        ]


def clock_for(device: torch.device) -> PhaseClock:
    """Return the clock for a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@contextmanager
def watch(model: LoadedModel, clock: PhaseClock) -> Iterator[None]:
    """Mark the phases of every step of an executor around the model.

    Graphs must be captured inside this context to contain the marks.
    """

    def entering(phase: str | None) -> Callable[..., None]:
        return lambda *_: clock.mark(phase)

    def worker_enters(module: nn.Module, *_: Any) -> None:
        if isinstance(module, SpecWorker):
            clock.mark(ACCEPTANCE)

    def worker_ends(module: nn.Module, *_: Any) -> None:
        if isinstance(module, SpecWorker):
            clock.mark(None)

    with ExitStack() as undo:
        undo.callback(_mark_target(model, clock))
        handles = [
            # the worker does not exist before its executor does
            register_module_forward_pre_hook(worker_enters),
            register_module_forward_hook(worker_ends),
        ]
        for layer in model.mtp_layers:
            handles.append(layer.register_forward_pre_hook(entering(LAYERS)))
            handles.append(layer.register_forward_hook(entering(ACCEPTANCE)))
            undo.callback(_mark_head(layer, clock))
        for handle in handles:
            undo.callback(handle.remove)
        yield


def _mark_target(model: LoadedModel, clock: PhaseClock) -> Callable[[], None]:
    """Mark the start of the target; returns the function that removes the mark."""
    forward = model.forward_target

    def marked(*arguments: Any, **options: Any) -> torch.Tensor:
        clock.mark(TARGET)
        return forward(*arguments, **options)

    # the model is frozen, and its decoder need not be a module
    vars(model)["forward_target"] = marked
    return partial(vars(model).pop, "forward_target")


def _mark_head(layer: Any, clock: PhaseClock) -> Callable[[], None]:
    """Mark the layer's head, a method without hooks; returns the function that removes the mark."""
    head = layer.shared_head

    def marked(*arguments: Any, **options: Any) -> Any:
        clock.mark(HEAD)
        logits = head(*arguments, **options)
        clock.mark(ACCEPTANCE)
        return logits

    layer.shared_head = marked
    return partial(delattr, layer, "shared_head")


def _is_whole(marks: list[tuple[str | None, Any]]) -> bool:
    return len(marks) > 1 and marks[0][0] == TARGET and marks[-1][0] is None


def _durations(
    marks: list[tuple[str | None, Any]], elapsed: Callable[[Any, Any], float]
) -> dict[str, float]:
    spent = dict.fromkeys(PHASES, 0.0)
    for (phase, start), (_, end) in itertools.pairwise(marks):
        if phase is not None:
            spent[phase] += elapsed(start, end)
    return spent


def _elapsed(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end))


def _was_recorded_after(began: torch.cuda.Event, event: torch.cuda.Event) -> bool:
    try:
        return bool(began.elapsed_time(event) >= 0)
    except RuntimeError:  # its graph was never replayed
        return False
