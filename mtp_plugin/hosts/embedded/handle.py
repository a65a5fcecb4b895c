"""Readers of submitted requests: handles and iterators."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from mtp_plugin.hosts.embedded.engine import Engine
from mtp_plugin.hosts.embedded.outputs import RequestOutput
from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.hosts.embedded.results import (
    UNREAD_STEPS,
    UNREAD_STEPS_ASYNC,
    Results,
    TimedEvent,
)
from mtp_plugin.hosts.embedded.tokenising import PendingRequest

T = TypeVar("T")


class RequestHandle:
    """Returned by `LLM.submit`: iterate with ``async for``, ``await`` it, or call ``result()``.

    Each of any number of readers gets all events. Garbage collection of the handle aborts the
    request.

    Raises:
        ExecutorError: the executor was shut down.
    """

    # readers delete `self`: an asyncio task keeps the exception that ended it, whose traceback
    # keeps their frames

    def __init__(
        self,
        pending: PendingRequest,
        engine: Engine,
        owner: object,
        *,
        max_unread: int | None = None,
    ) -> None:
        self._pending = pending
        self._engine = engine
        self._owner = owner  # kept alive
        self._results = Results(len(pending.request_ids), max_unread)
        engine.submit_pending(pending, self._results)
        if not pending.made.done():
            # in a signal handler, submitting to the pool here could deadlock on the pool's own lock
            asyncio.get_running_loop().call_soon_threadsafe(pending.make_in_pool)

    @property
    def request_id(self) -> int:
        """The id in its events, as `LLM.abort` expects it; with ``n`` > 1 that of the first."""
        return self._pending.request_ids[0]

    @property
    def requests(self) -> list[LlmRequest]:
        """The requests of the prompt, one for each of its ``n`` sequences."""
        return self._pending.result()

    @property
    def is_finished(self) -> bool:
        """Whether all events have been produced."""
        return self._results.done.done()

    def result(self) -> RequestOutput:
        """Wait until the request has finished and return its output.

        In a coroutine, ``await`` the handle instead.

        Raises:
            RequestError: the prompt or an option cannot be served.
            ExecutorError: the request ended with an error, the executor was shut down, or this is
                the engine thread.
            Exception: the error of a failed step.
        """
        self._engine.check_can_wait()
        requests = self._pending.result()
        self._results.done.result()
        self._results.check()
        return RequestOutput.of_success(*requests)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """Wait for the output, as :meth:`result` does, in a coroutine."""
        return self._wait_for_output().__await__()

    def __aiter__(self) -> AsyncIterator[StepEvent]:
        """Iterate over all events from the first; leaving early does not abort the request."""
        return self._read()

    async def read_arrived(self) -> AsyncIterator[list[TimedEvent]]:
        """Iterate over all events from the first, with all that have arrived in one list."""
        number = 0
        try:
            while True:
                events, number = await self.read_from(number)
                if not events:
                    return
                yield events
        finally:
            del self

    def read_from(self, number: int) -> Coroutine[Any, Any, tuple[list[TimedEvent], int]]:
        """Wait for events from step ``number`` on.

        Returns:
            All that have arrived, none after the end, and the number of the step after them.
        """
        return self._wait(partial(self._results.read, number))

    def arrived(self) -> list[TimedEvent]:
        """Return the events that have arrived so far."""
        return [(when, event) for when, events in self._results.steps for event in events]

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """Call a function once all events have been produced, in the engine thread or at once."""
        self._results.done.add_done_callback(lambda _: call())

    def abort(self) -> bool:
        """Abort the request; see `LLM.abort`."""
        return True in [self._engine.abort(i) for i in self._pending.request_ids]

    def __del__(self) -> None:
        _drop(self._pending, self._engine)

    async def _read(self) -> AsyncIterator[StepEvent]:
        try:
            async for events in self.read_arrived():
                for _, event in events:
                    yield event
        finally:
            del self

    async def _wait(self, look: Callable[[], T | None]) -> T:
        try:
            self._ensure_made()
            return await self._results.wait_async(look)
        finally:
            del self

    async def _wait_for_output(self) -> RequestOutput:
        try:
            self._ensure_made()
            await self._results.wait_for_end()
            self._results.check()
            return RequestOutput.of_success(*self._pending.result())
        finally:
            del self

    def _ensure_made(self) -> None:
        """Have the requests made: the event loop that was to do so may have ended.

        Raises:
            ExecutorError, RequestError: this thread cannot wait for them or for their results.
        """
        self._engine.check_can_wait()
        if not self._pending.made.done():
            self._pending.check_can_wait()
            self._pending.make_in_pool()


def _drop(pending: PendingRequest, engine: Engine) -> Future[None]:
    pending.claim()  # if no thread has begun to make the requests, none will
    return engine.drop(pending.request_ids)


class EventStream(Iterator[list[StepEvent]]):
    """Returned by `LLM.stream`: iterates over the events of requests, step by step.

    The requests start with the first ``next()``.
    """

    _is_started = _is_closed = False  # of the class: __del__ also runs if __init__ was interrupted

    def __init__(self, requests: Sequence[LlmRequest], engine: Engine, owner: object) -> None:
        self._requests = requests
        self._engine = engine
        self._owner = owner  # kept alive by the iteration
        self._results = Results(len(requests), UNREAD_STEPS)

    def __next__(self) -> list[StepEvent]:
        if self._is_closed:
            raise StopIteration
        self._engine.check_can_wait()
        try:
            if not self._is_started:
                self._is_started = True
                self._engine.submit(self._requests, self._results)
            events = self._results.wait(self._results.take)
            if not events:
                raise StopIteration
            self._engine.wake()
        except BaseException:
            self.close()
            raise
        return events

    def close(self) -> None:
        """Abort unfinished requests, free their resources and end the iteration."""
        self._is_closed = True
        if self._is_started:
            self._drop().result()

    def __del__(self) -> None:
        if self._is_started and not self._is_closed:
            self._drop()

    def _drop(self) -> Future[None]:
        return self._engine.drop([request.request_id for request in self._requests])


class AsyncEventStream(AsyncIterator[StepEvent]):
    """Returned by `LLM.stream_async`: iterates over the events of one prompt.

    The request is aborted when the iteration is left early, its task is cancelled, the event loop
    ends, or the iterator is garbage-collected.
    """

    def __init__(self, pending: PendingRequest, engine: Engine, owner: object) -> None:
        self._pending = pending
        self._engine = engine
        self._events = _read_events(pending, engine, owner)

    @property
    def request_ids(self) -> tuple[int, ...]:
        """The ids in its events, one for each of the ``n`` sequences."""
        return self._pending.request_ids

    async def __anext__(self) -> StepEvent:
        return await self._events.__anext__()

    async def aclose(self) -> None:
        """Abort the request and wait until its resources are freed."""
        await self._events.aclose()
        await asyncio.wrap_future(_drop(self._pending, self._engine))

    def __del__(self) -> None:
        _drop(self._pending, self._engine)


async def _read_events(
    pending: PendingRequest, engine: Engine, owner: object
) -> AsyncGenerator[StepEvent, None]:
    """Submit requests and yield their events; leaving the iteration early aborts them.

    A generator: an event loop that ends closes it.
    """
    engine.check_can_wait()
    handle = RequestHandle(pending, engine, owner, max_unread=UNREAD_STEPS_ASYNC)
    handle._results.is_abandoned = asyncio.get_running_loop().is_closed
    try:
        while events := await handle._wait(handle._results.take):
            engine.wake()
            for event in events:
                yield event
    finally:
        # without waiting, for which a closing loop leaves no time
        _drop(pending, engine)
