"""Requests that are handed in and read later; ending one by its id; ``async with``."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import pytest

from mtp_plugin.errors import ExecutorError, RequestError
from mtp_plugin.hosts.embedded import RequestHandle, RequestOutput, StepEvent
from tests.hosts.embedded.conftest import LOOPS, assert_drained, assert_idle, watch_worker
from tests.hosts.embedded.test_llm_api import Breaking, greedy


async def read(handle: RequestHandle) -> list[int]:
    return [token async for event in handle for token in event.token_ids]


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_results_of_handles_share_batches(harness, target, prompts, no_overlap) -> None:
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    handles = [llm.submit(prompt, greedy()) for prompt in prompts]
    assert [handle.request_id for handle in handles] == list(range(8))
    assert not any(handle.is_finished for handle in handles)
    outputs = [handle.result() for handle in handles]
    assert [o.token_ids for o in outputs] == [target.greedy(p, 12) for p in prompts]
    assert all(handle.is_finished for handle in handles)
    assert handles[0].result() == outputs[0]
    assert llm.executor.num_steps < 20  # one after the other they take 30 and more
    assert_drained(llm)


def test_a_step_in_flight_after_the_last_token_is_finished(harness, target) -> None:
    stop = target.greedy([3, 4], 20)[7]
    for no_overlap in (True, False):
        llm = harness.llm(disable_overlap_scheduler=no_overlap)
        output = llm.submit([3, 4], greedy(20, stop_token_ids=[stop])).result()
        assert output.finish_reason == "stop"
        assert_idle(llm)
        assert_drained(llm)


def test_a_handle_is_read_and_awaited_any_number_of_times(harness, target) -> None:
    llm = harness.llm()
    truth = target.greedy([1, 2, 3], 20)

    async def main() -> None:
        handle = llm.submit([1, 2, 3], greedy(20))
        async for event in handle:
            assert event.request_id == handle.request_id
            break  # ends nothing
        found = await asyncio.gather(read(handle), read(handle), handle, handle)
        assert [found[0], found[1], found[2].token_ids, found[3].token_ids] == [truth] * 4
        assert await read(handle) == truth
        assert handle.result().token_ids == truth

    asyncio.run(asyncio.wait_for(main(), 30))
    assert_drained(llm)


def test_a_reader_that_is_cancelled_loses_nothing_for_the_others(harness, target) -> None:
    llm, go_on = harness.llm(), threading.Event()

    def pause(_: Any) -> None:
        assert llm.executor.num_steps < 4 or go_on.wait(20)

    watch_worker(llm, pause)

    async def main() -> list[list[int]]:
        handle = llm.submit([1, 2, 3], greedy(30))
        leaving, *others = (asyncio.create_task(read(handle)) for _ in range(3))
        await handle.read_from(1)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        go_on.set()
        return [*await asyncio.gather(*others), await read(handle)]

    assert asyncio.run(asyncio.wait_for(main(), 30)) == [target.greedy([1, 2, 3], 30)] * 3
    assert_drained(llm)


def test_other_calls_take_a_handle_along(harness, target, prompts) -> None:
    llm = harness.llm()
    handle = llm.submit(prompts[0], greedy(6))
    output = llm.generate(prompts[1], greedy(30))
    assert handle.is_finished
    assert output.token_ids == target.greedy(prompts[1], 30)
    steps = llm.executor.num_steps
    assert handle.result().token_ids == target.greedy(prompts[0], 6)
    assert llm.executor.num_steps == steps


# --- ending ---


@pytest.mark.parametrize(("no_overlap", "by_id"), [(True, True), (False, False)])
def test_aborting_a_handle(harness, target, prompts, no_overlap, by_id) -> None:
    llm = harness.llm(disable_overlap_scheduler=no_overlap)

    async def main() -> tuple[list[StepEvent], RequestOutput, RequestOutput]:
        handle, other = llm.submit(prompts[3], greedy(90)), llm.submit(prompts[4], greedy())
        events = []
        async for event in handle:
            events.append(event)
            if len(events) == 2:
                assert llm.abort(handle.request_id) if by_id else handle.abort()
        return events, await handle, await other

    events, output, other = asyncio.run(asyncio.wait_for(main(), 30))
    assert (events[-1].finish_reason, output.finish_reason) == ("cancelled", "abort")
    tokens = [token for event in events for token in event.token_ids]
    assert tokens == output.token_ids == target.greedy(prompts[3], 90)[: len(tokens)]
    assert 2 <= len(tokens) < 90
    assert other.token_ids == target.greedy(prompts[4], 12)
    assert_drained(llm)
    assert not llm.abort(output.request_id)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_aborting_one_request_of_a_stream(harness, target, prompts, no_overlap) -> None:
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    found: dict[int, list[StepEvent]] = {0: [], 1: []}
    for number, events in enumerate(llm.stream(prompts[:2], greedy(30))):
        if number == 1:
            assert llm.abort(0)
        for event in events:
            found[event.request_id].append(event)
    assert [found[i][-1].finish_reason for i in (0, 1)] == ["cancelled", "length"]
    tokens = {i: [t for event in found[i] for t in event.token_ids] for i in (0, 1)}
    assert len(tokens[0]) < 30
    assert tokens[1] == target.greedy(prompts[1], 30)
    assert_drained(llm)


def test_aborting_from_another_thread_while_generate_waits(harness, prompts) -> None:
    llm = harness.llm()
    stream = llm.stream([prompts[0]], greedy(110))
    next(stream)

    def end() -> None:
        while not llm.abort(1):
            time.sleep(0.001)

    thread = threading.Thread(target=end)
    thread.start()
    outputs = llm.generate(prompts[1:3], greedy(100))
    thread.join(30)
    assert [o.finish_reason for o in outputs] == ["abort", "length"]
    stream.close()
    assert_drained(llm)


@pytest.mark.parametrize(
    ("request_id", "quoted"),
    [("0", "'0'"), (True, "True"), ([], "[]")],
)
def test_request_id_of_another_type_is_refused(harness, request_id: Any, quoted: str) -> None:
    llm = harness.llm()
    for call in (llm.abort, llm.find_request):
        with pytest.raises(RequestError) as error:
            call(request_id)
        assert str(error.value) == f"request_id: expected an integer, got {quoted}"


@pytest.mark.parametrize("request_id", [7, -1])
def test_aborting_what_there_is_not(harness, request_id: int) -> None:
    llm = harness.llm()
    assert not llm.abort(request_id)
    handle = llm.submit([1], greedy(2))
    handle.result()
    assert not handle.abort()


def test_a_handle_keeps_its_executor_and_nothing_keeps_both(harness) -> None:
    gc.collect()
    gc.disable()
    try:
        llm = harness.llm()
        handle = llm.submit([1, 2], greedy(4))
        parts = [weakref.ref(part) for part in (llm, llm.executor, handle)]
        del llm
        assert len(handle.result().token_ids) == 4
        del handle
        assert [part() for part in parts] == [None] * 3
    finally:
        gc.enable()


# --- failures ---


def test_a_request_that_fails_alone(harness, target) -> None:
    token = target.greedy([1, 2], 12)[3]
    llm = harness.llm(tokenizer=Breaking(token, ValueError("no such piece")))
    handle = llm.submit([1, 2], greedy())
    with pytest.raises(ExecutorError, match=r"^request 0: the tokenizer cannot decode token"):
        handle.result()

    async def main() -> RequestOutput:
        return await handle

    with pytest.raises(ExecutorError, match=r"^request 0: the tokenizer cannot decode token"):
        asyncio.run(main())


# --- async with ---


def test_async_with(harness, target, prompts) -> None:
    async def main() -> tuple[RequestOutput, RequestHandle]:
        async with harness.llm() as llm:
            parts.append(llm)
            left = llm.submit(prompts[3], greedy(110))
            return await llm.generate_async(prompts[4], greedy()), left

    parts: list[Any] = []
    output, left = asyncio.run(asyncio.wait_for(main(), 30))
    assert output.token_ids == target.greedy(prompts[4], 12)
    assert output.finish_reason == "length"
    assert parts[0].executor.is_closed
    assert_drained(parts[0])
    with pytest.raises(ExecutorError, match=r"^the executor was shut down$"):
        left.result()
