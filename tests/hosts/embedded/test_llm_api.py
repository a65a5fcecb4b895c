"""The Python API: generate, stream, async streams; closing early, failures, shutdown."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import random
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from mtp_plugin.errors import ExecutorError
from mtp_plugin.hosts.embedded import LLM, SamplingParams, StepEvent
from mtp_plugin.hosts.embedded.gc_freeze import GCFreeze
from mtp_plugin.requests.states import FinishReason
from tests.hosts.embedded.conftest import (
    LOOPS,
    VOCAB,
    WORKERS,
    assert_drained,
    assert_idle,
    wait_until,
    watch_worker,
    wrap_worker,
)


def greedy(count: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": count, "ignore_eos": True, **options})


class Pieces:
    """A tokenizer with bytes, words and halves of characters; text is read letter by letter."""

    def __init__(self) -> None:
        words = [b" the", b"er", b"\n", b"\xe2\x82", b"\xac", b"ab", b"abc", b"\xf0\x9f\x98"]
        self.pieces = [bytes([i]) for i in range(32, 127)] + words
        self.pieces += [b"%d" % i for i in range(VOCAB - len(self.pieces))]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        return [self.pieces.index(bytes([b])) for b in text.encode()]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return b"".join(self.pieces[t] for t in token_ids).decode("utf-8", errors="replace")


class Breaking(Pieces):
    """Cannot decode one token."""

    def __init__(self, token: int, error: BaseException) -> None:
        super().__init__()
        self.token = token
        self.error = error

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        if self.token in token_ids:
            raise self.error
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def fail_in_step(llm: LLM, step: int, error: BaseException | None = None) -> None:
    """Raise the error in the n-th step from now."""
    steps = itertools.count(1)

    def fail(_: Any) -> None:
        if next(steps) == step:
            raise error or RuntimeError("broken kernel")

    watch_worker(llm, fail)


async def collect(events: AsyncIterator[StepEvent]) -> list[StepEvent]:
    return [event async for event in events]


def by_request(steps: Iterator[list[StepEvent]] | list[list[StepEvent]]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for events in steps:
        for event in events:
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
    return tokens


# --- generate ---


@pytest.mark.parametrize("vanilla", WORKERS)
def test_outputs_come_in_the_prompts_order(harness, target, prompts, vanilla) -> None:
    llm = harness.llm(vanilla=vanilla, max_batch_size=3)
    lengths = [9, 1, 12, 4, 12, 2, 7, 3]
    outputs = llm.generate(prompts, [greedy(n) for n in lengths])
    assert [o.request_id for o in outputs] == list(range(8))
    assert [o.prompt_token_ids for o in outputs] == prompts
    truth = [target.greedy(p, n) for p, n in zip(prompts, lengths, strict=True)]
    assert [o.token_ids for o in outputs] == truth
    assert {o.finish_reason for o in outputs} == {"length"}
    assert_drained(llm)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ([5, 6, 7], [5, 6, 7]),
        ((5, 6), [5, 6]),
        ("&'", [6, 7]),
        ({"prompt": "&'"}, [6, 7]),
        ([], []),
        (["&'"], [[6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_one_prompt_or_several(harness, target, prompt, ids) -> None:
    """One prompt has one output, as in TensorRT-LLM; a list has a list."""
    outputs = harness.llm(tokenizer=Pieces()).generate(prompt, greedy(4))
    if not isinstance(outputs, list):
        outputs, ids = [outputs], [ids]
    assert [o.prompt_token_ids for o in outputs] == ids
    assert [o.token_ids for o in outputs] == [target.greedy(p, 4) for p in ids]


def test_ids_count_on_over_calls(harness) -> None:
    llm = harness.llm()
    assert [o.request_id for o in llm.generate([[1], [2]], greedy(2))] == [0, 1]
    assert [o.request_id for o in llm.generate([[1]], greedy(2))] == [2]


class Owner:
    """What can be referred to weakly."""


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    was_frozen = gc.get_freeze_count() >= GCFreeze.HOST_FROZE
    gc.unfreeze()
    yield
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_is_kept_from_the_collector_comes_back_with_the_last_owner() -> None:
    freeze = GCFreeze()
    first, second = Owner(), Owner()
    thaw = freeze.hold(first)
    freeze.hold(second)
    thaw()
    thaw()
    assert gc.get_freeze_count() > GCFreeze.HOST_FROZE
    del second
    assert gc.get_freeze_count() < GCFreeze.HOST_FROZE


@pytest.mark.usefixtures("nothing_frozen")
def test_what_others_froze_stays_frozen() -> None:
    gc.freeze()
    owner = Owner()
    GCFreeze().hold(owner)()
    del owner
    assert gc.get_freeze_count() > GCFreeze.HOST_FROZE


@pytest.mark.usefixtures("nothing_frozen")
def test_imports_that_a_command_froze_are_no_hosts() -> None:
    freeze = GCFreeze()
    freeze.freeze_imports()
    imported = gc.get_freeze_count()
    later = [[] for _ in range(100)]
    owner = Owner()
    thaw = freeze.hold(owner)
    assert gc.get_freeze_count() >= imported + len(later)
    thaw()
    assert gc.get_freeze_count() < GCFreeze.HOST_FROZE


def test_no_tokenizer_no_text(harness) -> None:
    assert harness.llm().generate([[1, 2]], greedy(3))[0].text == ""


# --- streams ---


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_stream_gives_every_token_once(harness, target, prompts, no_overlap) -> None:
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    steps = list(llm.stream(prompts, greedy()))
    assert by_request(steps) == {i: target.greedy(p, 12) for i, p in enumerate(prompts)}
    endings = [e.finish_reason for events in steps for e in events if e.finish_reason is not None]
    assert endings == [FinishReason.LENGTH] * len(prompts)
    runs = [len(e.token_ids) for events in steps for e in events]
    assert 1 < max(runs) <= 4
    assert_drained(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
def test_r26_stop_strings_across_runs_as_without_drafts(
    harness, prompts, no_overlap, vanilla
) -> None:
    """R26: the same text and tokens as decoding without drafts; the stream is the full text."""
    rng = random.Random(3)
    tokenizer = Pieces()
    options = {"tokenizer": tokenizer, "disable_overlap_scheduler": no_overlap}
    texts = [o.text for o in harness.llm(k=0, **options).generate(prompts, greedy(24))]
    params = []
    for text in texts:
        start = rng.randrange(max(1, len(text) - 6))
        params.append(greedy(24, stop=(text[start : start + rng.randint(2, 5)] or "x", "never")))
    plainly = harness.llm(k=0, **options).generate(prompts, params)
    llm = harness.llm(vanilla=vanilla, **options)
    shown: dict[int, str] = {}
    for events in llm.stream(prompts, params):
        for event in events:
            shown[event.request_id] = shown.get(event.request_id, "") + event.text
    assert [shown[i] for i in range(len(prompts))] == [o.text for o in plainly]
    again = llm.generate(prompts, params)
    assert [(o.text, o.token_ids, o.finish_reason) for o in again] == [
        (o.text, o.token_ids, o.finish_reason) for o in plainly
    ]
    assert {o.finish_reason for o in plainly} == {"stop"}
    for output, param in zip(plainly, params, strict=True):
        assert not any(stop in output.text for stop in param.stop)


def test_r24_stop_beyond_the_cap_ends_by_length_and_before_it_by_stop(harness) -> None:
    """R24: whichever comes first in the run names the reason."""
    tokenizer = Pieces()
    (output,) = harness.llm(tokenizer=tokenizer).generate([[7, 8, 9]], greedy(16))
    words = [tokenizer.decode([t], skip_special_tokens=True) for t in output.token_ids]
    first = {word: words.index(word) for word in words}
    word, at = max(first.items(), key=lambda item: item[1])
    assert at >= 3
    llm = harness.llm(tokenizer=tokenizer)
    (capped,) = llm.generate([[7, 8, 9]], greedy(at, stop=(word,)))
    assert (capped.finish_reason, len(capped.token_ids)) == ("length", at)
    (stopped,) = llm.generate([[7, 8, 9]], greedy(at + 1, stop=(word,)))
    assert (stopped.finish_reason, len(stopped.token_ids)) == ("stop", at + 1)


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("after", [1, 6])
def test_closing_a_stream_cancels_and_frees(harness, target, prompts, no_overlap, after) -> None:
    """R14: nothing is held once the iterator is closed, and the executor goes on."""
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    stream = llm.stream(prompts, greedy(40))
    for _ in range(after):
        next(stream)
    stream.close()
    assert_idle(llm)
    assert_drained(llm)
    assert llm.generate([[4, 5]], greedy())[0].token_ids == target.greedy([4, 5], 12)


def test_a_stream_never_read_holds_nothing(harness) -> None:
    llm = harness.llm()
    stream = llm.stream([[1]], greedy())
    stream.close()
    assert_idle(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_generate_inside_a_running_stream(harness, target, prompts, no_overlap) -> None:
    """Both get all of their own tokens, though the inner call runs steps of the outer one."""
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    steps, inner = [], []
    for number, events in enumerate(llm.stream(prompts[:3], greedy(20))):
        steps.append(events)
        if number in (0, 3):
            inner += llm.generate([prompts[4 + number]], greedy(9))
    assert by_request(steps) == {i: target.greedy(prompts[i], 20) for i in range(3)}
    assert [o.token_ids for o in inner] == [target.greedy(prompts[i], 9) for i in (4, 7)]
    assert_drained(llm)


def test_closing_one_stream_leaves_the_other(harness, target, prompts) -> None:
    llm = harness.llm()
    one, two = llm.stream([prompts[0]], greedy(30)), llm.stream([prompts[1]], greedy(15))
    steps = [next(two)]
    next(one)
    one.close()
    assert llm.executor.has_work
    steps += list(two)
    assert by_request(steps) == {1: target.greedy(prompts[1], 15)}
    assert_drained(llm)


# --- async ---


def test_an_async_output_is_that_of_generate(harness) -> None:
    llm = harness.llm(tokenizer=Pieces())
    (output,) = llm.generate([[4, 5]], greedy(20))
    again = asyncio.run(llm.generate_async([4, 5], greedy(20)))
    (completion,) = output.outputs
    assert again == dataclasses.replace(
        output,
        request_id=output.request_id + 1,
        outputs=[dataclasses.replace(completion, acceptance=again.acceptance)],
    )
    assert again.acceptance.emitted == output.acceptance.emitted == 19


def test_generate_while_async_streams_run(harness, target, prompts) -> None:
    llm = harness.llm()

    async def main() -> tuple[list[int], list[int], list[int]]:
        other = asyncio.create_task(llm.generate_async(prompts[3], greedy(30)))
        await asyncio.sleep(0)
        here = llm.generate([prompts[4]], greedy())[0].token_ids
        outputs = await asyncio.to_thread(llm.generate, [prompts[5]], greedy())
        return (await other).token_ids, here, outputs[0].token_ids

    assert asyncio.run(main()) == (
        target.greedy(prompts[3], 30),
        target.greedy(prompts[4], 12),
        target.greedy(prompts[5], 12),
    )
    assert_drained(llm)


def test_the_event_loop_goes_on_while_steps_run(harness, prompts) -> None:
    llm = harness.llm()
    inside, seen = threading.Event(), threading.Event()

    def wait(_: Any) -> None:
        inside.set()
        assert seen.wait(20), "the event loop was blocked during a step"

    watch_worker(llm, wait)

    async def main() -> None:
        task = asyncio.create_task(llm.generate_async(prompts[3], greedy(3)))
        while not inside.is_set():
            await asyncio.sleep(0.001)
        # neither a new request nor an early leave waits for the step
        async with aclosing(llm.stream_async(prompts[4], greedy(50))) as stream:
            reader = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.01)
            seen.set()
            await reader
        await task

    asyncio.run(main())
    assert_drained(llm)


# --- failures ---


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("step", [1, 5])
def test_a_failing_step_ends_everything_and_frees(
    harness, target, prompts, no_overlap, step
) -> None:
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    worker = llm.executor.engine.pieces.worker
    fail_in_step(llm, step)
    with pytest.raises(RuntimeError, match="broken kernel"):
        llm.generate(prompts, greedy(30))
    assert_idle(llm)
    assert_drained(llm)
    wrap_worker(llm, lambda _: worker)
    outputs = llm.generate(prompts, greedy())
    assert [o.token_ids for o in outputs] == [target.greedy(p, 12) for p in prompts]


@pytest.mark.parametrize("step", [5])
def test_a_failing_step_reaches_every_caller(harness, target, prompts, step) -> None:
    llm = harness.llm()
    worker, steps = llm.executor.engine.pieces.worker, itertools.count(1)

    def fail(_: Any) -> None:
        assert wait_until(lambda: len(llm._engine._calls) == 6)  # the others enter the next step
        if next(steps) == step:
            raise RuntimeError("broken kernel")

    async def main() -> list[Any]:
        watch_worker(llm, fail)
        handle = llm.submit(prompts[1], greedy(90))
        calls = [handle, collect(handle), collect(llm.stream_async(prompts[2], greedy(90)))]
        calls += [llm.generate_async(prompts[3], greedy(90))]
        calls += [asyncio.to_thread(lambda: list(llm.stream(prompts[4:6], greedy(90))))]
        calls += [asyncio.to_thread(llm.generate, [prompts[6]], greedy(90))]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)

    results = asyncio.run(main())
    assert [type(result) for result in results] == [RuntimeError] * 6
    assert_drained(llm)
    wrap_worker(llm, lambda _: worker)
    again = asyncio.run(llm.generate_async([1, 2], greedy()))
    assert again.token_ids == target.greedy([1, 2], 12)


def token_of_one_text(texts: list[list[int]]) -> tuple[int, int, int]:
    """(Text, place, token) of a token that is in no other text, nor earlier in its own."""
    return next(
        (number, place, token)
        for number, text in enumerate(texts)
        for place, token in enumerate(text)
        if place >= 3
        and token not in text[:place]
        and not any(token in other for other in texts[:number] + texts[number + 1 :])
    )


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
def test_a_tokenizer_that_fails_ends_one_request_alone(
    harness, target, prompts, no_overlap, vanilla, caplog
) -> None:
    texts = [target.greedy(p, 24) for p in prompts]
    number, place, token = token_of_one_text(texts)
    tokenizer = Breaking(token, ValueError("no such piece"))
    llm = harness.llm(tokenizer=tokenizer, vanilla=vanilla, disable_overlap_scheduler=no_overlap)
    message = f"the tokenizer cannot decode token {token}: ValueError: no such piece"
    shown = dict.fromkeys(range(len(prompts)), "")
    ends = {}
    for events in llm.stream(prompts, greedy(24)):
        for event in events:
            shown[event.request_id] += event.text
            ends[event.request_id] = event.finish_reason
    outputs = llm.generate(prompts, greedy(24))
    for i, (output, text) in enumerate(zip(outputs, texts, strict=True)):
        tokens = text[: place + 1] if i == number else text
        decoded = Pieces().decode(text[:place] if i == number else text, skip_special_tokens=True)
        reason = "error" if i == number else "length"
        assert (output.token_ids, output.text) == (tokens, decoded)
        assert (output.finish_reason, output.error) == (reason, message if i == number else None)
        assert (shown[i], ends[i]) == (decoded, reason)
    assert_drained(llm)
    logged = [record for record in caplog.records if record.name == "mtp_plugin"]
    assert [record.getMessage() for record in logged] == [
        f"request {number}: {message}",
        f"request {number + len(prompts)}: {message}",
    ]
    assert all(record.exc_info[1] is tokenizer.error for record in logged)


def test_an_interrupt_in_a_tokenizer_ends_everything(harness, target, prompts) -> None:
    texts = [target.greedy(p, 24) for p in prompts]
    _, _, token = token_of_one_text(texts)
    llm = harness.llm(tokenizer=Breaking(token, KeyboardInterrupt()))
    with pytest.raises(ExecutorError, match=r"^the executor was interrupted$"):
        llm.generate(prompts, greedy(24))
    assert_drained(llm)


def test_dead_logits_reach_an_async_call(harness) -> None:
    llm = harness.llm()
    watch_worker(llm, lambda step: step["logits"].fill_(float("nan")))
    message = "the target gave a row of logits without any finite value"
    (output,) = llm.generate([[1, 2]], greedy())
    assert (output.finish_reason, output.error) == ("error", message)
    with pytest.raises(ExecutorError, match=f"^request 1: {message}$"):
        asyncio.run(llm.generate_async([1, 2], greedy()))
    assert_drained(llm)


def test_who_comes_while_a_step_fails_is_served(harness, target) -> None:
    """It was not in that step."""
    llm = harness.llm()
    reached, go_on, steps = threading.Event(), threading.Event(), itertools.count(1)

    def pause_and_fail(_: Any) -> None:
        if next(steps) == 3:
            reached.set()
            assert go_on.wait(20)
            raise RuntimeError("broken kernel")

    watch_worker(llm, pause_and_fail)

    async def main() -> list[Any]:
        first = asyncio.create_task(llm.generate_async([1, 2, 3], greedy(30)))
        await asyncio.to_thread(reached.wait, 20)
        second = asyncio.create_task(llm.generate_async([4, 5], greedy(30)))
        await asyncio.sleep(0.05)
        go_on.set()
        return await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), 30)

    failed, served = asyncio.run(main())
    assert isinstance(failed, RuntimeError)
    assert served.token_ids == target.greedy([4, 5], 30)
    assert_drained(llm)


def test_event_loops_are_not_kept(harness) -> None:
    llm = harness.llm()
    loops = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await llm.generate_async([1, 2], greedy(3))

    for _ in range(3):
        asyncio.run(main())
    assert wait_until(lambda: gc.collect() >= 0 and not any(loop() for loop in loops))


def test_a_stream_that_is_collected_within_a_step(harness, target) -> None:
    """It is closed in the middle of another call's step, in the same thread."""
    llm = harness.llm()
    cycle: dict[str, Any] = {"stream": llm.stream([[1, 2, 3]], greedy(60))}
    next(cycle["stream"])
    cycle["self"] = cycle

    watch_worker(llm, lambda _: gc.collect())
    gc.disable()
    try:
        del cycle
        (output,) = llm.generate([[4, 5]], greedy(10))
    finally:
        gc.enable()
    assert output.token_ids == target.greedy([4, 5], 10)
    assert_drained(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_a_failure_after_the_last_token_keeps_the_outputs(harness, target, no_overlap) -> None:
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    text = target.greedy([1, 2, 3], 30)
    stop = next(t for i, t in enumerate(text) if i > 8 and t not in text[:i])
    honest = llm.executor.sampler.update_requests

    def update_requests(state: Any) -> Any:
        if not llm._engine._running:
            raise RuntimeError("late")
        return honest(state)

    llm.executor.sampler.update_requests = update_requests
    (output,) = llm.generate([[1, 2, 3]], greedy(40, stop_token_ids=(stop,)))
    assert output.token_ids == text[: text.index(stop) + 1]
    assert_drained(llm)


def test_limits_beyond_any_integer_of_the_device(harness, target) -> None:
    llm = harness.llm(max_seq_len=64)
    huge = greedy(2**40, min_tokens=2**40, stop_token_ids=(3,))
    small = greedy(20)
    long, short = llm.generate([[1, 2, 3], [4, 5]], [huge, small])
    assert len(long.token_ids) == 61
    assert 3 not in long.token_ids
    assert short.token_ids == target.greedy([4, 5], 20)
