"""One executor, several callers: whoever waits steps it, each hears of its own requests."""

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

News = list[StepEvent] | Exception
"""What a step gave a caller's requests, or why none of them will get anything more."""

Listener = Callable[[News], None]
"""Called in the thread that steps, once per step that has news for its requests."""


class Dispatcher:
    """Steps an executor on behalf of callers in any thread.

    One step runs at a time. Requests and cancellations wait in line until no step runs, so handing
    them in never blocks, not even where Python's collector does it in the middle of a step.
    """

    def __init__(self, executor: PyExecutor) -> None:
        self._executor = executor
        self._stepping = threading.Lock()
        self._line: deque[Callable[[], object]] = deque()
        self._listeners: dict[int, Listener] = {}
        self._in_line: set[int] = set()
        """Requests that the executor does not know yet."""
        self._stepper: int | None = None
        """The thread that runs a step."""

    @property
    def has_work(self) -> bool:
        """Whether :meth:`advance` has something to do or to tell."""
        return bool(self._line or self._listeners) or self._executor.has_work

    def start(self, requests: Sequence[LlmRequest], listener: Listener) -> None:
        """Hand requests in; ``listener`` hears of them until each has finished.

        Raises:
            ExecutorError: the executor was shut down.
        """
        if self._executor.is_closed:
            raise ExecutorError("the executor was shut down")
        ids = {request.request_id: listener for request in requests}
        # each of these is one operation for other threads
        self._in_line.update(ids)
        self._listeners.update(ids)
        self._line.extend([partial(self._enqueue, request) for request in requests])

    def cancel(self, requests: Sequence[LlmRequest]) -> None:
        """End those requests that have not finished; their listeners hear of it."""
        self._line += [
            partial(self._executor.cancel, request.request_id)
            for request in requests
            if request.request_id in self._listeners
        ]

    def holds(self, requests: Sequence[LlmRequest]) -> bool:
        """Whether one of the requests has resources, or will get some."""
        return any(request.request_id in self._listeners for request in requests)

    def leave(self, requests: Sequence[LlmRequest]) -> None:
        """Cancel what has not finished, and step until nothing of the requests is left.

        Within a step, as where the collector closes a generator, the steps that follow do it.
        """
        self.cancel(requests)
        if self._stepper == threading.get_ident():
            return
        while self.holds(requests):
            self.advance()
        self._drain()

    def advance(self) -> None:
        """Run one step and tell every listener its news. A failure is news to all whose requests
        took part, and is logged where nobody's did."""
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

    def _drain(self) -> None:
        """Finish a step that is still running when nobody listens any more."""
        while not self._listeners and self.has_work:
            self.advance()

    def shutdown(self) -> None:
        """Drop every request, and tell whoever waits for one."""
        with self._alone():
            self._line.clear()
            self._in_line.clear()
            self._executor.shutdown()
            self._tell_all(ExecutorError("the executor was shut down"))

    def _hand_out(self, events: list[StepEvent]) -> None:
        shares: dict[Listener, list[StepEvent]] = {}
        for event in events:
            listener = self._listeners.get(event.request_id)
            if listener is not None:
                shares.setdefault(listener, []).append(event)
        for listener, share in shares.items():
            listener(share)
        for event in events:
            # only now: who finds its requests gone has their last news
            if event.finish_reason is not None:
                self._listeners.pop(event.request_id, None)

    def _tell_all(self, error: Exception) -> int:
        """Every listener with requests in the executor hears of the failure, and nothing more of
        these; returns how many requests that were."""
        listeners = {
            request_id: listener
            for request_id, listener in self._listeners.copy().items()
            if request_id not in self._in_line
        }
        for listener in set(listeners.values()):
            listener(error)
        for request_id in listeners:
            self._listeners.pop(request_id, None)
        return len(listeners)
