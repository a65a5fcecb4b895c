"""Events of a step come from its results alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mtp_plugin.hosts.embedded import LLM, LlmRequest, SamplingParams, StepEvent
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.step_output import StepResult
from tests.hosts.embedded.conftest import (
    LOOPS,
    assert_drained,
    assert_idle,
    enqueue,
    run_steps,
    watch_worker,
    wrap_worker,
)


def start(llm: LLM, prompts: Sequence[list[int]], count: int = 12) -> list[LlmRequest]:
    return enqueue(llm, prompts, SamplingParams(max_new_tokens=count, ignore_eos=True))


def tokens_of(events: list[StepEvent], request: LlmRequest) -> list[int]:
    mine = [event for event in events if event.request_id == request.request_id]
    return [token for event in mine for token in event.token_ids]


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_events_are_the_steps_results(harness, target, prompts, no_overlap) -> None:
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    honest = llm.executor.sampler.update_requests
    collected: list[StepResult] = []

    def update_requests(state: Any) -> Sequence[StepResult]:
        results = honest(state)
        collected.extend(results)
        return results

    llm.executor.sampler.update_requests = update_requests
    requests = start(llm, prompts)
    events = run_steps(llm)
    assert [(e.request_id, e.token_ids, e.finish_reason) for e in events] == [
        (r.request_id, r.token_ids, r.finish_reason) for r in collected
    ]
    for request, prompt in zip(requests, prompts, strict=True):
        assert tokens_of(events, request) == request.output_token_ids == target.greedy(prompt, 12)
    assert_drained(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_events_need_a_result(harness, prompts, no_overlap) -> None:
    """The executor keeps no account of what it reported: it has nothing to guess from."""
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    honest = llm.executor.sampler.update_requests
    lost: list[StepResult] = []

    def update_requests(state: Any) -> Sequence[StepResult]:
        results = honest(state)
        if lost or results[0].finish_reason is not None:
            return results
        lost.append(results[0])
        return results[1:]

    llm.executor.sampler.update_requests = update_requests
    requests = start(llm, prompts[:3])
    events = run_steps(llm)
    (missing,) = lost
    for request in requests:
        without = len(missing.token_ids) if request.request_id == missing.request_id else 0
        assert tokens_of(events, request) == request.output_token_ids[without:]
    assert_drained(llm)


# --- cancelled while a step is in flight ---


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("step", [1, 4])
def test_a_cancel_within_a_step(harness, target, prompts, no_overlap, step) -> None:
    """As by a watcher of the worker: the request gets no token of that step, and its event with
    one of the next two; the others go on."""
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    requests = start(llm, prompts[:3])
    victim, left = requests[1], [step]

    def cancel(_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            assert llm.executor.cancel(victim.request_id)

    watch_worker(llm, cancel)
    before: list[StepEvent] = []
    while left[0] > 0:
        before += llm.executor.step()
    assert all(event.finish_reason is None for event in before)
    following = [llm.executor.step() for _ in range(2)]
    ends = [e for events in following for e in events if e.request_id == victim.request_id]
    assert [(e.token_ids, e.finish_reason) for e in ends] == [([], FinishReason.CANCELLED)]
    assert victim.py_seq_slot is None
    assert victim.request_id not in llm.executor._requests
    rest = run_steps(llm)
    events = [*before, *following[0], *following[1], *rest]
    for request, prompt in zip(requests, prompts[:3], strict=True):
        truth = target.greedy(prompt, 12)
        assert tokens_of(events, request) == request.output_token_ids
        assert request.output_token_ids == truth[: len(request.output_token_ids)]
        assert (request.output_token_ids == truth) is (request is not victim)
    assert_drained(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_a_cancel_after_a_requests_own_tokens(harness, prompts, no_overlap) -> None:
    """As a caller that counts steps: the tokens so far come with the last event."""
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    (request,) = start(llm, prompts[:1])
    sampler = llm.executor.sampler
    counted = sampler.on_step

    def on_step(*step: Any) -> None:
        counted(*step)
        llm.executor.cancel(request.request_id)

    sampler.on_step = on_step
    events = run_steps(llm)
    assert tokens_of(events, request) == request.output_token_ids
    assert len(request.output_token_ids) > 1
    assert events[-1].token_ids != []
    assert [e.finish_reason for e in events if e.finish_reason] == [FinishReason.CANCELLED]
    assert_drained(llm)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_nothing_is_left_when_all_are_cancelled(harness, prompts, no_overlap) -> None:
    llm = harness.llm(disable_overlap_scheduler=no_overlap, max_batch_size=2)
    requests = start(llm, prompts[:5])  # some run, some wait
    for _ in range(3):
        llm.executor.step()
    for request in requests:
        assert llm.executor.cancel(request.request_id)
    events = run_steps(llm)
    assert [(e.request_id, e.token_ids, e.finish_reason) for e in events] == [
        (request.request_id, [], FinishReason.CANCELLED) for request in requests
    ]
    assert llm.executor._launched is None
    assert not llm.executor.scheduler.active
    assert not llm.executor.scheduler.waiting
    assert_drained(llm)


def test_a_failed_step_returns_no_results(harness, target, prompts) -> None:
    """Every request of it ends with the error, and what comes later is not disturbed."""
    llm = harness.llm()
    worker = llm.executor.engine.pieces.worker
    requests = start(llm, prompts[:2])

    def fail(_: Any) -> None:
        raise RuntimeError("broken kernel")

    for _ in range(3):
        llm.executor.step()
    watch_worker(llm, fail)
    with pytest.raises(RuntimeError, match="broken kernel"):
        llm.executor.step()
    assert_idle(llm)
    for request in requests:
        assert request.finish_reason is FinishReason.ERROR
        assert request.error == "a step failed: RuntimeError: broken kernel"
    assert_drained(llm)
    wrap_worker(llm, lambda _: worker)
    (again,) = start(llm, prompts[:1])
    assert tokens_of(run_steps(llm), again) == target.greedy(prompts[0], 12)
