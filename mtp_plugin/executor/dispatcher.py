"""One executor, several callers: whoever waits steps it, each gets its own requests' results."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from mtp_plugin.errors import ExecutorError
from mtp_plugin.executor.py_executor import PyExecutor, StepEvent
from mtp_plugin.executor.request import LlmRequest

_logger = logging.getLogger(__name__)

StepResults = list[StepEvent] | Exception
"""What a step gave a caller's requests, or why none of them will get anything more."""

OnResult = Callable[[StepResults], None]
"""Called in the thread that steps, once per step that has results for its requests."""


def events_of(results: StepResults) -> list[StepEvent]:
    """What a step gave.

    Raises:
        Exception: why there will be nothing more.
    """
    if isinstance(results, Exception):
        raise results
    return results


class Dispatcher:
    """Steps an executor on behalf of callers in any thread.

    One step runs at a time. Requests and cancellations wait in line until no step runs, so handing
    them in never blocks, not even where Python's collector does it in the middle of a step.
    """

    def __init__(self, executor: PyExecutor) -> None:
        self._executor = executor
        self._stepping = threading.Lock()
        self._line: deque[Callable[[], object]] = deque()
        self._callbacks: dict[int, OnResult] = {}
        self._in_line: set[int] = set()
        """Requests that the executor does not know yet."""
        self._stepper: int | None = None
        """The thread that runs a step."""

    @property
    def has_work(self) -> bool:
        """Whether :meth:`advance` has something to do or to tell."""
        return bool(self._line or self._callbacks) or self._executor.has_work

    def start(self, requests: Sequence[LlmRequest], on_result: OnResult) -> None:
        """Hand requests in; ``on_result`` gets their results until each has finished.

        Raises:
            ExecutorError: the executor was shut down.
        """
        if self._executor.is_closed:
            raise ExecutorError("the executor was shut down")
        ids = {request.request_id: on_result for request in requests}
        # each of these is one operation for other threads
        self._in_line.update(ids)
        self._callbacks.update(ids)
        self._line.extend([partial(self._enqueue, request) for request in requests])

    def cancel(self, requests: Sequence[LlmRequest]) -> None:
        """End those requests that have not finished; their results say so."""
        for request in requests:
            self.cancel_id(request.request_id)

    def cancel_id(self, request_id: int) -> bool:
        """The same by the id of one; False: none that was handed in here has it any more."""
        if request_id not in self._callbacks:
            return False
        self._line.append(partial(self._executor.cancel, request_id))
        return True

    def holds(self, requests: Sequence[LlmRequest]) -> bool:
        """Whether one of the requests has resources, or will get some."""
        return any(request.request_id in self._callbacks for request in requests)

    def abort(self, requests: Sequence[LlmRequest]) -> None:
        """Cancel what has not finished, and step until nothing of the requests is left.

        Within a step, as where the collector closes a generator, the steps that follow do it.
        """
        self.cancel(requests)
        if self._stepper == threading.get_ident():
            return
        while self.holds(requests):
            self.advance()
        self.drain()

    def advance(self) -> None:
        """Run one step and hand every caller its results. A failure is the result of all whose
        requests took part, and is logged where nobody's did."""
        with self._alone():
            self._advance()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread at a time, and it is known which."""
        with self._stepping:
            self._stepper = threading.get_ident()
            try:
                yield
            finally:
                self._stepper = None

    def _enqueue(self, request: LlmRequest) -> None:
        self._in_line.discard(request.request_id)
        self._executor.enqueue(request)

    def _advance(self) -> None:
        try:
            while self._line:
                self._line.popleft()()
            events = self._executor.step() if self._executor.has_work else []
        except Exception as error:
            if not self._tell_all(error):
                _logger.exception("a step failed that nobody waited for")
            return
        except BaseException:
            self._tell_all(ExecutorError("the executor was interrupted"))
            raise
        if self._executor.is_closed:
            self._in_line.clear()
            self._tell_all(ExecutorError("the executor was shut down"))
        self._hand_out(events)

    def drain(self) -> None:
        """Finish a step that is still running when nobody waits any more."""
        while not self._callbacks and self.has_work:
            self.advance()

    def shutdown(self) -> None:
        """Drop every request, and tell whoever waits for one."""
        with self._alone():
            self._line.clear()
            self._in_line.clear()
            self._executor.shutdown()
            self._tell_all(ExecutorError("the executor was shut down"))

    def _hand_out(self, events: list[StepEvent]) -> None:
        shares: dict[OnResult, list[StepEvent]] = {}
        for event in events:
            on_result = self._callbacks.get(event.request_id)
            if on_result is not None:
                shares.setdefault(on_result, []).append(event)
        for on_result, share in shares.items():
            on_result(share)
        for event in events:
            # only now: who finds its requests gone has their last results
            if event.finish_reason is not None:
                self._callbacks.pop(event.request_id, None)

    def _tell_all(self, error: Exception) -> int:
        """Every caller with requests in the executor gets the failure, and nothing more of these;
        returns how many requests that were."""
        callbacks = {
            request_id: on_result
            for request_id, on_result in self._callbacks.copy().items()
            if request_id not in self._in_line
        }
        for on_result in set(callbacks.values()):
            on_result(error)
        for request_id in callbacks:
            self._callbacks.pop(request_id, None)
        return len(callbacks)
