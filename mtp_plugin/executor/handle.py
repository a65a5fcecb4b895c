"""Handle of a submitted request: read its events, wait for its output, or abort it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from mtp_plugin.executor.async_steps import AsyncSteps, ResultLog
from mtp_plugin.executor.dispatcher import Dispatcher, events_of
from mtp_plugin.executor.outputs import RequestOutput
from mtp_plugin.executor.pending_request import PendingRequest
from mtp_plugin.executor.py_executor import StepEvent
from mtp_plugin.executor.request import LlmRequest


class RequestHandle:
    """Returned by `LLM.submit`: iterate with ``async for``, ``await`` it, or call ``result()``.

    Each of any number of readers gets all events. In a running event loop the request runs in the
    background and is tokenised in a thread; elsewhere it runs in the steps of any other call.
    Garbage collection of the handle cancels the request.

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
        self._log = ResultLog()
        if pending.is_made:
            dispatcher.start(pending.result(), self._log.put)
        else:
            for request_id in pending.request_ids:
                dispatcher.expect(request_id, self._log.put)
            pending.on_made(partial(_submit, dispatcher, pending.request_ids))
        steps.start_soon(pending)

    @property
    def request_id(self) -> int:
        """The id in its events, as `LLM.abort` expects it."""
        return self._pending.request_id

    @property
    def is_finished(self) -> bool:
        """Whether all events have been produced."""
        return not any(map(self._dispatcher.holds_id, self._pending.request_ids))

    def __aiter__(self) -> AsyncIterator[StepEvent]:
        """Iterate over all events from the first; leaving early does not cancel the request."""
        return self._steps.read(self._log, self._pending, self)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """Wait for the output, as :meth:`result` does, in a coroutine."""
        return self._read_to_its_end().__await__()

    def result(self) -> RequestOutput:
        """Run steps until the request has finished and return its output.

        In a coroutine, ``await`` the handle instead.

        Raises:
            RequestError: the prompt or an option cannot be served.
            ExecutorError: the request ended with an error, the executor was shut down, or a step
                runs in this thread.
            Exception: the error of a failed step.
        """
        self._dispatcher.check_can_wait()
        requests = self._pending.result()
        while not self.is_finished:
            self._dispatcher.advance()
        self._dispatcher.drain()
        for results in self._log.results:
            events_of(results)
        return RequestOutput.of_success(*requests)

    def abort(self) -> bool:
        """Cancel the request; see `LLM.abort`."""
        return True in [self._dispatcher.cancel_id(i) for i in self._pending.request_ids]

    def __del__(self) -> None:
        self._steps.drop(self._pending)

    async def _read_to_its_end(self) -> RequestOutput:
        try:
            async for _ in self:
                pass
            return RequestOutput.of_success(*self._pending.result())
        finally:
            # an asyncio task keeps the exception that ended it, whose traceback keeps this frame
            del self


def _submit(
    dispatcher: Dispatcher, request_ids: Sequence[int], made: Future[list[LlmRequest]]
) -> None:
    error = made.exception()
    if isinstance(error, Exception):
        for request_id in request_ids:
            dispatcher.reject(request_id, error)
    else:
        for request in made.result():
            dispatcher.submit_expected(request)
