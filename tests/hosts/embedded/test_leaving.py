"""Callers that leave early, in any way, leak nothing, without a further call."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from mtp_plugin.hosts.embedded import LLM, StepEvent
from tests.hosts.embedded.conftest import LOOPS, assert_drained, assert_idle, wait_until
from tests.hosts.embedded.test_llm_api import Pieces, greedy


def assert_nothing_left(llm: LLM) -> None:
    """Neither blocks nor slots, nor a request or a step that somebody would have to finish."""
    assert_drained(llm)
    assert_idle(llm)
    assert wait_until(lambda: not llm._engine._calls)


class Given:
    """What a reader may do: look at so many events, and keep what it likes."""

    def __init__(self, llm: LLM, prompts: list[list[int]], rng: random.Random) -> None:
        self.llm = llm
        self.prompts = prompts
        self.count = rng.randrange(6)
        self.delay = rng.random() * 0.04
        self.kept: list[Any] = []

    def stream(self, number: int = 3) -> AsyncIterator[StepEvent]:
        return self.llm.stream_async(self.prompts[number], greedy(100))

    async def read(self, number: int = 3) -> None:
        seen = 0
        async for _ in self.stream(number):
            seen += 1
            if seen > self.count:
                break


async def _breaks(given: Given) -> None:
    await given.read()


async def _breaks_among_others(given: Given) -> None:
    others = [asyncio.create_task(given.read(number)) for number in (4, 5)]
    await given.read()
    del others


async def _keeps_the_stream(given: Given) -> None:
    stream = given.stream()
    given.kept.append(stream)
    for _ in range(given.count):
        await anext(stream)


async def _is_cancelled(given: Given) -> None:
    task = asyncio.create_task(given.llm.generate_async(given.prompts[3], greedy(100)))
    await asyncio.sleep(given.delay)
    task.cancel()


async def _fails(given: Given) -> None:
    async for _ in given.stream():
        await asyncio.sleep(given.delay / 10)
        given.count -= 1
        if given.count < 0:
            raise LookupError


async def _leaves_tasks_running(given: Given) -> None:
    given.kept = [asyncio.create_task(given.read(number)) for number in (3, 4)]
    given.kept.append(asyncio.create_task(given.llm.generate_async(given.prompts[5], greedy(90))))
    await asyncio.sleep(given.delay)


async def _drops_handles(given: Given) -> None:
    handles = [given.llm.submit(given.prompts[number], greedy(100)) for number in (3, 4)]
    async for _ in handles[0]:
        given.count -= 1
        if given.count < 0:
            break


async def _drops_a_text(given: Given) -> None:
    given.llm.submit("&'" * 9, greedy(100))
    await asyncio.sleep(given.delay)


async def _ends_with_the_last_token(given: Given) -> None:
    await given.llm.generate_async(given.prompts[3], greedy(given.count + 1))


OFTEN = (_breaks, _keeps_the_stream, _is_cancelled)


@pytest.mark.parametrize(
    "leave",
    [
        _breaks,
        _breaks_among_others,
        _keeps_the_stream,
        _is_cancelled,
        _fails,
        _leaves_tasks_running,
        _drops_handles,
        _drops_a_text,
        _ends_with_the_last_token,
    ],
)
def test_nothing_is_left_when_an_event_loop_ends(
    harness, prompts, leave: Callable[[Given], Coroutine[Any, Any, None]]
) -> None:
    rng = random.Random(leave.__name__)
    llms = [harness.llm(disable_overlap_scheduler=off, tokenizer=Pieces()) for off in (True, False)]
    gc.collect()
    gc.disable()
    try:
        for number in range(12 if leave in OFTEN else 5):
            llm = llms[number % 2]
            given = Given(llm, prompts, rng)
            with suppress(LookupError):
                asyncio.run(asyncio.wait_for(leave(given), 30))
            if leave is not _drops_a_text:
                assert_nothing_left(llm)
    finally:
        gc.enable()
    for llm in llms:
        assert_nothing_left_soon(llm)


def assert_nothing_left_soon(llm: LLM) -> None:
    """As when a thread still tokenises that has no waiting caller."""
    llm._admission._pool.submit(lambda: None).result(30)
    assert_nothing_left(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("num_steps", [1, 5])
def test_nothing_is_left_of_what_is_aborted_between_steps(
    harness, prompts, no_overlap, num_steps
) -> None:
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    stream = llm.stream(prompts[:3], greedy(60))
    for _ in range(num_steps):
        next(stream)
    assert all(llm.abort(number) for number in range(3))
    assert_nothing_left(llm)
    ends = [event for events in stream for event in events if event.finish_reason is not None]
    assert sorted((end.request_id, end.finish_reason) for end in ends) == [
        (number, "cancelled") for number in range(3)
    ]


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_who_goes_on_is_not_hurt_by_an_abort_between_steps(
    harness, target, prompts, no_overlap
) -> None:
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    stream = llm.stream(prompts[:3], greedy(30))
    steps = [next(stream) for _ in range(3)]
    free = llm.blocks.num_free_blocks
    assert llm.abort(1)
    assert wait_until(lambda: free < llm.blocks.num_free_blocks)
    assert llm.blocks.num_free_blocks < llm.blocks.num_blocks
    steps += list(stream)
    for number in (0, 2):
        tokens = [t for events in steps for e in events if e.request_id == number for t in e[1]]
        assert tokens == target.greedy(prompts[number], 30)
    assert_nothing_left(llm)


def test_handles_give_back_without_a_step(harness, prompts) -> None:
    llm = harness.llm()
    first, second = (llm.submit(prompt, greedy(60)) for prompt in prompts[:2])
    next(llm.stream([[1]], greedy(60)))
    assert llm.executor.has_work
    assert first.abort()
    assert wait_until(lambda: first.is_finished)
    del second
    assert_nothing_left(llm)
    assert first.result().finish_reason == "abort"


@pytest.mark.parametrize("prompt", [[1, 2, 3], "&'"])
def test_done_callbacks_of_a_dropped_handle_are_called(harness, prompt) -> None:
    llm, done = harness.llm(tokenizer=Pieces()), threading.Event()

    async def submit() -> None:
        llm.submit(prompt, greedy(100)).add_done_callback(done.set)

    asyncio.run(submit())
    assert done.wait(20)
    assert_nothing_left_soon(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_an_abort_within_a_step_takes_place_at_its_end(harness, prompts, no_overlap) -> None:
    """The stepping thread does it, without a further step."""
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    stream = llm.stream(prompts[:2], greedy(60))
    next(stream)
    inside, go_on = threading.Event(), threading.Event()
    forward = llm.executor.engine.forward

    def waiting(*args: Any) -> Any:
        inside.set()
        assert go_on.wait(20)
        return forward(*args)

    llm.executor.engine.forward = waiting  # type: ignore[method-assign]
    thread = threading.Thread(target=next, args=(stream,))
    thread.start()
    assert inside.wait(20)
    assert all(llm.abort(number) for number in (0, 1))
    assert llm.blocks.num_free_blocks < llm.blocks.num_blocks
    go_on.set()
    thread.join(20)
    assert_nothing_left(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_threads_that_leave_as_they_like_leave_nothing(
    harness, target, prompts, no_overlap
) -> None:
    """And do not disturb the others."""
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    truth = {number: target.greedy(prompts[number], 12) for number in range(4)}
    found: list[bool] = []

    def stay(number: int) -> None:
        for _ in range(6):
            output = llm.generate(prompts[number], greedy(12))
            found.append(output.token_ids == truth[number])

    def leave(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(15):
            way = rng.randrange(4)
            prompt, count = rng.choice(prompts), rng.randrange(4)
            if way == 0:
                handle = llm.submit(prompt, greedy(60))
                time.sleep(rng.random() * 0.01)
                handle.abort()
                assert handle.result().finish_reason in {"abort", "length"}
            elif way == 1:
                llm.submit(prompt, greedy(60))
            elif way == 2:
                stream = llm.stream([prompt, [1, 2]], greedy(60))
                for _ in range(count):
                    next(stream)
                stream.close()
            else:
                with suppress(asyncio.TimeoutError):
                    call = llm.generate_async(prompt, greedy(60))
                    asyncio.run(asyncio.wait_for(call, rng.random() * 0.01))

    calls = [(stay, number) for number in range(2)] + [(leave, seed) for seed in range(3)]
    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(call, number) for call, number in calls]:
            done.result(60)
    assert found == [True] * 12
    assert_nothing_left(llm)
