"""Queue of a call's events, which the engine thread writes and any thread reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.requests.logprobs import Logprobs

T = TypeVar("T")

UNREAD_STEPS = 2
"""Steps that `LLM.stream` runs ahead of its reader; no further one runs while no other caller needs
it, so that a reader that computes does not compete with the steps for Python's lock."""
UNREAD_STEPS_ASYNC = 32
"""The same for `LLM.stream_async`."""
TimedStep = tuple[float, list[StepEvent]]
"""Arrival time of a step, from `time.monotonic`, and its events."""
TimedEvent = tuple[float, StepEvent]
"""An event and its arrival time."""


class Results:
    """Queue of the events of one call's requests, and how they ended.

    Args:
        num_requests: number of requests.
        max_unread: number of unread steps from which the reader lags; those that follow are merged
            into one. None: all events are kept, for any number of readers.
        report: gets the events of each step, in the engine thread; none is kept.
    """

    def __init__(
        self,
        num_requests: int,
        max_unread: int | None = None,
        report: Callable[[list[StepEvent]], None] | None = None,
    ) -> None:
        self.num_unfinished = num_requests
        """Requests without a last event; the engine counts them."""
        self.aborted: set[int] = set()
        """Ids of requests that were aborted before they started."""
        self.steps: list[TimedStep] = []
        """Steps that arrived; a reader with `max_unread` removes them."""
        self.error: Exception | None = None
        """The error that ended the requests."""
        self.done: Future[None] = Future()
        """Done after the last event or the error."""
        self.is_abandoned: Callable[[], bool] | None = None
        """Returns whether there is no reader any more; then the engine aborts the requests."""
        self._max_unread = max_unread
        self._report = report
        self._late: list[StepEvent] = []
        self._wakes: list[Callable[[], object]] = []
        self._end_wakes: list[Callable[[], object]] = []

    # ---- the engine thread ------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the reader lags; no step runs while this holds for all requests."""
        return self._max_unread is not None and len(self.steps) >= self._max_unread

    def put(self, events: list[StepEvent]) -> None:
        """Add the events of a step."""
        if self._report is not None:
            try:
                self._report(events)
            except Exception as error:
                self.fail(error)
            events = []
        if self._late:
            events, self._late = _merged(self._late, events), []
        if self.num_unfinished == 0:
            self._end(events)
        elif self.is_full:
            self._late = events
        elif events:
            self.steps.append((time.monotonic(), events))
            for wake in self._wakes.copy():
                wake()

    def fail(self, error: Exception) -> None:
        """End all requests with an error."""
        self.error = self.error or error
        self._end(self._late)

    def _end(self, events: list[StepEvent]) -> None:
        if events:
            self.steps.append((time.monotonic(), events))
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

    def read(self, number: int, most: int | None = None) -> list[TimedStep] | None:
        """Return steps from ``number`` on, ``most`` at most.

        Returns:
            No steps after the last; None: there are none yet.

        Raises:
            Exception: the error that ended the requests.
        """
        is_done = self.done.done()  # before the look at the steps, which arrive first
        steps = self.steps[number:][:most]
        if not steps:
            if not is_done:
                return None
            self.result()
        return steps

    def wait(self) -> list[StepEvent]:
        """Wait for a step, remove it and return its events; none after the last."""
        arrived: SimpleQueue[None] = SimpleQueue()

        def wake() -> None:
            arrived.put(None)

        self._wakes.append(wake)
        try:
            while (steps := self.read(0, 1)) is None:
                arrived.get()
        finally:
            self._wakes.remove(wake)
        del self.steps[: len(steps)]
        return [event for _, events in steps for event in events]

    async def wait_async(self, number: int) -> list[TimedStep]:
        """Wait for steps from ``number`` on, without blocking the event loop."""
        steps = self.read(number)
        return await _wait(partial(self.read, number), self._wakes) if steps is None else steps

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


def _merged(first: list[StepEvent], second: list[StepEvent]) -> list[StepEvent]:
    """Return the events of two steps with one event per request."""
    events = {event.request_id: event for event in first}
    for event in second:
        before = events.get(event.request_id)
        if before is not None:
            event = event._replace(
                token_ids=before.token_ids + event.token_ids,
                segments=before.segments + event.segments,
                logprobs=Logprobs.joined((before.logprobs, event.logprobs)),
                prompt_logprobs=before.prompt_logprobs,
            )
        events[event.request_id] = event
    return list(events.values())
