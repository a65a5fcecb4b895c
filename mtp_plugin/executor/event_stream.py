"""The iterator of `LLM.stream`, which runs steps on demand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from mtp_plugin.executor.dispatcher import Dispatcher, StepResults, events_of
from mtp_plugin.executor.py_executor import StepEvent
from mtp_plugin.executor.request import LlmRequest


class EventStream(Iterator[list[StepEvent]]):
    """Iterates over the events of requests, step by step; they start with the first ``next()``.

    Raises:
        ExecutorError: the executor was shut down, or a step runs in this thread.
    """

    _is_started = False  # class attributes: __del__ also runs if __init__ was interrupted
    _is_closed = False

    def __init__(
        self, requests: Sequence[LlmRequest], dispatcher: Dispatcher, owner: object
    ) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._owner = owner  # kept alive by the iteration
        self._arrived: deque[StepResults] = deque()

    def __next__(self) -> list[StepEvent]:
        if self._is_closed:
            raise StopIteration
        self._dispatcher.check_can_wait()
        try:
            if not self._is_started:
                self._is_started = True
                self._dispatcher.start(self._requests, self._arrived.append)
            while self._dispatcher.holds(self._requests) or self._arrived:
                if not self._arrived:
                    self._dispatcher.advance()
                    continue
                with suppress(IndexError):  # another reader was faster
                    return events_of(self._arrived.popleft())
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Cancel unfinished requests, free their resources and end the iteration."""
        if self._is_started and not self._is_closed:
            self._is_closed = True
            self._dispatcher.abort(self._requests)
        self._is_closed = True

    def __del__(self) -> None:
        if self._is_started and not self._is_closed:
            self._dispatcher.cancel(self._requests)
