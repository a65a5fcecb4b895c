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
from typing import Any

from mtp_plugin.hosts.embedded.admission import PendingRequest
from mtp_plugin.hosts.embedded.engine import Engine
from mtp_plugin.hosts.embedded.outputs import RequestOutput, extended_output
from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.hosts.embedded.results import (
    UNREAD_STEPS,
    UNREAD_STEPS_ASYNC,
    Results,
    TimedEvent,
    TimedStep,
)
from mtp_plugin.hosts.embedded.tokenising import Submission


class _Reader:
    """Reads events of requests. Garbage collection aborts those that are unfinished."""

    _submission: Submission | None = None  # __del__ also runs if __init__ was interrupted
    _is_closed = False

    def __init__(self, submission: Submission, engine: Engine) -> None:
        self._engine = engine
        self._submission = submission

    def __del__(self) -> None:
        if self._submission is not None and not self._is_closed:
            self._engine.drop(self._submission)


class Handle(_Reader):
    """A submitted prompt: ``await`` it, or call ``result()``.

    Raises:
        ExecutorError: the executor was shut down.
    """

    # readers delete `self`: an asyncio task keeps the exception that ended it, whose traceback
    # keeps their frames

    def __init__(
        self, pending: PendingRequest, engine: Engine, owner: object, max_unread: int | None = None
    ) -> None:
        super().__init__(pending, engine)
        self._pending = pending
        self._owner = owner  # kept alive
        self._results = Results(len(pending.request_ids), max_unread)
        engine.submit(pending, self._results)
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
        self._results.result()
        return RequestOutput.of_success(*requests)

    async def aresult(self) -> RequestOutput:
        """Wait for the output, as :meth:`result` does, in a coroutine."""
        try:
            self._ensure_made()
            await self._results.wait_for_end()
            self._results.result()
            return RequestOutput.of_success(*self._pending.result())
        finally:
            del self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """Wait for the output, as :meth:`result` does, in a coroutine."""
        return self.aresult().__await__()

    async def read_from(self, number: int) -> list[TimedStep]:
        """Wait for steps from ``number`` on and return all that have arrived, none after the end.

        Raises:
            Exception: see :meth:`result`.
        """
        try:
            self._ensure_made()
            return await self._results.wait_async(number)
        finally:
            del self

    async def read_arrived(self) -> AsyncIterator[list[TimedEvent]]:
        """Iterate over all events from the first, with all that have arrived in one list."""
        number = 0
        try:
            while steps := await self.read_from(number):
                number += len(steps)
                yield [(when, event) for when, events in steps for event in events]
        finally:
            del self

    def arrived(self) -> list[TimedEvent]:
        """Return the events that have arrived so far."""
        return [(when, event) for when, events in self._results.steps for event in events]

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """Call a function once all events have been produced, in the engine thread or at once."""
        self._results.done.add_done_callback(lambda _: call())

    def abort(self) -> bool:
        """Abort the request; see `LLM.abort`."""
        return True in [self._engine.abort(i) for i in self._pending.request_ids]

    def _ensure_made(self) -> None:
        """Have the requests made: the event loop that was to do so may have ended.

        Raises:
            ExecutorError, RequestError: this thread cannot wait for them or for their results.
        """
        self._engine.check_can_wait()
        if not self._pending.made.done():
            self._pending.check_can_wait()
            self._pending.make_in_pool()


class RequestHandle(Handle):
    """Returned by `LLM.submit`: iterate with ``async for``, ``await`` it, or call ``result()``.

    Each of any number of readers gets all events. Garbage collection of the handle aborts the
    request.
    """

    def __aiter__(self) -> AsyncIterator[StepEvent]:
        """Iterate over all events from the first; leaving early does not abort the request."""
        return self._read()

    async def _read(self) -> AsyncIterator[StepEvent]:
        try:
            async for events in self.read_arrived():
                for _, event in events:
                    yield event
        finally:
            del self


