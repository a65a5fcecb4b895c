"""What `LLM.stream` gives: an iterator that steps when it is asked for more."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from mtp_plugin.executor.dispatcher import Dispatcher, StepResults, events_of
from mtp_plugin.executor.py_executor import StepEvent
from mtp_plugin.executor.request import LlmRequest


class EventStream(Iterator[list[StepEvent]]):
    """The events of requests, step by step; they start when the first ones are asked for.

    Raises:
        ExecutorError: the executor was shut down, or a step runs in this thread.
    """

    _is_started = False  # of one, too, whose making an interrupt cut short
    _is_closed = False

    def __init__(
        self, requests: Sequence[LlmRequest], dispatcher: Dispatcher, owner: object
    ) -> None:
        self._requests = requests
        self._dispatcher = dispatcher
        self._owner = owner  # it lives as long as the iteration
        self._arrived: deque[StepResults] = deque()

    def __next__(self) -> list[StepEvent]:
        if self._is_closed:
            raise StopIteration
        self._dispatcher.expect_to_wait()
        try:
            if not self._is_started:
                self._is_started = True
                self._dispatcher.start(self._requests, self._arrived.append)
            while self._dispatcher.holds(self._requests) or self._arrived:
                if not self._arrived:
                    self._dispatcher.advance()
                    continue
                with suppress(IndexError):  # another thread that reads was first
                    return events_of(self._arrived.popleft())
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Cancel what is unfinished and give its resources back; nothing more comes."""
        if self._is_started and not self._is_closed:
            self._is_closed = True
            self._dispatcher.abort(self._requests)
        self._is_closed = True

    def __del__(self) -> None:
        if self._is_started and not self._is_closed:
            self._dispatcher.cancel(self._requests)
