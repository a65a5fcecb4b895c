"""What broke sampled decoding in other engines: R27, R29 and R30."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.infer import decode
from tests.hosts.embedded.conftest import LOOPS, VOCAB, assert_drained, enqueue

NUM_TOKENS = 8
TABLE = list(itertools.product((None, 0, 1e-3, 0.7), (None, 1, 50), (None, 0.9)))


def expected(harness, prompt, params, number=0):
    return decode(harness.oracle_model.target, prompt, params, number=number).token_ids


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_r27_every_cell_of_the_table_with_the_others(harness, prompts, no_overlap):
    """An unset temperature with truncation is not greedy; greedy rows are unchanged."""
    params = [
        SamplingParams(
            max_new_tokens=NUM_TOKENS,
            ignore_eos=True,
            seed=number,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        for number, (temperature, top_k, top_p) in enumerate(TABLE)
    ]
    requested = [prompts[number % len(prompts)] for number in range(len(params))]
    llm = harness.llm(disable_overlap_scheduler=no_overlap)
    outputs = llm.generate(requested, params)
    assert_drained(llm)
    for prompt, one, output in zip(requested, params, outputs, strict=True):
        assert output.token_ids == expected(harness, prompt, one), one
    sampled = {one.is_greedy for one in params}
    assert sampled == {True, False}


def test_r29_a_seed_draws_the_same_alone_in_a_batch_and_in_an_aged_engine(harness, prompts):
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=11)
    others = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.7)
    llm = harness.llm()
    (alone,) = llm.generate([prompts[3]], params)
    batch = [prompts[3], *prompts[:7]]
    batched = llm.generate(batch, [params, *[others] * 7])
    llm.generate(prompts, others)
    (aged,) = llm.generate([prompts[3]], params)
    (fresh,) = harness.llm(k=1).generate([prompts[3]], params)
    reference = expected(harness, prompts[3], params)
    assert [alone.token_ids, batched[0].token_ids, aged.token_ids, fresh.token_ids] == [
        reference
    ] * 4


@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
@pytest.mark.parametrize("checkpoint", ["looping", "echo"])
def test_r30_penalties_see_drafts_in_front_and_none_that_was_rejected(
    harnesses, host, checkpoint, vanilla
):
    """A run that repeats what it drafted, as the echo's do: the penalty must see it. Of the looping
    model all drafts are accepted."""
    harness, rng = harnesses(checkpoint, host), random.Random(30)
    prompts = [[5, 9, 3], [17], [44, 44, 44, 2]]
    prompts += [[rng.randrange(VOCAB) for _ in range(3)] for _ in range(5)]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, repetition_penalty=1.2)
    llm = harness.llm(vanilla=vanilla, disable_overlap_scheduler=True)
    requests = enqueue(llm, prompts, params)
    manager = llm.pieces.manager
    while llm.executor.has_work:
        llm.executor.step()
        for request in requests:
            if request.is_finished or not request.output_token_ids:
                continue
            row = manager.table.column("count_row")[manager.slot_of(request.request_id)]
            counts = manager.logits_allocator.pools.counts[int(row)].to("cpu", torch.int64)
            held = torch.bincount(torch.tensor(request.tokens), minlength=len(counts))
            assert torch.equal(counts, held)
    assert_drained(llm)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == expected(harness, prompt, params)
    rate = llm.executor.acceptance.acceptance_rate
    assert rate == 1 if checkpoint == "looping" else 0 < rate < 1
