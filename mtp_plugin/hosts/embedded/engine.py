"""The thread that owns the step loop of an executor."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from mtp_plugin.errors import ExecutorError
from mtp_plugin.hosts.embedded.py_executor import PyExecutor, StepEvent
from mtp_plugin.hosts.embedded.request import LlmRequest

_logger = logging.getLogger(__name__)

StepResults = list[StepEvent] | Exception
"""Events of some requests from one step, or the error that ended these requests."""

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


class Sink(Protocol):
    """Receives the results of requests, in the engine thread."""

    @property
    def is_full(self) -> bool:
        """Whether the reader lags; no step runs while this holds for all requests."""
        ...

    def put(self, results: StepResults) -> bool:
        """Take the results of a step; False: there is no reader any more."""
        ...


Command = list[LlmRequest] | int | Future[None] | None
"""Submit requests; abort the request of an id; report that the commands before it were processed;
wake up."""


class Engine:
    """Runs the steps of an executor in a thread of its own, on behalf of callers in any thread.

    All methods but :meth:`flush` and :meth:`shutdown` return without waiting, and may be called at
    any moment: by a signal handler, the garbage collector, or within a step. Submissions and aborts
    enter a queue, which is processed between two steps. The thread refers weakly to this object, so
    that it ends, and all memory is freed, when the last reference to it is dropped.
    """

    def __init__(self, executor: PyExecutor, device: torch.device) -> None:
        self._executor = executor
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        """Sinks of unfinished requests."""
        self._running: dict[int, Sink] = {}
        """Those of requests in the executor; used by the engine thread alone."""
        self._expected: set[int] = set()
        """Ids of requests that are still being tokenised."""
        self._aborted: set[int] = set()
        """Expected requests that were aborted."""
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

    def submit(self, requests: Sequence[LlmRequest], sink: Sink) -> None:
        """Submit requests, which enter the same step; ``sink`` receives their results.

        Raises:
            ExecutorError: the executor was shut down, or this process was forked.
        """
        self._check_open()
        self._sinks.update(dict.fromkeys([r.request_id for r in requests], sink))
        self._commands.put(list(requests))
        if self._is_closed:  # since the check above
            self._fail([r.request_id for r in requests], ExecutorError(SHUT_DOWN))

    def expect(self, request_ids: Sequence[int], sink: Sink) -> None:
        """Register requests before they exist; :meth:`submit_expected` or :meth:`reject` follows.

        Raises:
            ExecutorError: see :meth:`submit`.
        """
        self._check_open()
        self._expected.update(request_ids)
        self._sinks.update(dict.fromkeys(request_ids, sink))
        if self._is_closed:
            self._fail(request_ids, ExecutorError(SHUT_DOWN))

    def submit_expected(self, requests: Sequence[LlmRequest]) -> None:
        """Submit expected requests, unless they were forgotten or failed in the meantime."""
        self._commands.put(list(requests))
        for request in requests:  # after their submission: an abort then follows it
            self._expected.discard(request.request_id)
            if request.request_id in self._aborted:
                self._aborted.discard(request.request_id)
                self._commands.put(request.request_id)

    def reject(self, request_ids: Sequence[int], error: Exception) -> None:
        """Report why expected requests cannot run."""
        self._fail(request_ids, error)
        self.forget(request_ids)

    def forget(self, request_ids: Sequence[int]) -> None:
        """Drop expected requests without readers."""
        for request_id in request_ids:
            self._sinks.pop(request_id, None)
            self._expected.discard(request_id)
            self._aborted.discard(request_id)

    # ---- ending -----------------------------------------------------------------------------

    def holds(self, request_id: int) -> bool:
        """Whether the request is unfinished."""
        return request_id in self._sinks

    def abort(self, request_id: int) -> bool:
        """Abort a request; False: no unfinished request has this id."""
        if request_id not in self._sinks:
            return False
        if request_id in self._expected:
            self._aborted.add(request_id)
            if request_id in self._expected:
                return True  # its submission aborts it
        self._commands.put(request_id)
        return True

    def abort_all(self, request_ids: Iterable[int]) -> None:
        """Abort those of the requests that are unfinished."""
        for request_id in request_ids:
            self.abort(request_id)

    def barrier(self) -> Future[None]:
        """Return a future that is done once all earlier commands took effect."""
        done: Future[None] = Future()
        self._commands.put(done)
        if self._is_closed or self._is_forked or self.is_current_thread:
            _set_done(done)
        return done

    def flush(self) -> None:
        """Wait until aborted requests have freed their resources; within a step, do not wait."""
        self.barrier().result()

    def shutdown(self) -> None:
        """End every request with an error and close the executor; within a step, when it ends."""
        self._is_closing = True
        self._commands.put(None)
        if not self.is_current_thread and not self._is_forked:
            self._thread.join()

    def stop_at_exit(self) -> None:
        """End the thread before the interpreter does: a thread in native code would crash it."""
        self._is_closing = True
        self._commands.put(None)
        if not self._is_forked:
            self._thread.join(EXIT_SECONDS)

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

    def _check_open(self) -> None:
        if self._is_forked:
            raise ExecutorError(FORKED)
        if self._is_closing or self._executor.is_closed:
            raise ExecutorError(SHUT_DOWN)

    # ---- the engine thread ------------------------------------------------------------------

    def _iterate(self, command: Command, *, is_idle: bool) -> float | None:
        """Process the queue, then run a step, or capture a CUDA graph if there was no command for
        `IDLE_SECONDS` and `captures_when_idle`.

        Returns:
            How many seconds to wait for the next command; None: until there is one.
        """
        barriers = self._process(command)
        if self._is_closing or self._executor.is_closed:
            self._close()
        for done in barriers:
            _set_done(done)
        if self._is_closed:
            return None
        if is_idle and self.captures_when_idle:
            self._executor.capture_next()
        if all(sink.is_full for sink in self._running.values()):
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
        barriers = []
        has_aborted = False
        while True:
            if isinstance(command, list):
                for request in command:
                    self._enqueue(request)
            elif isinstance(command, int):
                has_aborted = True
                if not self._executor.cancel(command):
                    self._sinks.pop(command, None)  # its submission was interrupted
            elif command is not None:
                barriers.append(command)
            try:
                command = self._commands.get_nowait()
            except Empty:
                break
        if has_aborted:
            try:
                self._deliver(self._executor.end_cancelled())
            except Exception as error:
                self._fail(list(self._running), error)
        return barriers

    def _enqueue(self, request: LlmRequest) -> None:
        sink = self._sinks.get(request.request_id)
        if sink is None:
            return
        try:
            self._executor.enqueue(request)
        except Exception as error:
            self._fail([request.request_id], error)
        else:
            self._running[request.request_id] = sink

    def _deliver(self, events: list[StepEvent]) -> None:
        shares: dict[Sink, list[StepEvent]] = {}
        for event in events:
            sink = self._running.get(event.request_id)
            if sink is None:
                continue
            shares.setdefault(sink, []).append(event)
            if event.finish_reason is not None:
                del self._running[event.request_id]
                self._sinks.pop(event.request_id, None)
        for sink, share in shares.items():
            if not sink.put(share):
                self.abort_all([event.request_id for event in share])

    def _fail(self, request_ids: Sequence[int], error: Exception) -> None:
        """End requests that are not in the executor, and deliver the error."""
        sinks = {self._sinks.pop(request_id, None) for request_id in request_ids}
        for request_id in request_ids:
            self._running.pop(request_id, None)
        for sink in sinks:
            if sink is not None:
                sink.put(error)

    def _close(self) -> None:
        if not self._executor.is_closed:
            try:
                self._executor.shutdown()
            except Exception:
                _logger.exception("the shutdown of the executor failed")
        self._is_closed = True  # what is submitted from now on fails by itself
        self._fail(list(self._sinks), ExecutorError(SHUT_DOWN))
        for done in self._process(None):
            _set_done(done)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _stop_engines() -> None:
    for engine in list(_engines):
        engine.stop_at_exit()


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
