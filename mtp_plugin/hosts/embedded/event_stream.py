"""Readers of the events of requests: synchronous and asynchronous iterators."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue

from mtp_plugin.hosts.embedded.engine import Engine, StepResults
from mtp_plugin.hosts.embedded.pending_request import PendingRequest
from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.requests.logprobs import Logprobs

UNREAD_STEPS = 2
"""Steps that `LLM.stream` runs ahead of its reader; no further one runs while no other caller needs
it, so that a reader that computes does not compete with the steps for Python's lock."""
UNREAD_STEPS_ASYNC = 32
"""The same for asynchronous readers."""
TimedEvent = tuple[float, StepEvent]
"""An event and its arrival time, from `time.monotonic`."""


def events_of(results: StepResults) -> list[StepEvent]:
    """Return the events of a step, or raise the error that took their place."""
    if isinstance(results, Exception):
        try:
            raise results
        finally:
            del results  # the error's traceback refers to this frame
    return results


class EventBuffer:
    """Results that a reader has not read yet: of ``limit`` steps, and later ones merged into one.

    Args:
        num_requests: number of requests whose results it receives.
        limit: number of unread steps from which it is full.
        wake: called when there is something to read, in the engine thread; False: there is no
            reader any more.
    """

    def __init__(
        self, num_requests: int, limit: int, wake: Callable[[], bool] = lambda: True
    ) -> None:
        self.unread: SimpleQueue[StepResults | None] = SimpleQueue()
        """None follows the last results."""
        self._limit = limit
        self._wake = wake
        self._late: list[StepEvent] = []
        self._num_unfinished = num_requests

    @property
    def is_full(self) -> bool:
        """Whether the reader lags."""
        return self.unread.qsize() >= self._limit

    def put(self, results: StepResults) -> bool:
        """Take results; see `Sink`."""
        is_end = True
        if not isinstance(results, Exception):
            self._num_unfinished -= sum(event.finish_reason is not None for event in results)
            is_end = self._num_unfinished == 0
            results = _merged(self._late, results) if self._late else results
            self._late = []
            if self.is_full and not is_end:
                self._late = results
                return True
        elif self._late:
            self.unread.put(self._late)
        self.unread.put(results)
        if is_end:
            self.unread.put(None)
        return self._wake()


def _merged(first: list[StepEvent], second: list[StepEvent]) -> list[StepEvent]:
    """Return the events of two steps with one event per request."""
    events = {event.request_id: event for event in first}
    for event in second:
        before = events.get(event.request_id)
        if before is not None:
            logprobs = event.logprobs
            if before.logprobs is not None and logprobs is not None:
                logprobs = Logprobs(decode=logprobs.decode)
                logprobs.extend(before.logprobs)
                logprobs.extend(event.logprobs or Logprobs())
            event = event._replace(
                token_ids=before.token_ids + event.token_ids,
                segments=before.segments + event.segments,
                logprobs=logprobs,
                prompt_logprobs=before.prompt_logprobs,
            )
        events[event.request_id] = event
    return list(events.values())


class BatchResult:
    """Waits for the end of requests whose events are not read.

    Args:
        num_requests: number of requests.
        report: called with the events of every step, in the engine thread.
    """

    is_full = False

    def __init__(self, num_requests: int, report: Callable[[list[StepEvent]], None]) -> None:
        self._num_unfinished = num_requests
        self._report = report
        self._done: SimpleQueue[Exception | None] = SimpleQueue()

    def put(self, results: StepResults) -> bool:
        """Take results; see `Sink`."""
        try:
            events = events_of(results)
            self._report(events)
        except Exception as error:
            self._done.put(error)
            return False
        self._num_unfinished -= sum(event.finish_reason is not None for event in events)
        if self._num_unfinished == 0:
            self._done.put(None)
        return True

    def wait(self) -> None:
        """Wait for the last result, or raise the error that took its place."""
        error = self._done.get()
        if error is not None:
            try:
                raise error
            finally:
                del error


class EventStream(Iterator[list[StepEvent]]):
    """Iterates over the events of requests, step by step; they start with the first ``next()``.

    Raises:
        ExecutorError: the executor was shut down, or this is the engine thread.
    """

    _is_started = False  # class attributes: __del__ also runs if __init__ was interrupted
    _is_closed = False

    def __init__(self, requests: Sequence[LlmRequest], engine: Engine, owner: object) -> None:
        self._requests = requests
        self._engine = engine
        self._owner = owner  # kept alive by the iteration
        self._buffer = EventBuffer(len(requests), UNREAD_STEPS)

    def __next__(self) -> list[StepEvent]:
        if self._is_closed:
            raise StopIteration
        self._engine.check_can_wait()
        unread = self._buffer.unread
        try:
            if not self._is_started:
                self._is_started = True
                self._engine.submit(self._requests, self._buffer)
            results = unread.get()
            if results is None:
                unread.put(None)  # for another thread that reads this stream
                raise StopIteration
            self._engine.wake()
            return events_of(results)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort unfinished requests, free their resources and end the iteration."""
        if self._is_started and not self._is_closed:
            self._is_closed = True
            if self._abort():
                self._engine.flush()
        self._is_closed = True

    def __del__(self) -> None:
        if self._is_started and not self._is_closed:
            self._abort()

    def _abort(self) -> bool:
        return True in [self._engine.abort(request.request_id) for request in self._requests]


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

    def wake(self, event: asyncio.Event) -> bool:
        """Set an event soon; False: the loop was closed."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            return False
        self._due.append(weakref.ref(event))
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                loop.call_soon_threadsafe(self._set_due)
            except RuntimeError:  # it was closed since
                return False
        return True

    def _set_due(self) -> None:
        self._is_scheduled = False
        while self._due:
            event = self._due.popleft()()
            if event is not None:
                event.set()