class GenerationHandle(Handle, Coroutine[Any, Any, RequestOutput], AsyncIterator[RequestOutput]):
    """Returned by `LLM.generate_async`: ``await`` it, run it as a coroutine, or iterate.

    ``async for`` yields a `RequestOutput` with the whole output so far whenever there are new
    tokens; a reader that lags gets the tokens of several steps at once. ``finished`` of the last
    one is True. Without ``streaming``, this last one is the only one, and an ``await`` that is
    cancelled aborts the request.
    """

    def __init__(
        self, pending: PendingRequest, engine: Engine, owner: object, *, streaming: bool
    ) -> None:
        super().__init__(pending, engine, owner)
        self._streaming = streaming
        self._num_read = 0
        self._last: RequestOutput | None = None
        self._running: Coroutine[Any, Any, RequestOutput] | None = None

    async def aresult(self) -> RequestOutput:
        """Wait for the final output; see `result`."""
        try:
            return await super().aresult()
        except BaseException:
            if not self._streaming:
                self._engine.drop(self._pending)
            raise
        finally:
            del self

    def send(self, value: Any) -> Any:
        """Run as a coroutine that returns the final output."""
        self._running = self._running or self.aresult()
        return self._running.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error in the coroutine; a cancelled task aborts the request."""
        self._running = self._running or self.aresult()
        try:
            return self._running.throw(*error)
        except BaseException:
            self._engine.drop(self._pending)
            raise

    def close(self) -> None:
        """End the coroutine and abort the request, unless it has finished."""
        if self._running is not None:
            self._running.close()
        self._engine.drop(self._pending)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Iterate over the output so far; several iterations share its parts."""
        return self

    async def __anext__(self) -> RequestOutput:
        """Return the output so far, once it has new tokens.

        A call that is cancelled, by ``asyncio.wait_for`` for example, loses no tokens: the next one
        returns them.
        """
        try:
            if not self._streaming:
                await self.aresult()
            while True:
                start = self._num_read
                steps = await self.read_from(start)
                if start == self._num_read:  # else another reader got these steps
                    break
            if not steps:
                raise StopAsyncIteration
            self._num_read += len(steps)
            events = [event for _, events in steps for event in events]
            self._last = extended_output(self._last, self.requests, events)
            return self._last
        finally:
            del self


class EventStream(_Reader, Iterator[list[StepEvent]]):
    """Returned by `LLM.stream`: iterates over the events of requests, step by step.

    The requests start with the first ``next()``.
    """

    _submission: Submission

    def __init__(self, requests: Sequence[LlmRequest], engine: Engine, owner: object) -> None:
        super().__init__(Submission.of(requests), engine)
        self._owner = owner  # kept alive by the iteration
        self._results = Results(len(requests), UNREAD_STEPS)
        self._is_started = False

    def __next__(self) -> list[StepEvent]:
        if self._is_closed:
            raise StopIteration
        self._engine.check_can_wait()
        try:
            if not self._is_started:
                self._is_started = True
                self._engine.submit(self._submission, self._results)
            events = self._results.wait()
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
        self._engine.drop(self._submission).result()


class AsyncEventStream(_Reader, AsyncIterator[StepEvent]):
    """Returned by `LLM.stream_async`: iterates over the events of one prompt.

    The request is aborted when the iteration is left early, its task is cancelled, the event loop
    ends, or the iterator is garbage-collected.
    """

    def __init__(self, pending: PendingRequest, engine: Engine, owner: object) -> None:
        super().__init__(pending, engine)
        self._pending = pending
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
        await asyncio.wrap_future(self._engine.drop(self._pending))


async def _read_events(
    pending: PendingRequest, engine: Engine, owner: object
) -> AsyncGenerator[StepEvent, None]:
    """Submit requests and yield their events; leaving the iteration early aborts them.

    A generator: an event loop that ends closes it.
    """
    engine.check_can_wait()
    handle = Handle(pending, engine, owner, UNREAD_STEPS_ASYNC)
    handle._results.is_abandoned = asyncio.get_running_loop().is_closed
    try:
        while steps := await handle.read_from(0):
            del handle._results.steps[: len(steps)]
            engine.wake()
            for _, events in steps:
                for event in events:
                    yield event
    finally:
        # without waiting, for which a closing loop leaves no time
        engine.drop(pending)
