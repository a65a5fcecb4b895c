"""Wherever a signal handler raises in a calling thread, nothing is lost.

Python runs handlers at known places of its code: after calls, at the start of functions, where
loops go round. Each such place of the modules that submit and wait raises here once. Steps run in
the engine thread, where no handler runs.
"""

from __future__ import annotations

import dis
import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import pytest

from mtp_plugin.errors import ExecutorError
from mtp_plugin.hosts.embedded import LLM, RequestHandle, SamplingParams
from tests.hosts.embedded.conftest import Harness, wait_until
from tests.hosts.embedded.test_leaving import assert_nothing_left
from tests.hosts.embedded.test_llm_api import Pieces

BOOKS = (
    "hosts/embedded/engine.py",
    "hosts/embedded/handle.py",
    "hosts/embedded/results.py",
    "hosts/embedded/tokenising.py",
)
HANDLED_AFTER = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
"""Instructions after which handlers run, by how their names begin."""
EDITED = SamplingParams(max_new_tokens=2, ignore_eos=True, logit_bias={3: 1.0})

Place = tuple[CodeType, int]
Callback = Callable[[CodeType, int], None]
"""Called with a function's code and the offset of the instruction that runs next."""

if sys.version_info >= (3, 12):
    # opcode events of sys.settrace miss the first calls of a function there
    TOOL = 4

    @contextmanager
    def instructions_watched(call: Callback) -> Iterator[None]:
        monitoring = sys.monitoring
        event = monitoring.events.INSTRUCTION

        def before(code: CodeType, offset: int) -> Any:
            return call(code, offset) if is_watched(code) else monitoring.DISABLE

        monitoring.use_tool_id(TOOL, "signal handlers")
        monitoring.register_callback(TOOL, event, before)
        monitoring.set_events(TOOL, event)
        try:
            yield
        finally:
            monitoring.set_events(TOOL, 0)
            monitoring.register_callback(TOOL, event, None)
            monitoring.free_tool_id(TOOL)

else:

    @contextmanager
    def instructions_watched(call: Callback) -> Iterator[None]:
        def entered(frame: FrameType, event: str, arg: Any) -> Any:
            del event, arg
            if not is_watched(frame.f_code):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return within

        def within(frame: FrameType, event: str, arg: Any) -> Any:
            del arg
            if event == "opcode":
                call(frame.f_code, frame.f_lasti)
            return within

        outer = sys.gettrace()
        sys.settrace(entered)
        try:
            yield
        finally:
            sys.settrace(outer)


def is_watched(code: CodeType) -> bool:
    """Whether handlers raise in a function."""
    return code.co_filename.endswith(BOOKS) and code.co_name != "__del__"


class Handler:
    """Counts the places where a handler may run, and raises at one of them."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._raise_at: int | None = None
        self._error: type[BaseException] = KeyboardInterrupt
        self._offsets: dict[CodeType, frozenset[int]] = {}

    @contextmanager
    def watching(self, at: int | None, error: type[BaseException]) -> Iterator[None]:
        """Raise the error at this place of the block's, if any."""
        self.places, self._raise_at, self._error = [], at, error
        gc.disable()  # Python ignores an error in a finalizer
        try:
            with instructions_watched(self._before):
                yield
        finally:
            gc.enable()

    def _before(self, code: CodeType, offset: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if offset in self._handled(code):
            self.places.append((code, offset))
            if len(self.places) - 1 == self._raise_at:
                raise self._error("by a handler")

    def _handled(self, code: CodeType) -> frozenset[int]:
        """Offsets of a function's instructions in front of which handlers run."""
        offsets = self._offsets.get(code)
        if offsets is None:
            bytecode = dis.Bytecode(code)
            tries = getattr(bytecode, "exception_entries", ())
            offsets = self._offsets[code] = frozenset(
                step.offset
                for before, step in pairwise(bytecode)
                if before.opname.startswith(HANDLED_AFTER)
                # a call's own error is that of the call: in the same `try`
                and _try_of(tries, before.offset) == _try_of(tries, step.offset)
            )
        return offsets


def _try_of(tries: Iterable[Any], offset: int) -> int | None:
    """Where an error at an offset goes to; None: to the caller."""
    return next((one.target for one in tries if one.start <= offset < one.end), None)


def generate(
    llm: LLM, handler: Handler, at: int | None, error: type[BaseException]
) -> tuple[bool, RequestHandle]:
    """Two requests at a time, and one that is ended before: whether the one that is waited for
    ended well, and the other."""
    other, ended = llm.submit([7, 8], EDITED), llm.submit([8, 7], EDITED)
    with handler.watching(at, error), suppress(KeyboardInterrupt, ExecutorError):
        ended.abort()
        for _ in llm.stream([[9]], EDITED):
            pass
        output = llm.generate("&'", EDITED)
        return len(output.token_ids) == EDITED.max_new_tokens, other
    return False, other


def is_free(lock: Any, other_thread: ThreadPoolExecutor) -> bool:
    """Whether another thread gets a lock at once."""

    def take() -> bool:
        taken = lock.acquire(blocking=False)
        if taken:
            lock.release()
        return taken

    return other_thread.submit(take).result()


@pytest.fixture
def other_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.thinned
@pytest.mark.parametrize("error", [KeyboardInterrupt, ExecutorError])
def test_nothing_is_lost_wherever_a_handler_raises(
    harness: Harness, target, other_thread: ThreadPoolExecutor, error: type[BaseException]
) -> None:
    llm, handler = harness.llm(k=1, tokenizer=Pieces()), Handler()
    locks = (llm._admission.tokenizer_lock._lock,)
    generate(llm, handler, None, error)  # what is made once is there
    assert generate(llm, handler, None, error)[0]
    first = {place: number for number, place in reversed(list(enumerate(handler.places)))}
    assert len(first) > 30  # Python 3.10 has fewer places than later versions
    for at in sorted(first.values()):
        is_whole, other = generate(llm, handler, at, error)
        code, offset = handler.places[at]
        assert not is_whole or error is ExecutorError, (code, offset)
        assert wait_until(lambda: other.is_finished), (code, offset)  # noqa: B023
        assert all(is_free(lock, other_thread) for lock in locks), (code, offset)
        assert_nothing_left(llm)
    output = llm.generate([1, 2, 3], SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert output.token_ids == target.greedy([1, 2, 3], 3)