_wakers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker] = (
    weakref.WeakKeyDictionary()
)


async def read_events(
    pending: PendingRequest, engine: Engine, pool: Executor
) -> AsyncGenerator[StepEvent, None]:
    """Submit requests and yield their events; leaving the iteration early aborts them.

    Raises:
        RequestError: the prompt or an option cannot be served.
        ExecutorError: the executor was shut down, or this is the engine thread.
    """
    engine.check_can_wait()
    arrived, waker = asyncio.Event(), LoopWaker.of_this_loop()
    buffer = EventBuffer(len(pending.request_ids), UNREAD_STEPS_ASYNC, lambda: waker.wake(arrived))
    try:
        engine.submit(await pending.result_async(pool), buffer)
        while True:
            arrived.clear()
            try:
                results = buffer.unread.get_nowait()
            except Empty:
                await arrived.wait()
                continue
            if results is None:
                return
            engine.wake()
            for event in events_of(results):
                yield event
    finally:
        # without waiting, for which a closing loop leaves no time
        drop(pending, engine)


def drop(pending: PendingRequest, engine: Engine) -> None:
    """Abort requests without readers, without waiting."""
    if pending.abandon():
        engine.forget(pending.request_ids)
    else:
        engine.abort_all(pending.request_ids)


class AsyncEventStream(AsyncIterator[StepEvent]):
    """Asynchronous iterator over the events of one prompt, as `LLM.stream_async` returns.

    The request is aborted when the iteration is left early, its task is cancelled, the event loop
    ends, or the iterator is garbage-collected.
    """

    def __init__(
        self, pending: PendingRequest, engine: Engine, pool: Executor, owner: object
    ) -> None:
        self._pending = pending
        self._engine = engine
        self._owner = owner  # kept alive by the iteration
        self._events = read_events(pending, engine, pool)

    @property
    def request_ids(self) -> tuple[int, ...]:
        """The ids in its events, one for each of the ``n`` sequences."""
        return self._pending.request_ids

    async def __anext__(self) -> StepEvent:
        return await self._events.__anext__()

    async def aclose(self) -> None:
        """Abort the request and wait until its resources are freed."""
        await self._events.aclose()
        await asyncio.wrap_future(self._engine.barrier())

    def __del__(self) -> None:
        drop(self._pending, self._engine)


class ResultLog:
    """All results of a submitted prompt, kept for any number of readers."""

    is_full = False

    def __init__(self, num_requests: int) -> None:
        self.results: list[StepResults | None] = []
        """None follows the last results."""
        self.times: list[float] = []
        """Arrival time of each of ``results``, from `time.monotonic`."""
        self.wakes: list[Callable[[], object]] = []
        """Called after every result, in the engine thread."""
        self.end_wakes: list[Callable[[], object]] = []
        """Called after the last result, in the engine thread."""
        self.done: Future[None] = Future()
        self._num_unfinished = num_requests

    def put(self, results: StepResults) -> bool:
        """Append results and wake the readers; see `Sink`."""
        is_end = True
        if not isinstance(results, Exception):
            self._num_unfinished -= sum(event.finish_reason is not None for event in results)
            is_end = self._num_unfinished == 0
        self.times.append(time.monotonic())
        self.results.append(results)
        if is_end:
            self.results.append(None)
            if not self.done.done():
                self.done.set_result(None)
        for wake in self.wakes.copy():
            wake()
        if is_end:
            for wake in self.end_wakes.copy():
                wake()
        return True

    async def read(self) -> AsyncIterator[StepEvent]:
        """Yield all events from the first."""
        async for events in self.read_arrived():
            for _, event in events:
                yield event

    async def read_arrived(self) -> AsyncIterator[list[TimedEvent]]:
        """Yield all events from the first, those that have arrived since the last ones at once."""
        number = 0
        while True:
            found, number = await self.read_from(number)
            if not found:
                return
            yield found

    async def read_from(self, number: int) -> tuple[list[TimedEvent], int]:
        """Wait for events from the result ``number`` on.

        Returns:
            All that have arrived, none after the end, and the number of the result after them.
        """
        found, following = self._found(number)
        if found or following is None:
            return found, number if following is None else following
        with _registered(self.wakes) as arrived:
            while True:
                arrived.clear()
                found, following = self._found(number)
                if found or following is None:
                    return found, number if following is None else following
                await arrived.wait()

    def _found(self, number: int) -> tuple[list[TimedEvent], int | None]:
        """Return arrived events from a result on, and the number after them; None: the end."""
        found: list[TimedEvent] = []
        while number < len(self.results):
            results = self.results[number]
            if results is None:
                return found, number if found else None
            if isinstance(results, Exception) and found:
                break
            when = self.times[number]
            found += [(when, event) for event in events_of(results)]
            number += 1
        return found, number

    async def wait(self) -> None:
        """Wait until all results have arrived."""
        with _registered(self.end_wakes) as arrived:
            if not self.done.done():
                await arrived.wait()

    def arrived(self) -> list[TimedEvent]:
        """Return the events that have arrived so far."""
        return [
            (when, event)
            for when, results in zip(self.times, self.results, strict=False)
            if isinstance(results, list)
            for event in results
        ]


@contextmanager
def _registered(wakes: list[Callable[[], object]]) -> Iterator[asyncio.Event]:
    """Yield an event of the running event loop that is set by a function in ``wakes``."""
    arrived, waker = asyncio.Event(), LoopWaker.of_this_loop()

    def wake() -> None:
        waker.wake(arrived)

    wakes.append(wake)
    try:
        yield arrived
    finally:
        wakes.remove(wake)
