"""Synthetic acceptance end to end: the requested rates, valid ids, the same run, and its mark."""

from __future__ import annotations

import math

import pytest

from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from tests.hosts.embedded.conftest import (
    LOOPS,
    VOCAB,
    WORKERS,
    assert_drained,
    watch_worker,
)

RATES = (0.8, 0.6, 0.4)


def synthetic(harness, rates=RATES, seed: int = 3, **options):
    mtp = {
        "verification": "synthetic",
        "synthetic_acceptance": rates,
        "synthetic_seed": seed,
        **options.pop("mtp", {}),
    }
    return harness.llm(mtp=mtp, **options)


def forced(**options) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 32, "ignore_eos": True, **options})


def assert_shares(stats: AcceptanceStats, rates, cut: int) -> None:
    """Within four deviations of the requested; ``cut`` steps may have been too short for K."""
    assert stats.label.is_drawn
    for rate, measured in zip(rates, stats.per_position, strict=True):
        deviation = math.sqrt(rate * (1 - rate) / stats.steps)
        assert measured <= rate + 4 * deviation
        assert measured >= rate - 4 * deviation - cut / stats.steps


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("no_overlap", LOOPS)
def test_r45_forced_acceptance_gives_tokens_and_says_so(harness, prompts, vanilla, no_overlap):
    """R45: shares far above what the drafts deserve: ids stay ids, and every output is marked."""
    llm = synthetic(harness, (1.0, 0.9, 0.9), vanilla=vanilla, disable_overlap_scheduler=no_overlap)
    outputs = llm.generate(prompts, forced(stop_token_ids=(VOCAB - 1,), min_tokens=32))
    assert_drained(llm)
    for output in outputs:
        assert len(output.token_ids) == 32
        assert all(0 <= token < VOCAB - 1 for token in output.token_ids)
        assert output.label.is_drawn
        assert output.acceptance.label.is_drawn
    stats = llm.executor.acceptance
    assert stats.label.is_drawn
    assert stats.acceptance_length > 3
    honest = harness.llm(vanilla=vanilla, disable_overlap_scheduler=no_overlap)
    true = honest.generate(prompts, forced(stop_token_ids=(VOCAB - 1,), min_tokens=32))
    assert honest.executor.acceptance.acceptance_length < 2.5
    assert [o.token_ids for o in true] != [o.token_ids for o in outputs]
    assert honest.executor.acceptance.label is None
    assert all(o.label is None for o in true)


def test_the_same_run_whatever_batch_and_loop(harness, prompts):
    """Same seed, same tokens and counts: alone, together, in either loop; not with another."""
    requested, prompts = forced(max_new_tokens=16), prompts[:6]
    together = synthetic(harness).generate(prompts, requested)
    again = synthetic(harness, disable_overlap_scheduler=True, max_batch_size=3)
    alone = synthetic(harness)
    for output, other in zip(together, again.generate(prompts, requested), strict=True):
        assert output.token_ids == other.token_ids
        assert output.acceptance == other.acceptance
    for prompt, output in zip(prompts, together, strict=True):  # in the same order
        (one,) = alone.generate([prompt], requested)
        assert one.token_ids == output.token_ids
        assert one.acceptance == output.acceptance
    another = synthetic(harness, seed=4).generate(prompts, requested)
    assert [o.acceptance for o in another] != [o.acceptance for o in together]


@pytest.mark.parametrize(("rates", "vanilla"), [(RATES, False), (0.7, True)])
def test_measured_rates_are_those_requested(harness, rates, vanilla):
    """A batch of prompts of one length meets them, as so many runs of one request would; some
    requests are preempted."""
    cache = {"tokens_per_block": 4, "max_tokens": 480}
    llm = synthetic(harness, rates, vanilla=vanilla, kv_cache_config=cache)
    outputs = llm.generate([[5, 6, 7 + i] for i in range(8)], forced(max_new_tokens=90))
    assert len({tuple(output.acceptance.histogram) for output in outputs}) == len(outputs)
    total = AcceptanceStats(3)
    for output in outputs:
        total.merge(output.acceptance)
    assert total.steps > 200
    assert llm.executor.num_preemptions > 0
    assert_shares(total, rates if rates is RATES else (0.7, 0.7**2, 0.7**3), cut=16)
    assert_drained(llm)


def test_absent_drafts_are_not_forced(harness, prompts):
    """Requests that do not speculate, and the last tokens of a text, whatever the rates."""
    llm = synthetic(harness, 1.0)
    params = [forced(speculate=i != 2, max_new_tokens=6 + i) for i in range(len(prompts))]
    seen = []

    def look(step):
        spec = step["spec_metadata"]
        seen.append((spec.draft_lens.tolist(), step["attn_metadata"].num_contexts))

    counts = []

    def count(_, outputs):
        counts.append(outputs["new_tokens_lens"].tolist())

    watch_worker(llm, look, count)
    for output, requested in zip(llm.generate(prompts, params), params, strict=True):
        assert len(output.token_ids) == requested.max_new_tokens
        if not requested.speculate:
            assert output.acceptance.acceptance_length == 1.0
    for (lens, num_contexts), emitted in zip(seen, counts, strict=True):
        assert emitted[num_contexts:] == [length + 1 for length in lens]
    assert {length for lens, _ in seen for length in lens} == {0, 1, 2, 3}


def test_events_are_marked(harness):
    for llm, mark in ((synthetic(harness), True), (harness.llm(), False)):
        events = [e for step in llm.stream([[1, 2, 3]], forced(max_new_tokens=9)) for e in step]
        assert len(events) > 2
        assert all((event.label is not None) is mark for event in events)
