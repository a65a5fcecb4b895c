"""Ways in which a call ends before its last token: what its readers get, and that nothing is left.

Coroutines among the cases run in an event loop.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from mtp_plugin.hosts.embedded import LLM
from mtp_plugin.requests.states import FinishReason
from tests.hosts.embedded.conftest import assert_drained, assert_idle, wait_until
from tests.hosts.embedded.test_llm_api import Pieces, greedy

PROMPT, TEXT = [1, 2, 3], "&'"
LONG = greedy(110)
CASES: list[tuple[Callable[[LLM], Any], Any, int]] = []


def ends(expected: Any, *, complete: int = 0) -> Callable[[Callable[[LLM], Any]], None]:
    """Add a case: what it returns, or the name of its error, and how many requests complete."""
    return lambda case: CASES.append((case, expected, complete))


async def started(llm: LLM) -> None:
    """Wait until a request runs."""
    while not llm.executor.num_steps:
        await asyncio.sleep(1e-3)


def slow_down(llm: LLM) -> None:
    """Have requests end by being left, rather than by their lengths."""
    forward = llm.executor.engine.forward

    def slowly(*args: Any) -> Any:
        time.sleep(0.03)
        return forward(*args)

    llm.executor.engine.forward = slowly  # type: ignore[method-assign]


def in_a_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def number_of(stream: Any) -> int:
    return sum(len(event.token_ids) for events in stream for event in events)


# --- left ---


@ends(True)
def stream_closed_by_another_thread(llm: LLM) -> bool:
    stream = llm.stream([PROMPT], LONG)
    next(stream)
    in_a_thread(stream.close).join(20)
    return number_of(stream) < 100 and list(stream) == []


@ends(110, complete=1)
def stream_read_by_another_thread(llm: LLM) -> int:
    stream, found = llm.stream([PROMPT], LONG), []
    in_a_thread(lambda: found.append(number_of(stream))).join(20)
    return found[0]


@ends(None)
def stream_dropped(llm: LLM) -> None:
    next(llm.stream([PROMPT] * 3, LONG))


@ends(None)
async def stream_async_left(llm: LLM) -> None:
    async for _ in llm.stream_async(PROMPT, LONG):
        break


@ends("StopAsyncIteration")
async def stream_async_closed(llm: LLM) -> None:
    stream = llm.stream_async(TEXT, LONG)
    await anext(stream)
    await stream.aclose()
    assert_drained(llm)
    await anext(stream)


@ends(None)
async def streaming_output_left(llm: LLM) -> None:
    async for _ in llm.generate_async(PROMPT, LONG, streaming=True):
        break


@ends(None)
async def handle_left(llm: LLM) -> None:
    llm.submit(PROMPT, LONG)
    async for _ in llm.submit(TEXT, LONG):
        break


@ends(None)
def generate_async_never_awaited(llm: LLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        llm.generate_async(PROMPT, LONG)


@ends(None)
def streaming_output_never_awaited(llm: LLM) -> None:
    llm.generate_async(PROMPT, LONG, streaming=True)


# --- cancelled ---


@ends([True, True, True])
async def tasks_cancelled(llm: LLM) -> list[bool]:
    calls = [llm.generate_async(prompt, LONG) for prompt in (TEXT, PROMPT, PROMPT)]
    tasks = [asyncio.create_task(call) for call in calls]
    del calls
    tasks[1].cancel()  # before it runs
    await started(llm)
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.wait(tasks)
    await asyncio.to_thread(assert_idle, llm)  # though the tasks are kept
    return [task.cancelled() for task in tasks]


@ends("TimeoutError")
async def awaiting_timed_out(llm: LLM) -> None:
    await asyncio.wait_for(llm.generate_async(PROMPT, LONG), 0.02)


async def read(call: Callable[[], Any]) -> None:
    await call()


async def iterate(call: Callable[[], Any]) -> None:
    async for _ in call():
        pass


@ends([True] * 5)
async def readers_cancelled_in_tasks_that_are_kept(llm: LLM) -> list[bool]:
    """A task keeps the error that ended it; its traceback must not keep the reader."""
    readers = [
        read(lambda: llm.generate_async(PROMPT, LONG)),
        read(lambda: llm.submit(PROMPT, LONG)),
        iterate(lambda: llm.submit(TEXT, LONG)),
        iterate(lambda: llm.stream_async(PROMPT, LONG)),
        iterate(lambda: llm.generate_async(PROMPT, LONG, streaming=True)),
    ]
    tasks = [asyncio.create_task(reader) for reader in readers]
    await started(llm)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await asyncio.to_thread(assert_idle, llm)
    return [task.cancelled() for task in tasks]


@ends([True, 110, 110], complete=1)
async def one_of_three_readers_cancelled(llm: LLM) -> list[object]:
    handle = llm.submit(PROMPT, LONG)

    async def wait() -> int:
        return len((await handle).token_ids)

    async def count() -> int:
        return sum([len(event.token_ids) async for event in handle])

    tasks = [asyncio.create_task(call()) for call in (wait, wait, count)]
    await started(llm)
    tasks[0].cancel()
    await asyncio.wait(tasks)
    return [tasks[0].cancelled(), tasks[1].result(), tasks[2].result()]


@ends("abort")
async def aborted_by_another_thread(llm: LLM) -> str | None:
    handle = llm.submit(PROMPT, LONG)
    await started(llm)
    in_a_thread(handle.abort)
    return (await handle).finish_reason


@ends(["abort", "abort"])
async def streaming_output_aborted(llm: LLM) -> list[str | None]:
    stream = llm.generate_async(PROMPT, LONG, streaming=True)
    await anext(stream)
    stream.abort()
    reasons = [output.finish_reason async for output in stream]
    return [reasons[-1], (await stream).finish_reason]


# --- event loops ---


@ends([110] * 3, complete=1)
def handle_of_one_loop_read_in_another(llm: LLM) -> list[int]:
    async def main() -> Any:
        return llm.submit(TEXT, LONG)

    async def wait() -> Any:
        return await handle

    handle = asyncio.run(main())
    outputs = [asyncio.run(wait()), asyncio.run(wait()), handle.result()]
    return [len(output.token_ids) for output in outputs]


@ends([8, 8], complete=3)
def generate_async_called_outside_of_its_loop(llm: LLM) -> list[int]:
    async def gather() -> Any:
        return await asyncio.gather(first, second)

    assert len(asyncio.run(llm.generate_async(TEXT, greedy(8))).token_ids) == 8
    first, second = (llm.generate_async(prompt, greedy(8)) for prompt in (TEXT, PROMPT))
    return [len(output.token_ids) for output in asyncio.run(gather())]


@ends(None)
def loop_ended_with_a_running_task(llm: LLM) -> None:
    tasks = []

    async def main() -> None:
        tasks.append(asyncio.create_task(llm.generate_async(TEXT, LONG)))
        await started(llm)

    asyncio.run(main())
    assert_idle(llm)


@ends(None)
def loop_ended_with_a_stream_that_is_kept(llm: LLM) -> None:
    kept = []

    async def main() -> None:
        kept.append(llm.stream_async(PROMPT, LONG))
        await anext(kept[0])
        await asyncio.sleep(1)  # its queue is full, and no step runs that would notice

    asyncio.run(main())
    assert_idle(llm)


@ends(None, complete=1)
def loop_closed_with_a_running_stream(llm: LLM) -> None:
    async def begin() -> Any:
        stream = llm.stream_async(PROMPT, LONG)
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin())
    loop.close()
    llm.generate(PROMPT, greedy(8))  # the next step ends it, though it is kept
    assert_idle(llm)
    del stream


# --- shut down ---


@ends(["the executor was shut down"] * 5)
def calls_after_shutdown(llm: LLM) -> list[str]:
    llm.shutdown()
    calls = [
        lambda: llm.generate(PROMPT, LONG),
        lambda: next(llm.stream(PROMPT, LONG)),
        lambda: llm.submit(PROMPT, LONG),
        lambda: asyncio.run(llm.generate_async(PROMPT, LONG)),
        lambda: llm.generate_async(PROMPT, LONG, streaming=True),
    ]
    return [error_of(call) for call in calls]


@ends(["the executor was shut down"] * 5)
def calls_during_shutdown(llm: LLM) -> list[str]:
    handle, stream = llm.submit(PROMPT, LONG), llm.stream(PROMPT, LONG)
    next(stream)

    async def main() -> list[Any]:
        partial = llm.generate_async(PROMPT, LONG, streaming=True)
        calls = [handle, partial, llm.generate_async(PROMPT, LONG)]
        calls += [iterate(lambda: llm.stream_async(PROMPT, LONG))]
        tasks = asyncio.gather(*calls, return_exceptions=True)
        await anext(partial)
        in_a_thread(llm.shutdown)
        return await tasks

    found = [str(error) for error in asyncio.run(main())]
    return [*found, error_of(lambda: number_of(stream))]


# --- signals and processes ---


def interrupted(llm: LLM, call: Callable[[], object]) -> str:
    """How a call ends whose thread is interrupted in a step."""
    main_thread, done = threading.get_ident(), []
    forward = llm.executor.engine.forward

    def interrupt(*args: Any) -> Any:
        if llm.executor.num_steps > 4 and not done:
            done.append(True)
            signal.pthread_kill(main_thread, signal.SIGINT)
        return forward(*args)

    llm.executor.engine.forward = interrupt  # type: ignore[method-assign]
    # a process in the background ignores interrupts
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return error_of(call)
    finally:
        signal.signal(signal.SIGINT, before)


@ends(["KeyboardInterrupt"] * 4)
def interrupts(llm: LLM) -> list[str]:
    calls = [
        lambda: llm.generate([PROMPT] * 3, LONG),
        lambda: number_of(llm.stream([PROMPT], LONG)),
        lambda: llm.submit(PROMPT, LONG).result(),
        lambda: asyncio.run(llm.generate_async(PROMPT, LONG)),
    ]
    found = []
    for call in calls:
        found.append(interrupted(llm, call))
        assert_idle(llm)
    return found


@ends(["this process was forked"] * 5, complete=1)
def fork(llm: LLM) -> list[str]:
    handle = llm.submit(PROMPT, LONG)

    async def wait() -> None:
        await handle

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        calls = [
            handle.result,
            lambda: asyncio.run(wait()),
            lambda: asyncio.run(llm.generate_async(PROMPT, LONG)),
            lambda: llm.submit(PROMPT, LONG),
            lambda: next(llm.stream(PROMPT, LONG)),
        ]
        os.write(writing, "\n".join(map(error_of, calls)).encode())
        os._exit(0)
    os.close(writing)
    assert wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    assert handle.result().finish_reason == "length"
    with os.fdopen(reading) as stream:
        return [line.partition(",")[0] for line in stream.read().split("\n")]


def error_of(call: Callable[[], object]) -> str:
    """The message of the error that a call raises, or else its name."""
    try:
        call()
    except BaseException as error:
        return str(error) or type(error).__name__
    return "none"


@pytest.mark.parametrize(
    ("case", "expected", "complete"), CASES, ids=[case.__name__ for case, *_ in CASES]
)
def test_call_that_ends_early_leaves_nothing(
    harness, case: Any, expected: Any, complete: int
) -> None:
    llm = harness.llm(k=0, tokenizer=Pieces())
    slow_down(llm)
    gc.collect()
    gc.disable()
    try:
        if inspect.iscoroutinefunction(case):
            found = asyncio.run(asyncio.wait_for(case(llm), 120))
        else:
            found = case(llm)
    except Exception as error:
        found = type(error).__name__
    finally:
        gc.enable()
    assert found == expected
    assert_drained(llm)
    assert_idle(llm)
    assert wait_until(lambda: not llm._engine._calls)
    assert llm.executor.num_finished[FinishReason.LENGTH] == complete
