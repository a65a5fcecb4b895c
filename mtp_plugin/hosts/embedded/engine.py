"""The thread that owns the step loop of an executor."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

import torch

from mtp_plugin.errors import ExecutorError
from mtp_plugin.hosts.embedded.call import Call
from mtp_plugin.hosts.embedded.py_executor import PyExecutor, StepEvent

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
"""Maximum time that the interpreter's exit, or the end of a stream, waits for a running step."""

Command = Callable[[], object] | None
"""What a caller wants, run between two steps; None: wake up."""


class Engine:
    """Runs the steps of an executor in a thread of its own, on behalf of callers in any thread.

    What callers want enters an inbox of functions, which are called between two steps, so that all
    methods but :meth:`shutdown` return without waiting, also within a step and in the garbage
    collector. The thread refers weakly to this object, so that it ends, and all memory is freed,
    when the last reference to it is dropped.
    """

    def __init__(self, executor: PyExecutor, device: torch.device) -> None:
        self._executor = executor
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._calls: dict[int, Call] = {}
        """Calls of unfinished requests, also of those that are still being made."""
        # used by the engine thread alone
        self._running: set[int] = set()
        self._aborted: set[int] = set()
        """Requests that were aborted before they were made."""
        self._has_cancelled = False
        self._freed: list[Future[None]] = []
        """To be set once the requests that were cancelled are ended."""
        self._is_closing = self._is_closed = False
        self.captures_when_idle = False
        """See `LLM.capture_when_idle`."""
        self._pid = os.getpid()
        put = self._inbox.put
        reference = weakref.ref(self, lambda _: put(None))
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(
            target=_run, args=(reference, self._inbox, stream), name="mtp-engine", daemon=True
        )
        _engines.add(self)
        self._thread.start()

    # ---- callers ----------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """Have the requests of a call enter one step, once they are made.

        Raises:
            ExecutorError: the executor was shut down, or this process was forked.
        """
        if self._is_forked:
            raise ExecutorError(FORKED)
        if self._is_closing or self._executor.is_closed:
            raise ExecutorError(SHUT_DOWN)
        self._calls.update(dict.fromkeys(call.request_ids, call))
        if self._is_closed:  # since the check above
            self._fail(call.request_ids, ExecutorError(SHUT_DOWN))
        call.made.add_done_callback(lambda _: self._inbox.put(partial(self._start, call)))

    def abort(self, request_id: int) -> bool:
        """Abort a request; False: no unfinished request has this id."""
        if request_id not in self._calls:
            return False
        self._inbox.put(partial(self._cancel, request_id))
        return True

    def drop(self, call: Call) -> Future[None]:
        """Abort the requests of a call without readers; those not made yet never will be.

        Returns:
            A future that is done once their resources are freed; within a step, at once.
        """
        freed: Future[None] = Future()
        if any(request_id in self._calls for request_id in call.request_ids):
            call.made.cancel()
            self._inbox.put(partial(self._drop, call, freed))
            if not (self._is_closed or self._is_forked or self.is_current_thread):
                return freed
            freed = Future()
        freed.set_result(None)
        return freed

    def shutdown(self, timeout: float | None = None) -> None:
        """End every request with an error and close the executor; within a step, when it ends.

        Args:
            timeout: maximum number of seconds to wait for a running step.
        """
        self._is_closing = True
        self.wake()
        if not self.is_current_thread and not self._is_forked:
            self._thread.join(timeout)

    def wake(self) -> None:
        """Have the engine thread look at what has changed."""
        self._inbox.put(None)

    @property
    def is_running(self) -> bool:
        """Whether requests can be submitted."""
        return self._thread.is_alive() and not self._is_closing and not self._executor.is_closed

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
        """Empty the inbox, then run a step, or capture a CUDA graph if there was no command for
        `IDLE_SECONDS` and `captures_when_idle`.

        Returns:
            How many seconds to wait for the next command; None: until there is one.
        """
        self._empty_inbox(command)
        if self._is_closing or self._executor.is_closed:
            self._close()
            return None
        if is_idle and self.captures_when_idle:
            self._executor.capture_next()
        if not self._running:
            captures = self.captures_when_idle and self._executor.can_capture
            return IDLE_SECONDS if captures else None
        self._deliver_of(self._executor.step)
        return 0.0

    def _empty_inbox(self, command: Command) -> None:
        while True:
            if command is not None:
                command()
            try:
                command = self._inbox.get_nowait()
            except Empty:
                break
        if self._has_cancelled:
            self._has_cancelled = False
            self._deliver_of(self._executor.end_cancelled)
        freed, self._freed = self._freed, []
        for each in freed:
            with suppress(InvalidStateError):  # its reader was cancelled
                each.set_result(None)

    def _start(self, call: Call) -> None:
        if call.made.cancelled() or not self._calls.keys() >= set(call.request_ids):
            return  # it was dropped, or the engine was closed
        error = call.made.exception()
        if error is not None:
            self._fail(call.request_ids, _known(error))
            return
        for request in call.made.result():
            request_id = request.request_id
            try:
                self._executor.enqueue(request)
            except Exception as problem:
                self._fail([request_id], problem)
                continue
            self._running.add(request_id)
            if request_id in self._aborted:
                self._aborted.discard(request_id)
                self._cancel(request_id)

    def _cancel(self, request_id: int) -> None:
        if request_id in self._running:
            self._has_cancelled |= self._executor.cancel(request_id)
        elif request_id in self._calls:
            self._aborted.add(request_id)

    def _drop(self, call: Call, freed: Future[None]) -> None:
        for request_id in call.request_ids:
            if request_id in self._running:
                self._cancel(request_id)
            elif self._calls.pop(request_id, None) is not None:
                self._aborted.discard(request_id)
                call.end()
        self._freed.append(freed)

    def _deliver_of(self, step: Callable[[], list[StepEvent]]) -> None:
        """Deliver the events of a step; its error ends all running requests."""
        try:
            events = step()
        except BaseException as error:
            self._fail(self._running, _known(error))
        else:
            self._deliver(events)

    def _deliver(self, events: list[StepEvent]) -> None:
        shares: dict[Call, list[StepEvent]] = {}
        for event in events:
            if event.request_id not in self._running:
                continue
            shares.setdefault(self._calls[event.request_id], []).append(event)
            if event.finish_reason is not None:
                self._running.discard(event.request_id)
                del self._calls[event.request_id]
        for call, share in shares.items():
            call.put(share)
            if call.is_abandoned():
                self.drop(call)

    def _fail(self, request_ids: Iterable[int], error: Exception) -> None:
        """End requests that are not in the executor with an error."""
        failed: dict[Call | None, None] = {}
        for request_id in list(request_ids):
            self._running.discard(request_id)
            self._aborted.discard(request_id)
            failed[self._calls.pop(request_id, None)] = None
        for call in failed:
            if call is not None:
                call.end(error)

    def _close(self) -> None:
        if not self._executor.is_closed:
            try:
                self._executor.shutdown()
            except Exception:
                _logger.exception("the shutdown of the executor failed")
        self._is_closed = True  # what is submitted from now on fails by itself
        self._fail(self._calls, ExecutorError(SHUT_DOWN))
        self._empty_inbox(None)


def _known(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else ExecutorError(INTERRUPTED)


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _stop_engines() -> None:
    """End the threads before the interpreter does: a thread in native code would crash it."""
    for engine in list(_engines):
        engine.shutdown(EXIT_SECONDS)


def _run(
    engine_of: Callable[[], Engine | None],
    inbox: SimpleQueue[Command],
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
        while (engine := engine_of()) is not None:
            try:
                seconds = engine._iterate(command, is_idle=is_idle)
            except BaseException:
                _logger.exception("the engine thread failed")
                engine._close()
            if engine._is_closed:
                return
            del engine  # while the thread waits, it keeps nothing alive
            command, is_idle = None, False
            if seconds != 0.0:
                try:
                    command = inbox.get(timeout=seconds)
                except Empty:
                    is_idle = True
