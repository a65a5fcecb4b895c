"""A request that was handed in, to be read, waited for or ended when its caller likes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from concurrent.futures import Future
from functools import partial
from typing import Any

from mtp_plugin.executor.async_steps import AsyncSteps, Told
from mtp_plugin.executor.dispatcher import Dispatcher, events_of
from mtp_plugin.executor.outputs import RequestOutput
from mtp_plugin.executor.pending_request import PendingRequest
from mtp_plugin.executor.py_executor import StepEvent
from mtp_plugin.executor.request import LlmRequest


class RequestHandle:
    """What `LLM.submit` gives: ``async for`` its events, ``await`` it, or ask for its ``result``.

    Any number of readers get all events each. Where an event loop runs, it goes on by itself, and
    its texts are tokenised in a thread; elsewhere any call that steps takes it along. A handle that
    nobody holds ends its request.

    Raises:
        ExecutorError: the executor was shut down.
    """

    def __init__(
        self, pending: PendingRequest, dispatcher: Dispatcher, steps: AsyncSteps, owner: object
    ) -> None:
        self._pending = pending
        self._dispatcher = dispatcher
        self._steps = steps
        self._owner = owner
        self._told = Told()
        if pending.is_made:
            dispatcher.start([pending.now()], self._told.put)
        else:
            dispatcher.expect(pending.request_id, self._told.put)
            pending.on_made(partial(_hand_in, dispatcher, pending.request_id))
        steps.begin(pending)

    @property
    def request_id(self) -> int:
        """As its events have it, and `LLM.abort` takes it."""
        return self._pending.request_id

    @property
    def is_finished(self) -> bool:
        """Whether no further event will come."""
        return not self._dispatcher.holds_id(self.request_id)

    def __aiter__(self) -> AsyncIterator[StepEvent]:
        """Its events from the first one on; leaving early ends nothing."""
        return self._steps.read(self._told, self._pending, self)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """As :meth:`result`, for coroutines."""
        return self._read_to_its_end().__await__()

    def result(self) -> RequestOutput:
        """Step until it has ended, and what it gave; in a coroutine ``await`` the handle instead.

        Raises:
            RequestError: its texts cannot be served.
            ExecutorError: it ended with an error, the executor was shut down, or a step runs in
                this thread.
            Exception: what a step failed with.
        """
        self._dispatcher.expect_to_wait()
        request = self._pending.now()
        while not self.is_finished:
            self._dispatcher.advance()
        self._dispatcher.drain()
        for results in self._told.results:
            events_of(results)
        return RequestOutput.of_success(request)

    def abort(self) -> bool:
        """As `LLM.abort` of its id."""
        return self._dispatcher.cancel_id(self.request_id)

    def __del__(self) -> None:
        self._steps.drop(self._pending)

    async def _read_to_its_end(self) -> RequestOutput:
        try:
            async for _ in self:
                pass
            return RequestOutput.of_success(self._pending.now())
        finally:
            # A task of asyncio keeps the exception that ended it, whose traceback keeps this frame.
            del self


def _hand_in(dispatcher: Dispatcher, request_id: int, made: Future[LlmRequest]) -> None:
    error = made.exception()
    if isinstance(error, Exception):
        dispatcher.refuse(request_id, error)
    else:
        dispatcher.meet(made.result())
