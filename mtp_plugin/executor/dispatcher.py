"""One executor, several callers: whoever waits steps it, each gets its own requests' results."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from mtp_plugin.errors import ExecutorError
from mtp_plugin.executor.py_executor import PyExecutor, StepEvent
from mtp_plugin.executor.request import LlmRequest

_logger = logging.getLogger(__name__)

StepResults = list[StepEvent] | Exception
"""What a step gave a caller's requests, or why none of them will get anything more."""

OnResult = Callable[[StepResults], None]
"""Called in the thread that steps, once per step that has results for its requests."""

SHUT_DOWN = "the executor was shut down"
INTERRUPTED = "the executor was interrupted"
WITHIN_A_STEP = (
    "a step runs in this thread: expected submit, abort or shutdown of a tokenizer, a stop "
    "callback or a signal's handler, got a call that waits for another step"
)


def events_of(results: StepResults) -> list[StepEvent]:
    """What a step gave.

    Raises:
        Exception: why there will be nothing more.
    """
    if isinstance(results, Exception):
        try:
            raise results
        finally:
            del results  # the error's traceback refers to this frame
    return results


class Dispatcher:
    """Steps an executor on behalf of callers in any thread.

    One step runs at a time. What is handed in, cancelled or shut down meanwhile waits in line, and
    the thread that steps sees to it at the step's end; where no step runs, who asks for it does.
    So none of it waits for the next call of anyone, and it may come at any moment: from a handler
    of a signal, from Python's collector, from a tokenizer within a step.
    """

    def __init__(self, executor: PyExecutor) -> None:
        self._executor = executor
        self._stepping = threading.RLock()
        self._stepper: int | None = None
        """The thread that runs a step."""
        self._line: deque[tuple[int, Callable[[], object]]] = deque()
        """What waits to be done for a request, by its id."""
        self._callbacks: dict[int, OnResult] = {}
        self._in_line: set[int] = set()
        """Requests that the executor does not know yet."""
        self._expected: dict[int, OnResult] = {}
        """Of requests that are still being made."""
        self._unwanted: set[int] = set()
        """Expected requests that were cancelled."""
        self._closing = False

    @property
    def has_work(self) -> bool:
        """Whether :meth:`advance` has something to do or to tell."""
        return bool(self._line or self._callbacks) or self._executor.has_work

    # ---- handing in -------------------------------------------------------------------------

    def start(self, requests: Sequence[LlmRequest], on_result: OnResult) -> None:
        """Hand requests in; ``on_result`` gets their results until each has finished.

        Raises:
            ExecutorError: the executor was shut down.
        """
        self._expect_open()
        ids = {request.request_id: on_result for request in requests}
        try:
            # each of these is one operation for other threads
            self._in_line.update(ids)
            self._callbacks.update(ids)
            self._line.extend([(r.request_id, partial(self._enqueue, r)) for r in requests])
        except BaseException:  # a signal's handler
            for request_id in ids:
                self._callbacks.pop(request_id, None)
                self._in_line.discard(request_id)
            raise

    def expect(self, request_id: int, on_result: OnResult) -> None:
        """Know of a request that is still being made: :meth:`meet` or :meth:`refuse` follow.

        Raises:
            ExecutorError: the executor was shut down.
        """
        self._expect_open()
        self._expected[request_id] = on_result

    def meet(self, request: LlmRequest) -> None:
        """Hand an expected request in, unless it was told meanwhile that nothing will come."""
        on_result = self._expected.get(request.request_id)
        if on_result is None:
            return
        try:
            self.start([request], on_result)
        except ExecutorError as error:
            self.refuse(request.request_id, error)
            return
        self._expected.pop(request.request_id, None)
        if request.request_id in self._unwanted:
            self._unwanted.discard(request.request_id)
            self.cancel([request])

    def refuse(self, request_id: int, error: Exception) -> None:
        """Tell who expects a request why it will not come."""
        on_result = self._expected.get(request_id)
        if on_result is not None:
            on_result(error)
        self.forget(request_id)

    def forget(self, request_id: int) -> None:
        """Expect a request no more, whose caller is gone."""
        self._expected.pop(request_id, None)
        self._unwanted.discard(request_id)

    # ---- ending -----------------------------------------------------------------------------

    def cancel(self, requests: Sequence[LlmRequest]) -> None:
        """End those requests that have not finished; their results say so."""
        for request in requests:
            self.cancel_id(request.request_id)

    def cancel_id(self, request_id: int) -> bool:
        """The same by the id of one; False: none that was handed in here has it any more."""
        if request_id in self._expected:
            self._unwanted.add(request_id)
            if request_id not in self._callbacks:
                return True  # it will be cancelled as soon as it is made
            self._unwanted.discard(request_id)
        if request_id not in self._callbacks:
            return False
        self._line.append((request_id, partial(self._executor.cancel, request_id)))
        self._settle_soon()
        return True

    def holds(self, requests: Sequence[LlmRequest]) -> bool:
        """Whether one of the requests has resources, or will get some."""
        # no generator: an exception of a signal handler in one that is closed early is lost
        return not self._callbacks.keys().isdisjoint([r.request_id for r in requests])

    def holds_id(self, request_id: int) -> bool:
        """The same by the id of one, that may still be expected."""
        # an expected one is among the others before it is expected no more
        return request_id in self._expected or request_id in self._callbacks

    def abort(self, requests: Sequence[LlmRequest]) -> None:
        """Cancel what has not finished, and wait for a running step until nothing of it is left.

        Within a step, as where the collector closes a stream, that step's end does it.
        """
        self.cancel(requests)
        if self.is_stepping_here:
            return
        if self.holds(requests):
            self.wait_for_the_step()
        self.drain()

    def wait_for_the_step(self) -> None:
        """Return when no step runs and what was in line is seen to.

        Raises:
            ExecutorError: this thread runs a step.
        """
        self._alone(self._settle)

    def shutdown(self) -> None:
        """Drop every request, and tell whoever waits for one; within a step at its end."""
        self._closing = True
        if not self.is_stepping_here:
            self._alone(self._settle)

    # ---- steps ------------------------------------------------------------------------------

    @property
    def is_stepping_here(self) -> bool:
        """Whether this thread runs a step."""
        return self._stepper == threading.get_ident()

    def expect_to_wait(self) -> None:
        """Refuse to wait for steps within one.

        Raises:
            ExecutorError: this thread runs a step.
        """
        if self.is_stepping_here:
            raise ExecutorError(WITHIN_A_STEP)

    def advance(self) -> None:
        """Run one step and hand every caller its results. A failure is the result of all whose
        requests took part, and is logged where nobody's did.

        Raises:
            ExecutorError: this thread runs a step.
        """
        self._alone(self._advance)

    def drain(self) -> None:
        """Finish a step that is still running when nobody waits any more."""
        while not self._callbacks and self.has_work:
            self.advance()

    def advance_and_drain(self) -> None:
        """:meth:`advance`, and :meth:`drain` behind everybody's last token."""
        self.advance()
        self.drain()

    def _alone(self, work: Callable[[], None]) -> None:
        """Do it while no step runs, and what came into line meanwhile.

        A signal's handler may run, or raise, between any two of these lines.
        """
        try:
            with self._stepping:
                self.expect_to_wait()
                try:
                    self._stepper = threading.get_ident()
                    try:
                        work()
                    finally:
                        self._settle()
                finally:
                    self._stepper = None
        finally:
            # whoever came since then found the lock taken
            self._settle_soon()

    def _settle_soon(self) -> None:
        """See to what is in line; where a step runs, its thread does at its end."""
        while (self._line or self._must_close) and not self.is_stepping_here:
            taken: list[bool] = []
            try:
                # one operation: a handler that raises between two would leave the lock taken
                taken.extend(map(self._stepping.acquire, (False,)))
                if True not in taken:
                    return
                self._stepper = threading.get_ident()
                self._settle()
            finally:
                if True in taken:
                    self._stepper = None
                    self._stepping.release()

    @property
    def _must_close(self) -> bool:
        return self._closing and not self._executor.is_closed

    def _settle(self) -> None:
        """Without a step: requests come in, cancelled ones go, and so does everything where the
        executor is to be shut down."""
        if self._must_close:
            self._executor.shutdown()
        try:
            self._take_line()
        except Exception as error:
            self._tell(self._known(), error)
        self._hand_out(self._executor.end_cancelled())

    def _advance(self) -> None:
        try:
            self._take_line()
            events = self._executor.step() if self._executor.has_work else []
        except Exception as error:
            known = self._known()
            self._tell(known, error)
            if not known:
                _logger.exception("a step failed that nobody waited for")
            return
        except BaseException:
            self._tell(self._known(), ExecutorError(INTERRUPTED))
            raise
        self._hand_out(events)

    def _take_line(self) -> None:
        """Let in and cancel what waits, and tell who waits for what is there no more."""
        if self._executor.is_closed:
            self._line.clear()
            self._in_line.clear()
            error = ExecutorError(SHUT_DOWN)
            self._tell(list(self._callbacks), error)
            for request_id in list(self._expected):
                self.refuse(request_id, error)
            return
        while self._line:
            # an interrupt leaves it in line, so that it is done again, not lost
            request_id, work = self._line[0]
            try:
                work()
            except Exception as error:
                self._in_line.discard(request_id)
                self._tell([request_id], error)
            self._line.popleft()
        # an interrupt came while a step's results were handed out
        lost = [i for i in self._known() if self._executor.find(i) is None]
        self._tell(lost, ExecutorError(INTERRUPTED))

    def _enqueue(self, request: LlmRequest) -> None:
        # first: who cancels it from now on has the executor do so
        self._in_line.discard(request.request_id)
        wanted = request.request_id in self._callbacks
        if wanted and self._executor.find(request.request_id) is None:
            self._executor.enqueue(request)

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

    def _known(self) -> list[int]:
        """Requests that were handed to the executor."""
        return [i for i in list(self._callbacks) if i not in self._in_line]

    def _tell(self, request_ids: Sequence[int], error: Exception) -> None:
        """Whoever waits for one of the requests gets the failure, and nothing more of these, which
        run no further."""
        callbacks = self._callbacks.copy()
        for on_result in {callbacks[i] for i in request_ids if i in callbacks}:
            on_result(error)
        for request_id in request_ids:
            self._executor.cancel(request_id)
            self._callbacks.pop(request_id, None)

    def _expect_open(self) -> None:
        if self._closing or self._executor.is_closed:
            raise ExecutorError(SHUT_DOWN)
