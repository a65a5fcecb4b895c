"""The requests of one call, and the steps that arrived for its readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from typing_extensions import Self

from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.hosts.embedded.request import LlmRequest

T = TypeVar("T")
TimedStep = tuple[float, list[StepEvent]]
"""Arrival time of a step, from `time.monotonic`, and its events."""
TimedEvent = tuple[float, StepEvent]
"""An event and its arrival time."""


class Call:
    """Requests that enter the executor in one step, and their events, for any number of readers.

    Args:
        request_ids: ids of the requests.
        made: the requests, which another thread may still be making, or why they are refused.
        report: gets the events of each step, in the engine thread; none is kept.
    """

    def __init__(
        self,
        request_ids: Sequence[int],
        made: Future[list[LlmRequest]],
        report: Callable[[list[StepEvent]], None] | None = None,
    ) -> None:
        self.request_ids = tuple(request_ids)
        self.made = made
        self.steps: list[TimedStep] = []
        """Steps that arrived; a reader that is alone removes them."""
        self.error: Exception | None = None
        """The error that ended the requests."""
        self.done: Future[None] = Future()
        """Done after the last event or the error."""
        self.is_abandoned: Callable[[], bool] = lambda: False
        """Whether there is no reader any more; then the engine aborts the requests."""
        self._num_unfinished = len(self.request_ids)
        self._report = report
        self._wakes: list[Callable[[], object]] = []
        self._end_wakes: list[Callable[[], object]] = []

    @classmethod
    def of(
        cls,
        requests: Sequence[LlmRequest],
        report: Callable[[list[StepEvent]], None] | None = None,
    ) -> Self:
        """Return the call of requests that are made."""
        made: Future[list[LlmRequest]] = Future()
        made.set_result(list(requests))
        return cls([request.request_id for request in requests], made, report)

    # ---- the engine thread ------------------------------------------------------------------

    def put(self, events: list[StepEvent]) -> None:
        """Add the events of a step; the last one of the last request ends the call."""
        if self._report is None:
            self.steps.append((time.monotonic(), events))
        else:
            try:
                self._report(events)
            except Exception as error:
                self.end(error)
        self._num_unfinished -= sum(event.finish_reason is not None for event in events)
        if self._num_unfinished == 0:
            self.end()
        for wake in self._wakes.copy():
            wake()

    def end(self, error: Exception | None = None) -> None:
        """End the call, with an error or without."""
        self.error = self.error or error
        if not self.done.done():
            self.done.set_result(None)
        for wake in (*self._wakes, *self._end_wakes):
            wake()

    # ---- readers ----------------------------------------------------------------------------

    def result(self) -> None:
        """Wait for the end, and raise the error that ended the requests, if any."""
        self.done.result()
        if self.error is not None:
            raise self.error

    def read(self, number: int) -> list[TimedStep] | None:
        """Return the steps from ``number`` on.

        Returns:
            No steps after the last; None: there are none yet.

        Raises:
            Exception: the error that ended the requests.
        """
        is_done = self.done.done()  # before the look at the steps, which arrive first
        steps = self.steps[number:]
        if not steps:
            if not is_done:
                return None
            self.result()
        return steps

    def wait(self) -> list[TimedStep]:
        """Wait for steps, remove and return them; none after the last."""
        arrived: SimpleQueue[None] = SimpleQueue()
        wake = partial(arrived.put, None)
        self._wakes.append(wake)
        try:
            while (steps := self.read(0)) is None:
                arrived.get()
        finally:
            self._wakes.remove(wake)
        del self.steps[: len(steps)]
        return steps

    async def wait_async(self, number: int) -> list[TimedStep]:
        """Wait for steps from ``number`` on, without blocking the event loop."""
        return await _wait(partial(self.read, number), self._wakes)

    async def wait_for_end(self) -> None:
        """Wait until all requests have ended; the event loop is not woken before."""
        await _wait(lambda: self.done.done() or None, self._end_wakes)


async def _wait(look: Callable[[], T | None], wakes: list[Callable[[], object]]) -> T:
    """Return what ``look`` finds, now or after a call of the function that ``wakes`` gets."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(arrived.set)

    wakes.append(wake)
    try:
        while (found := look()) is None:
            await arrived.wait()
            arrived.clear()
        return found
    finally:
        wakes.remove(wake)
