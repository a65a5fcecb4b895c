"""Shares one executor among several callers and threads, and routes results to each caller."""

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
"""Events of a caller's requests from one step, or the error that ended these requests."""

OnResult = Callable[[StepResults], None]
"""Called in the thread that runs the step, once per step with results for its requests."""

SHUT_DOWN = "the executor was shut down"
INTERRUPTED = "the executor was interrupted"
WITHIN_A_STEP = (
    "a step runs in this thread: expected submit, abort or shutdown of a tokenizer, a stop "
    "callback or a signal's handler, got a call that waits for another step"
)


def events_of(results: StepResults) -> list[StepEvent]:
    """Return the events of a step, or raise the error that took their place."""
    if isinstance(results, Exception):
        try:
            raise results
        finally:
            del results  # the error's traceback refers to this frame
    return results


class Dispatcher:
    """Runs the steps of an executor on behalf of callers in any thread.

    One step runs at a time. Submissions, cancellations and a shutdown that arrive during a step are
    queued; the stepping thread processes them when the step ends. When no step runs, the calling
    thread processes them itself. So they never wait for a further call, and may come at any moment:
    from a signal handler, from the garbage collector, from a tokenizer within a step.
    """

    def __init__(self, executor: PyExecutor) -> None:
        self._executor = executor
        self._stepping = threading.RLock()
        self._stepper: int | None = None
        """Identifier of the thread that runs a step."""
        self._queue: deque[tuple[int, Callable[[], object]]] = deque()
        """Queued operations, each with its request id."""
        self._callbacks: dict[int, OnResult] = {}
        self._queued: set[int] = set()
        """Ids of requests that are not yet enqueued in the executor."""
        self._expected: dict[int, OnResult] = {}
        """Callbacks of requests that are still being tokenised."""
        self._cancelled_early: set[int] = set()
        """Ids of expected requests that were cancelled."""
        self._closing = False

    @property
    def has_work(self) -> bool:
        """Whether :meth:`advance` has work to do or results to deliver."""
        return bool(self._queue or self._callbacks) or self._executor.has_work

    # ---- submission -------------------------------------------------------------------------

    def start(self, requests: Sequence[LlmRequest], on_result: OnResult) -> None:
        """Submit requests; ``on_result`` receives their results until all have finished.

        Raises:
            ExecutorError: the executor was shut down.
        """
        self._check_open()
        ids = {request.request_id: on_result for request in requests}
        try:
            # each of these lines is atomic for other threads
            self._queued.update(ids)
            self._callbacks.update(ids)
            self._queue.extend([(r.request_id, partial(self._enqueue, r)) for r in requests])
        except BaseException:  # raised by a signal handler
            for request_id in ids:
                self._callbacks.pop(request_id, None)
                self._queued.discard(request_id)
            raise

    def expect(self, request_id: int, on_result: OnResult) -> None:
        """Register a request before it exists; :meth:`submit_expected` or :meth:`reject` follows.

        Raises:
            ExecutorError: the executor was shut down.
        """
        self._check_open()
        self._expected[request_id] = on_result

    def submit_expected(self, request: LlmRequest) -> None:
        """Submit an expected request, unless it was rejected or forgotten in the meantime."""
        on_result = self._expected.get(request.request_id)
        if on_result is None:
            return
        try:
            self.start([request], on_result)
        except ExecutorError as error:
            self.reject(request.request_id, error)
            return
        self._expected.pop(request.request_id, None)
        if request.request_id in self._cancelled_early:
            self._cancelled_early.discard(request.request_id)
            self.cancel([request])

    def reject(self, request_id: int, error: Exception) -> None:
        """Report to the caller of an expected request why it cannot run."""
        on_result = self._expected.get(request_id)
        if on_result is not None:
            on_result(error)
        self.forget(request_id)

    def forget(self, request_id: int) -> None:
        """Drop an expected request whose caller is gone."""
        self._expected.pop(request_id, None)
        self._cancelled_early.discard(request_id)

    # ---- ending -----------------------------------------------------------------------------

    def cancel(self, requests: Sequence[LlmRequest]) -> None:
        """Cancel those requests that have not finished; their last event says so."""
        for request in requests:
            self.cancel_id(request.request_id)

    def cancel_id(self, request_id: int) -> bool:
        """Cancel one request; False: no unfinished request has this id."""
        if request_id in self._expected:
            self._cancelled_early.add(request_id)
            if request_id not in self._callbacks:
                return True  # it is cancelled as soon as it is submitted
            self._cancelled_early.discard(request_id)
        if request_id not in self._callbacks:
            return False
        self._queue.append((request_id, partial(self._executor.cancel, request_id)))
        self._process_pending_if_idle()
        return True

    def holds(self, requests: Sequence[LlmRequest]) -> bool:
        """Whether one of the requests has resources or is queued."""
        # not a generator: a signal handler's exception in one that is closed early is lost
        return not self._callbacks.keys().isdisjoint([r.request_id for r in requests])

    def holds_id(self, request_id: int) -> bool:
        """:meth:`holds` for one id, which may also be that of an expected request."""
        # this order: a submitted request enters `_callbacks` before it leaves `_expected`
        return request_id in self._expected or request_id in self._callbacks

    def abort(self, requests: Sequence[LlmRequest]) -> None:
        """Cancel unfinished requests and wait until their resources are freed.

        Within a step (the garbage collector closes a stream) this happens when the step ends.
        """
        self.cancel(requests)
        if self.is_stepping_here:
            return
        if self.holds(requests):
            self.wait_for_step()
        self.drain()

    def wait_for_step(self) -> None:
        """Wait until no step runs and the queue is processed.

        Raises:
            ExecutorError: this thread runs a step.
        """
        self._run_exclusively(self._process_pending)

    def shutdown(self) -> None:
        """End every request with an error and close the executor; within a step, when it ends."""
        self._closing = True
        if not self.is_stepping_here:
            self._run_exclusively(self._process_pending)

    # ---- steps ------------------------------------------------------------------------------

    @property
    def is_stepping_here(self) -> bool:
        """Whether this thread runs a step."""
        return self._stepper == threading.get_ident()

    def check_can_wait(self) -> None:
        """Refuse to wait for steps within a step.

        Raises:
            ExecutorError: this thread runs a step.
        """
        if self.is_stepping_here:
            raise ExecutorError(WITHIN_A_STEP)

    def advance(self) -> None:
        """Run one step and deliver its results.

        A failure of the step is delivered to all callers with submitted requests, and logged if
        there are none.

        Raises:
            ExecutorError: this thread runs a step.
        """
        self._run_exclusively(self._advance)

    def drain(self) -> None:
        """Run the steps that are left in flight after the last request has finished."""
        while not self._callbacks and self.has_work:
            self.advance()

    def advance_and_drain(self) -> None:
        """:meth:`advance`, then :meth:`drain`."""
        self.advance()
        self.drain()

    def _run_exclusively(self, work: Callable[[], None]) -> None:
        """Call ``work`` while no step runs, then process the queue.

        A signal handler may run, or raise, between any two of these lines.
        """
        try:
            with self._stepping:
                self.check_can_wait()
                try:
                    self._stepper = threading.get_ident()
                    try:
                        work()
                    finally:
                        self._process_pending()
                finally:
                    self._stepper = None
        finally:
            # operations queued since then found the lock taken
            self._process_pending_if_idle()

    def _process_pending_if_idle(self) -> None:
        """Process the queue unless a step runs, whose thread does it when the step ends."""
        while (self._queue or self._must_close) and not self.is_stepping_here:
            taken: list[bool] = []
            try:
                # one operation: a signal handler that raises between two would leave the lock held
                taken.extend(map(self._stepping.acquire, (False,)))
                if True not in taken:
                    return
                self._stepper = threading.get_ident()
                self._process_pending()
            finally:
                if True in taken:
                    self._stepper = None
                    self._stepping.release()

    @property
    def _must_close(self) -> bool:
        return self._closing and not self._executor.is_closed

    def _process_pending(self) -> None:
        """Without a step: shut down if requested, run queued operations, end cancelled requests."""
        if self._must_close:
            self._executor.shutdown()
        try:
            self._run_queued()
        except Exception as error:
            self._fail(self._submitted_ids(), error)
        self._deliver(self._executor.end_cancelled())

    def _advance(self) -> None:
        try:
            self._run_queued()
            events = self._executor.step() if self._executor.has_work else []
        except Exception as error:
            known = self._submitted_ids()
            self._fail(known, error)
            if not known:
                _logger.exception("a step without submitted requests failed")
            return
        except BaseException:
            self._fail(self._submitted_ids(), ExecutorError(INTERRUPTED))
            raise
        self._deliver(events)

    def _run_queued(self) -> None:
        """Run queued operations; report an error for requests that no longer exist."""
        if self._executor.is_closed:
            self._queue.clear()
            self._queued.clear()
            error = ExecutorError(SHUT_DOWN)
            self._fail(list(self._callbacks), error)
            for request_id in list(self._expected):
                self.reject(request_id, error)
            return
        while self._queue:
            # an interrupt leaves it in the queue, so that it is repeated, not lost
            request_id, work = self._queue[0]
            try:
                work()
            except Exception as error:
                self._queued.discard(request_id)
                self._fail([request_id], error)
            self._queue.popleft()
        # an interrupt came while a step's results were delivered
        lost = [i for i in self._submitted_ids() if self._executor.find(i) is None]
        self._fail(lost, ExecutorError(INTERRUPTED))

    def _enqueue(self, request: LlmRequest) -> None:
        # first: from now on a cancellation goes to the executor
        self._queued.discard(request.request_id)
        wanted = request.request_id in self._callbacks
        if wanted and self._executor.find(request.request_id) is None:
            self._executor.enqueue(request)

    def _deliver(self, events: list[StepEvent]) -> None:
        shares: dict[OnResult, list[StepEvent]] = {}
        for event in events:
            on_result = self._callbacks.get(event.request_id)
            if on_result is not None:
                shares.setdefault(on_result, []).append(event)
        for on_result, share in shares.items():
            on_result(share)
        for event in events:
            # only now: a caller that no longer finds a request here has all its results
            if event.finish_reason is not None:
                self._callbacks.pop(event.request_id, None)

    def _submitted_ids(self) -> list[int]:
        """Return the ids of unfinished requests that were enqueued in the executor."""
        return [i for i in list(self._callbacks) if i not in self._queued]

    def _fail(self, request_ids: Sequence[int], error: Exception) -> None:
        """End requests and deliver the error to their callers."""
        callbacks = self._callbacks.copy()
        for on_result in {callbacks[i] for i in request_ids if i in callbacks}:
            on_result(error)
        for request_id in request_ids:
            self._executor.cancel(request_id)
            self._callbacks.pop(request_id, None)

    def _check_open(self) -> None:
        if self._closing or self._executor.is_closed:
            raise ExecutorError(SHUT_DOWN)
