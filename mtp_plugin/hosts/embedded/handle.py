"""Handle of a submitted request: read its events, wait for its output, or abort it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from mtp_plugin.hosts.embedded.engine import Engine
from mtp_plugin.hosts.embedded.event_stream import ResultLog, TimedEvent, drop, events_of
from mtp_plugin.hosts.embedded.outputs import RequestOutput
from mtp_plugin.hosts.embedded.pending_request import PendingRequest
from mtp_plugin.hosts.embedded.py_executor import StepEvent
from mtp_plugin.hosts.embedded.request import LlmRequest


def is_in_a_loop() -> bool:
    """Whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class RequestHandle:
    """Returned by `LLM.submit`: iterate with ``async for``, ``await`` it, or call ``result()``.

    Each of any number of readers gets all events. Garbage collection of the handle aborts the
    request.

    Raises:
        ExecutorError: the executor was shut down.
    """

    def __init__(
        self, pending: PendingRequest, engine: Engine, pool: Executor, owner: object
    ) -> None:
        self._pending = pending
        self._engine = engine
        self._pool = pool
        self._owner = owner
        self._log = ResultLog(len(pending.request_ids))
        if pending.is_made:
            engine.submit(pending.result(), self._log)
            return
        engine.expect(pending.request_ids, self._log)
        pending.on_made(partial(_submit, engine, pending.request_ids))
        # in a signal handler, submitting to the pool here could deadlock on the pool's own lock
        asyncio.get_running_loop().call_soon_threadsafe(pool.submit, pending.make)

    @property
    def request_id(self) -> int:
        """The id in its events, as `LLM.abort` expects it; with ``n`` > 1 that of the first."""
        return self._pending.request_id

    @property
    def requests(self) -> list[LlmRequest]:
        """The requests of the prompt, one for each of its ``n`` sequences."""
        return self._pending.result()

    @property
    def is_finished(self) -> bool:
        """Whether all events have been produced."""
        return self._log.done.done()

    def __aiter__(self) -> AsyncIterator[StepEvent]:
        """Iterate over all events from the first; leaving early does not abort the request."""
        return self._read()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """Wait for the output, as :meth:`result` does, in a coroutine."""
        return self._read_to_its_end().__await__()

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
        self._log.done.result()
        for results in self._log.results:
            if results is not None:
                events_of(results)
        return RequestOutput.of_success(*requests)

    def add_done_callback(self, call: Callable[[], object]) -> None:
        """Call a function once all events have been produced, in the engine thread or at once."""
        self._log.done.add_done_callback(lambda _: call())

    def abort(self) -> bool:
        """Abort the request; see `LLM.abort`."""
        return True in [self._engine.abort(i) for i in self._pending.request_ids]

    def __del__(self) -> None:
        drop(self._pending, self._engine)

    async def read_arrived(self) -> AsyncIterator[list[TimedEvent]]:
        """Iterate over all events from the first, with all that have arrived in one list."""
        try:
            await self._made()
            async for events in self._log.read_arrived():
                yield events
        finally:
            del self

    async def read_from(self, number: int) -> tuple[list[TimedEvent], int]:
        """Wait for events from a result on; see `ResultLog.read_from`."""
        try:
            await self._made()
            return await self._log.read_from(number)
        finally:
            del self

    def arrived(self) -> list[TimedEvent]:
        """Return the events that have arrived so far."""
        return self._log.arrived()

    async def _read(self) -> AsyncIterator[StepEvent]:
        try:
            await self._made()
            async for event in self._log.read():
                yield event
        finally:
            # an asyncio task keeps the exception that ended it, whose traceback keeps this frame
            del self

    async def _read_to_its_end(self) -> RequestOutput:
        try:
            requests = await self._made()
            await self._log.wait()
            for results in self._log.results:
                if results is not None:
                    events_of(results)
            return RequestOutput.of_success(*requests)
        finally:
            del self

    async def _made(self) -> list[LlmRequest]:
        try:
            self._engine.check_can_wait()
            return await self._pending.result_async(self._pool)
        finally:
            del self


def _submit(engine: Engine, request_ids: Sequence[int], made: Future[list[LlmRequest]]) -> None:
    error = made.exception()
    if isinstance(error, Exception):
        engine.reject(request_ids, error)
    else:
        engine.submit_expected(made.result())
