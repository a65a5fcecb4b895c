"""The thread that owns the step loop of an executor."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch

from mtp_plugin.errors import ExecutorError
from mtp_plugin.hosts.embedded.py_executor import PyExecutor, StepEvent
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.hosts.embedded.results import Results
from mtp_plugin.hosts.embedded.tokenising import Submission

_logger = logging.getLogger(__name__)

SHUT_DOWN = "the executor was shut down"
INTERRUPTED = "the executor was interrupted"
WITHIN_A_STEP = (
    "this is the engine thread: expected submit, abort or shutdown of a tokenizer or a stop "
    "callback, got a call that waits for a step"
)
FORKED = (
    "this process was forked, and the engine thread runs in its parent: create the LLM in the "
    "child, or start the process with the method 'spawn'"
)
IDLE_SECONDS = 0.2
"""Time without a command after which a pending CUDA graph is captured; a client that sends one
request after the other is not held up."""
EXIT_SECONDS = 10.0
"""Maximum time that the interpreter's exit waits for a running step."""


Command = list[LlmRequest] | int | tuple[tuple[int, ...], Future[None]] | None
"""Start requests; abort a request; abort requests without readers, and report when that took
effect; wake up."""


class Engine:
    """Runs the steps of an executor in a thread of its own, on behalf of callers in any thread.

    All methods but :meth:`shutdown` return without waiting, and may be called at any moment: by a
    signal handler, the garbage collector, or within a step. Submissions and aborts enter a queue,
    which is processed between two steps. The thread refers weakly to this object, so that it ends,
    and all memory is freed, when the last reference to it is dropped.
    """

    def __init__(self, executor: PyExecutor, device: torch.device) -> None:
        self._executor = executor
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._results: dict[int, Results] = {}
        """Results of unfinished requests, also of those that are still being tokenised."""
        self._running: dict[int, Results] = {}
        """Those of requests in the executor; used by the engine thread alone."""
        self._is_closing = self._is_closed = False
        self.captures_when_idle = False
        """See `LLM.capture_when_idle`."""
        self._pid = os.getpid()
        wake = self._commands.put
        reference = weakref.ref(self, lambda _: wake(None))
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(
            target=_run, args=(reference, self._commands, stream), name="mtp-engine", daemon=True
        )
        _engines.add(self)
        self._thread.start()

    # ---- submission -------------------------------------------------------------------------

    def submit(self, submission: Submission, results: Results) -> None:
        """Submit requests, which enter the same step, once they are made.

        Raises:
            ExecutorError: the executor was shut down, or this process was forked.
        """
        request_ids = submission.request_ids
        if self._is_forked:
            raise ExecutorError(FORKED)
        if self._is_closing or self._executor.is_closed:
            raise ExecutorError(SHUT_DOWN)
        self._results.update(dict.fromkeys(request_ids, results))
        if self._is_closed:  # since the check above
            self._fail(request_ids, ExecutorError(SHUT_DOWN))

        def start(made: Future[list[LlmRequest]]) -> None:
            error = made.exception()
            if isinstance(error, Exception):
                self._fail(request_ids, error)
            else:
                self._commands.put(made.result())

        if submission.made.done():
            start(submission.made)  # a callback would lose the error of a signal handler
        else:
            submission.made.add_done_callback(start)

    # ---- ending -----------------------------------------------------------------------------

    def abort(self, request_id: int) -> bool:
        """Abort a request; False: no unfinished request has this id."""
        if request_id not in self._results:
            return False
        self._commands.put(request_id)
        return True

    def drop(self, submission: Submission) -> Future[None]:
        """Abort requests without readers; those that are not made yet never will be.

        Returns:
            A future that is done once their resources are freed; within a step, at once.
        """
        submission.claim()
        request_ids = submission.request_ids
        done: Future[None] = Future()
        if any(request_id in self._results for request_id in request_ids):
            self._commands.put((request_ids, done))
            if not (self._is_closed or self._is_forked or self.is_current_thread):
                return done
        _set_done(done)
        return done

    def shutdown(self, timeout: float | None = None) -> None:
        """End every request with an error and close the executor; within a step, when it ends.

        Args:
            timeout: maximum number of seconds to wait for a running step.
        """
        self._is_closing = True
        self._commands.put(None)
        if not self.is_current_thread and not self._is_forked:
            self._thread.join(timeout)

    @property
    def is_running(self) -> bool:
        """Whether requests can be submitted."""
        return self._thread.is_alive() and not self._is_closing and not self._executor.is_closed

    # ---- waiting ----------------------------------------------------------------------------

    def wake(self) -> None:
        """Continue with the steps if they wait for a reader."""
        self._commands.put(None)

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in the engine thread."""
        return self._thread.ident == threading.get_ident()

    def check_can_wait(self) -> None:
        """Refuse to wait for steps within a step, and in a forked process.

        Raises:
            ExecutorError: see above.
        """
        if self.is_current_thread:
            raise ExecutorError(WITHIN_A_STEP)
        if self._is_forked:
            raise ExecutorError(FORKED)

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    # ---- the engine thread ------------------------------------------------------------------

    def _iterate(self, command: Command, *, is_idle: bool) -> float | None:
        """Process the queue, then run a step, or capture a CUDA graph if there was no command for
        `IDLE_SECONDS` and `captures_when_idle`.

        Returns:
            How many seconds to wait for the next command; None: until there is one.
        """
        dropped = self._process(command)
        if self._is_closing or self._executor.is_closed:
            self._close()
        for done in dropped:
            _set_done(done)
        if self._is_closed:
            return None
        if is_idle and self.captures_when_idle:
            self._executor.capture_next()
        if all(results.is_full for results in self._running.values()):
            captures = self.captures_when_idle and self._executor.can_capture
            return IDLE_SECONDS if captures else None
        try:
            events = self._executor.step()
        except BaseException as error:
            known = error if isinstance(error, Exception) else ExecutorError(INTERRUPTED)
            self._fail(list(self._running), known)
            del known  # its traceback refers to this frame
        else:
            self._deliver(events)
        return 0.0

    def _process(self, command: Command) -> list[Future[None]]:
        """Process ``command`` and the queue, and return the futures to set."""
        dropped = []
        has_aborted = False
        while True:
            if isinstance(command, list):
                for request in command:
                    has_aborted |= self._enqueue(request)
            elif isinstance(command, int):
                has_aborted |= self._abort(command, is_dropped=False)
            elif isinstance(command, tuple):
                for request_id in command[0]:
                    has_aborted |= self._abort(request_id, is_dropped=True)
                dropped.append(command[1])
            try:
                command = self._commands.get_nowait()
            except Empty:
                break
        if has_aborted:
            try:
                self._deliver(self._executor.end_cancelled())
            except Exception as error:
                self._fail(list(self._running), error)
        return dropped

    def _enqueue(self, request: LlmRequest) -> bool:
        """Whether the request was aborted while it was made."""
        request_id = request.request_id
        results = self._results.get(request_id)
        if results is None:
            return False
        try:
            self._executor.enqueue(request)
        except Exception as error:
            self._fail([request_id], error)
            return False
        self._running[request_id] = results
        return request_id in results.aborted and self._executor.cancel(request_id)

    def _abort(self, request_id: int, *, is_dropped: bool) -> bool:
        """Whether the request was running."""
        results = self._results.get(request_id)
        if results is not None and request_id not in self._running:
            # it is still being made, or its submission was interrupted
            if not is_dropped:
                results.aborted.add(request_id)
            elif self._results.pop(request_id, None) is not None:
                results.num_unfinished -= 1
                results.put([])
        return self._executor.cancel(request_id)

    def _deliver(self, events: list[StepEvent]) -> None:
        shares: dict[Results, list[StepEvent]] = {}
        for event in events:
            results = self._running.get(event.request_id)
            if results is None:
                continue
            shares.setdefault(results, []).append(event)
            if event.finish_reason is not None:
                results.num_unfinished -= 1
                del self._running[event.request_id]
                self._results.pop(event.request_id, None)
        for results, share in shares.items():
            results.put(share)
            if results.is_abandoned is not None and results.is_abandoned():
                self._commands.put((tuple(event.request_id for event in share), Future()))

    def _fail(self, request_ids: Sequence[int], error: Exception) -> None:
        """End requests that are not in the executor with an error."""
        failed = {self._results.pop(request_id, None) for request_id in request_ids}
        for request_id in request_ids:
            self._running.pop(request_id, None)
        for results in failed:
            if results is not None:
                results.fail(error)

    def _close(self) -> None:
        if not self._executor.is_closed:
            try:
                self._executor.shutdown()
            except Exception:
                _logger.exception("the shutdown of the executor failed")
        self._is_closed = True  # what is submitted from now on fails by itself
        self._fail(list(self._results), ExecutorError(SHUT_DOWN))
        for done in self._process(None):
            _set_done(done)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _stop_engines() -> None:
    """End the threads before the interpreter does: a thread in native code would crash it."""
    for engine in list(_engines):
        engine.shutdown(EXIT_SECONDS)


def _run(
    engine_of: Callable[[], Engine | None],
    commands: SimpleQueue[Command],
    stream: torch.cuda.Stream | None,
) -> None:
    """Serve an engine until it is closed or dropped."""
    if stream is not None:
        torch.cuda.set_device(stream.device)
        torch.cuda.set_stream(stream)
    with torch.inference_mode():
        command: Command = None
        is_idle = False
        seconds: float | None = None
        while True:
            engine = engine_of()
            if engine is None:
                return
            try:
                seconds = engine._iterate(command, is_idle=is_idle)
            except BaseException:
                _logger.exception("the engine thread failed")
                engine._close()
            if engine._is_closed:
                return
            del engine  # while the thread waits, it keeps nothing alive
            try:
                command = commands.get(timeout=seconds) if seconds != 0.0 else None
                is_idle = False
            except Empty:
                command, is_idle = None, True


def _set_done(done: Future[None]) -> None:
    with suppress(InvalidStateError):
        done.set_result(None)
