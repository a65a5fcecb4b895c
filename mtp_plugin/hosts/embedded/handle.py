"""Readers of submitted requests: handles and iterators."""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Sequence,
)
from typing import Any

from mtp_plugin.hosts.embedded.call import Call, TimedEvent, TimedStep
from mtp_plugin.hosts.embedded.engine import Engine
from mtp_plugin.hosts.embedded.outputs import RequestOutput, extended_output
from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.hosts.embedded.request import LlmRequest


class Handle:
    """A submitted prompt: ``await`` it, or call ``result()``. Garbage collection aborts it.

    Args:
        owner: kept alive.

    Raises:
        ExecutorError: the executor was shut down.
    """

    # readers delete `self`: an asyncio task keeps the exception that ended it, whose traceback
    # keeps their frames

    def __init__(self, call: Call, engine: Engine, owner: object) -> None:
        self._engine = engine
        self._owner = owner
        engine.submit(call)
        self._call = call

    def __del__(self) -> None:
        if hasattr(self, "_call"):  # also called if `submit` raised an error
            self._engine.drop(self._call)

    @property
    def request_id(self) -> int:
        """The id in its events, as `LLM.abort` expects it; with ``n`` > 1 that of the first."""
        return self._call.request_ids[0]

    @property
    def requests(self) -> list[LlmRequest]:
        """The requests of the prompt, one for each of its ``n`` sequences."""
        return self._call.made.result()

    @property
    def is_finished(self) -> bool:
        """Whether all events have been produced."""
        return self._call.done.done()

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
        self._call.result()
        return RequestOutput.of_success(*self.requests)

    async def aresult(self) -> RequestOutput:
        """Wait for the output, as :meth:`result` does, in a coroutine."""
        try:
            self._engine.check_can_wait()
            await self._call.wait_for_end()
            self._call.result()
            return RequestOutput.of_success(*self.requests)
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
            self._engine.check_can_wait()
            return await self._call.wait_async(number)
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
        return [(when, event) for when, events in self._call.steps for event in events]

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """Call a function once all events have been produced, in the engine thread or at once."""
        self._call.done.add_done_callback(lambda _: call())

    def abort(self) -> bool:
        """Abort the request; see `LLM.abort`."""
        return True in [self._engine.abort(i) for i in self._call.request_ids]


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

    def __init__(self, call: Call, engine: Engine, owner: object, *, streaming: bool) -> None:
        super().__init__(call, engine, owner)
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
                self._engine.drop(self._call)
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
            self._engine.drop(self._call)
            raise

    def close(self) -> None:
        """End the coroutine and abort the request, unless it has finished."""
        if self._running is not None:
            self._running.close()
        self._engine.drop(self._call)

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


class AsyncEventStream(AsyncIterator[StepEvent]):
    """Returned by `LLM.stream_async`: iterates over the events of one prompt.

    The request is aborted when the iteration is left early, its task is cancelled, the event loop
    ends, or the iterator is garbage-collected.

    Args:
        request_ids: the ids in its events, one for each of the ``n`` sequences.
        events: a generator, which an event loop that ends closes.
    """

    def __init__(self, request_ids: Sequence[int], events: AsyncGenerator[StepEvent, None]) -> None:
        self.request_ids = tuple(request_ids)
        self._events = events

    async def __anext__(self) -> StepEvent:
        return await self._events.__anext__()

    async def aclose(self) -> None:
        """Abort the request and wait until its resources are freed."""
        await self._events.aclose()
