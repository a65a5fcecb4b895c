"""The first law: the emitted text is what the target alone emits, whatever the schedule."""

from __future__ import annotations

import pytest

from mtp_plugin.hosts.embedded import SamplingParams
from tests.greedy import greedy_decode
from tests.hosts.embedded.conftest import LOOPS, WORKERS, assert_drained

NUM_TOKENS = 24


def generate(llm, prompts, **params):
    params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **params}
    outputs = llm.generate(prompts, SamplingParams(**params))
    assert_drained(llm)
    return [output.token_ids for output in outputs]


def expected(target, prompts):
    return [target.greedy(p, NUM_TOKENS) for p in prompts]


def test_the_two_oracles_agree(harness, target, prompts):
    """The tests' full recomputation and the package's cached decoder are independent."""
    for prompt, want in zip(prompts, expected(target, prompts), strict=True):
        assert greedy_decode(harness.oracle_model.target, prompt, NUM_TOKENS) == want


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
def test_mixed_lengths(harness, target, prompts, no_overlap, vanilla, k, chunked):
    llm = harness.llm(
        k=k,
        vanilla=vanilla,
        disable_overlap_scheduler=no_overlap,
        max_num_tokens=36 if chunked else 256,
        kv_fill=float("nan"),
    )
    assert generate(llm, prompts) == expected(target, prompts)
    # drafts of this checkpoint are often right: a run without any acceptance is a broken draft
    assert llm.executor.acceptance.acceptance_length > 1.15


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
def test_prompts_limited_while_requests_generate(harness, target, prompts, no_overlap, vanilla):
    llm = harness.llm(
        vanilla=vanilla,
        disable_overlap_scheduler=no_overlap,
        max_batch_size=3,
        max_prompt_tokens_while_generating=4,
        kv_fill=float("nan"),
    )
    mixed = []
    schedule = llm.executor.scheduler.schedule

    def recorded(in_flight):
        batch = schedule(in_flight)
        if batch.generation_requests and batch.context_requests:
            mixed.append(sum(r.context_chunk_size for r in batch.context_requests))
        return batch

    llm.executor.scheduler.schedule = recorded
    assert generate(llm, prompts) == expected(target, prompts)
    assert max(mixed) <= 4
    assert len(mixed) > 5


@pytest.mark.thinned("batch", cases=4)
@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 7, 8])
def test_batch_sizes(harness, target, prompts, no_overlap, vanilla, batch):
    llm = harness.llm(vanilla=vanilla, disable_overlap_scheduler=no_overlap, max_batch_size=batch)
    assert generate(llm, prompts[:batch]) == expected(target, prompts[:batch])


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
def test_more_requests_than_the_batch_holds(harness, target, prompts, no_overlap, vanilla):
    llm = harness.llm(vanilla=vanilla, disable_overlap_scheduler=no_overlap, max_batch_size=3)
    assert generate(llm, prompts) == expected(target, prompts)


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("k", [1, 3])
def test_preemption_forced_by_a_small_pool(harness, target, prompts, no_overlap, vanilla, k):
    llm = harness.llm(
        k=k,
        vanilla=vanilla,
        disable_overlap_scheduler=no_overlap,
        kv_cache_config={"tokens_per_block": 4, "max_tokens": 84},
    )
    assert generate(llm, prompts) == expected(target, prompts)
    assert llm.executor.num_preemptions > 0


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_without_speculation(harness, target, prompts, no_overlap):
    llm = harness.llm(k=0, disable_overlap_scheduler=no_overlap)
    assert generate(llm, prompts) == expected(target, prompts)
    assert llm.executor.acceptance.acceptance_length == 1.0


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("window", ["exact", "trtllm"])
@pytest.mark.parametrize("chain", ["output", "target_shift", "none"])
def test_vanilla_variants(harness, target, prompts, no_overlap, window, chain):
    llm = harness.llm(
        vanilla=True,
        disable_overlap_scheduler=no_overlap,
        mtp={"draft_window": window, "chain": chain},
    )
    assert generate(llm, prompts) == expected(target, prompts)


@pytest.mark.parametrize("vanilla", WORKERS)
def test_relaxed_acceptance_with_one_candidate_is_strict(harness, target, prompts, vanilla):
    llm = harness.llm(
        vanilla=vanilla,
        speculative={
            "use_relaxed_acceptance_for_thinking": True,
            "begin_thinking_phase_token": 5,
            "end_thinking_phase_token": 6,
        },
    )
    thinking = [[5, *p] for p in prompts]
    assert generate(llm, thinking) == expected(target, thinking)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_draft_length_schedule(harness, target, prompts, no_overlap):
    """Up to two requests draft three tokens, up to five one, a larger batch none."""
    llm = harness.llm(
        disable_overlap_scheduler=no_overlap, speculative={"draft_len_schedule": {2: 3, 5: 1}}
    )
    assert generate(llm, prompts) == expected(target, prompts)


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_requests_without_speculation_among_others(harness, target, prompts, no_overlap):
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    params = [
        SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, speculate=i % 2 == 0)
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == expected(target, prompts)
    assert all(o.acceptance.acceptance_length == 1.0 for o in outputs[1::2])
    assert sum(o.acceptance.acceptance_length for o in outputs[0::2]) > 4.0


@pytest.mark.parametrize("vanilla", WORKERS)
def test_latent_attention(mla_harness, prompts, vanilla):
    llm = mla_harness.llm(vanilla=vanilla, max_num_tokens=40)
    want = [greedy_decode(mla_harness.oracle_model.target, p, NUM_TOKENS) for p in prompts]
    assert generate(llm, prompts) == want
