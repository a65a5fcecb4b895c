"""Results of submitted requests, which the engine thread writes and any thread reads."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
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
TimedEvent = tuple[float, StepEvent]
"""An event and its arrival time, from `time.monotonic`."""


class Results:
    """Events of the requests of one call, and how they ended.

    Args:
        num_requests: number of requests.
        max_unread: number of unread steps from which the reader lags; those that follow are merged
            into one. None: all events are kept, for any number of readers.
    """

    def __init__(self, num_requests: int, max_unread: int | None = None) -> None:
        self.num_unfinished = num_requests
        """Requests without a last event; the engine counts them."""
        self.aborted: set[int] = set()
        """Ids of requests that were aborted before they started."""
        self.steps: list[tuple[float, list[StepEvent]]] = []
        """Arrival time and events of each step; a reader with `max_unread` removes them."""
        self.error: Exception | None = None
        """The error that ended the requests."""
        self.done: Future[None] = Future()
        """Done after the last event or the error."""
        self.is_abandoned: Callable[[], bool] | None = None
        """Returns whether there is no reader any more; then the engine aborts the requests."""
        self._max_unread = max_unread
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
        if self._late:
            events, self._late = _merged(self._late, events), []
        if self.num_unfinished == 0:
            self._end(events)
        elif self.is_full:
            self._late = events
        else:
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

    def check(self) -> None:
        """Raise the error that ended the requests, if any."""
        if self.error is not None:
            raise self.error

    def take(self) -> list[StepEvent] | None:
        """Remove and return the events of a step; none after the last; None: there are none yet.

        Raises:
            Exception: the error that ended the requests.
        """
        is_done = self.done.done()  # before the look at the steps, which arrive first
        try:
            return self.steps.pop(0)[1]
        except IndexError:
            if not is_done:
                return None
        self.check()
        return []

    def read(self, number: int) -> tuple[list[TimedEvent], int] | None:
        """Return the events from step ``number`` on, and the number of the step after them.

        Returns:
            No events after the last; None: there are none yet.

        Raises:
            Exception: the error that ended the requests.
        """
        is_done = self.done.done()
        steps = self.steps[number:]
        if steps:
            events = [(when, event) for when, events in steps for event in events]
            return events, number + len(steps)
        if not is_done:
            return None
        self.check()
        return [], number

    def wait(self, look: Callable[[], T | None]) -> T:
        """Return what ``look`` finds, now or after a later step."""
        arrived: SimpleQueue[None] = SimpleQueue()

        def wake() -> None:
            arrived.put(None)

        self._wakes.append(wake)
        try:
            while (found := look()) is None:
                arrived.get()
            return found
        finally:
            self._wakes.remove(wake)

    async def wait_async(self, look: Callable[[], T | None]) -> T:
        """:meth:`wait` without blocking the event loop."""
        found = look()
        return await _wait(look, self._wakes) if found is None else found

    async def wait_for_end(self) -> None:
        """Wait until all requests have ended; unlike for events, the loop is not woken before."""
        await _wait(lambda: self.done.done() or None, self._end_wakes)


class BatchResults(Results):
    """Events that are reported, in the engine thread, and not kept."""

    def __init__(self, num_requests: int, report: Callable[[list[StepEvent]], None]) -> None:
        super().__init__(num_requests)
        self._report = report

    def put(self, events: list[StepEvent]) -> None:
        """See `Results.put`."""
        try:
            self._report(events)
        except Exception as error:
            self.fail(error)
        if self.num_unfinished == 0:
            self._end([])


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


async def _wait(look: Callable[[], T | None], wakes: list[Callable[[], object]]) -> T:
    """Return what ``look`` finds, now or after a call of the function that ``wakes`` gets."""
    arrived, waker = asyncio.Event(), LoopWaker.of_this_loop()

    def wake() -> None:
        waker.wake(arrived)

    wakes.append(wake)
    try:
        while (found := look()) is None:
            await arrived.wait()
            arrived.clear()
        return found
    finally:
        wakes.remove(wake)


class LoopWaker:
    """Sets events of an event loop from other threads, with one call of the loop for many."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        # weak: an event refers to its loop, which a loop that was closed would then keep
        self._due: deque[weakref.ref[asyncio.Event]] = deque()
        self._is_scheduled = False

    @classmethod
    def of_this_loop(cls) -> LoopWaker:
        """Return the one of the running event loop."""
        loop = asyncio.get_running_loop()
        waker = _wakers.get(loop)
        if waker is None:
            waker = _wakers[loop] = cls(loop)
        return waker

    def wake(self, event: asyncio.Event) -> None:
        """Set an event soon, unless the loop was closed."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            return
        self._due.append(weakref.ref(event))
        if not self._is_scheduled:
            self._is_scheduled = True
            with suppress(RuntimeError):  # it was closed since
                loop.call_soon_threadsafe(self._set_due)

    def _set_due(self) -> None:
        self._is_scheduled = False
        while self._due:
            event = self._due.popleft()()
            if event is not None:
                event.set()


_wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = (
    weakref.WeakKeyDictionary()
)
