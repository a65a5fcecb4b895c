"""A request that was handed in, to be read, waited for or ended when its caller likes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import Any

from mtp_plugin.executor.async_steps import AsyncSteps, Told
from mtp_plugin.executor.dispatcher import Dispatcher, events_of
from mtp_plugin.executor.outputs import RequestOutput
from mtp_plugin.executor.py_executor import StepEvent
from mtp_plugin.executor.request import LlmRequest


class RequestHandle:
    """What `LLM.submit` gives: ``async for`` its events, ``await`` it, or ask for its ``result``.

    Any number of readers get all events each. Where an event loop runs, it goes on by itself;
    elsewhere any call that steps takes it along. A handle that nobody holds ends its request.

    Raises:
        ExecutorError: the executor was shut down.
    """

    def __init__(
        self, request: LlmRequest, dispatcher: Dispatcher, steps: AsyncSteps, owner: object
    ) -> None:
        self._request = request
        self._dispatcher = dispatcher
        self._steps = steps
        self._owner = owner
        self._told = Told()
        dispatcher.start([request], self._told.put)
        steps.begin()

    @property
    def request_id(self) -> int:
        """As its events have it, and `LLM.abort` takes it."""
        return self._request.request_id

    @property
    def is_finished(self) -> bool:
        """Whether no further event will come."""
        return not self._dispatcher.holds([self._request])

    def __aiter__(self) -> AsyncIterator[StepEvent]:
        """Its events from the first one on; leaving early ends nothing."""
        return self._steps.read(self._told, self)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """As :meth:`result`, for coroutines."""
        return self._read_to_its_end().__await__()

    def result(self) -> RequestOutput:
        """Step until it has ended, and what it gave; in a coroutine ``await`` the handle instead.

        Raises:
            ExecutorError: it ended with an error, or the executor was shut down.
            Exception: what a step failed with.
        """
        while not self.is_finished:
            self._dispatcher.advance()
        self._dispatcher.drain()
        for results in self._told.results:
            events_of(results)
        return RequestOutput.of_success(self._request)

    def abort(self) -> bool:
        """As `LLM.abort` of its id."""
        return self._dispatcher.cancel_id(self.request_id)

    def __del__(self) -> None:
        self._dispatcher.cancel([self._request])

    async def _read_to_its_end(self) -> RequestOutput:
        async for _ in self:
            pass
        return RequestOutput.of_success(self._request)
