"""Drafts and draft KV after any history equal those of a fresh run over the prefix."""

from __future__ import annotations

import random

import pytest
import torch

from mtp_plugin.hosts.embedded import SamplingParams
from tests.hosts.embedded.conftest import LOOPS, VOCAB, WORKERS, assert_drained, wrap_worker
from tests.hosts.embedded.oracles import Oracle, ScriptedDrafts


class ExactnessCheck:
    """Compares every drafted row of a run with the oracle."""

    def __init__(self, oracle: Oracle, pools, max_lengths: list[int]) -> None:
        self.oracle = oracle
        self.pools = pools
        self.max_lengths = max_lengths
        self.num_drafts = 0
        self.num_kv_rows = 0

    def __call__(self, request_id, prefix, drafts, script, row, attention) -> None:
        fresh = self.oracle.fresh(prefix, tuple(script))
        # drafts past the request's full length are absent in the next step
        wanted = max(0, self.max_lengths[request_id] - len(prefix))
        assert drafts[:wanted] == fresh.drafts[:wanted], (
            f"request {request_id} at {len(prefix)} tokens"
        )
        self.num_drafts += min(wanted, len(drafts))
        table = attention.block_table[row].long().cpu()
        size = self.pools.block_size
        for layer, expected in fresh.kv.items():
            rows = expected[0].shape[0]
            position = torch.arange(rows)
            row_ids = table[position // size] * size + position % size
            stored = self.pools.rows(layer, row_ids.to(attention.block_table.device))
            for got, want in zip(stored, expected, strict=True):
                torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)
            self.num_kv_rows += rows


def run(harness, prompts, num_tokens, *, k, vanilla, accept, chain="output", mtp=None, **options):
    """Generate with scripted acceptance, every draft checked; returns the executor and the
    check."""
    oracle = Oracle(harness.oracle_model, k, vanilla=vanilla, chain=chain)
    llm = harness.llm(
        k=k, vanilla=vanilla, kv_fill=float("nan"), mtp={"chain": chain, **(mtp or {})}, **options
    )
    want = [oracle.greedy(p, num_tokens + k + 1) for p in prompts]
    sequences = {i: p + w for i, (p, w) in enumerate(zip(prompts, want, strict=True))}
    check = ExactnessCheck(oracle, llm.pools, [len(p) + num_tokens for p in prompts])
    wrap_worker(llm, lambda worker: ScriptedDrafts(worker, sequences, accept, check))
    outputs = llm.generate(prompts, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))
    for output, expected in zip(outputs, want, strict=True):
        assert output.token_ids == expected[:num_tokens]
    assert check.num_drafts >= len(prompts)
    assert check.num_kv_rows > 0
    assert_drained(llm)
    return llm, check


def prompts_of_lengths(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def random_accept(seed: int, most: int):
    """0 to ``most`` right drafts, the same each time for a request and position."""
    rng, table = random.Random(seed), {}
    return lambda request, place: table.setdefault((request, place), rng.randrange(most + 1))


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("no_overlap", LOOPS)
def test_every_prompt_length_and_acceptance(harness, vanilla, k, no_overlap):
    for right in range(k + 1):
        prompts = prompts_of_lengths(range(1, k + 3), seed=right)
        options = {"k": k, "vanilla": vanilla, "disable_overlap_scheduler": no_overlap}
        llm, _ = run(harness, prompts, 9, accept=lambda *_, right=right: right, **options)
        histogram = llm.executor.acceptance.histogram
        # only the last step of a request may be cut
        assert sum(histogram) - histogram[right + 1] <= len(prompts)


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("no_overlap", LOOPS)
def test_random_acceptance_and_chunks(harness, vanilla, no_overlap):
    """R15: chunk splits, one-token chunks too, change neither drafts nor draft KV."""
    run(
        harness,
        prompts_of_lengths([random.Random(n).randrange(1, 24) for n in range(8)]),
        16,
        k=3,
        vanilla=vanilla,
        accept=random_accept(0, 3),
        chunk_policy=lambda request, limit: min(limit, 1 + 7 * request.request_id % 5),
        disable_overlap_scheduler=no_overlap,
    )


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r15_every_split_of_a_prompt_into_three_chunks(harness, vanilla):
    """R15: three chunks, every split, including chunks of one token; a request for each."""
    (prompt,) = prompts_of_lengths([8], 11)
    splits = [(first, second) for first in range(1, 7) for second in range(1, 8 - first)]

    def chunk(request, limit):
        first, second = splits[request.request_id]
        return {0: first, first: second}.get(request.context_current_position, limit)

    accept = {"accept": lambda *_: 1, "chunk_policy": chunk}
    run(harness, [prompt] * len(splits), 5, k=3, vanilla=vanilla, **accept)


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("no_overlap", LOOPS)
def test_preemption(harness, vanilla, no_overlap):
    """R12: a small pool forces requests to start over; nothing of the old life shows."""
    llm, _ = run(
        harness,
        prompts_of_lengths([9, 7, 12, 5], 2),
        24,
        k=3,
        vanilla=vanilla,
        accept=random_accept(1, 3),
        kv_cache_config={"tokens_per_block": 4, "max_tokens": 72},
        disable_overlap_scheduler=no_overlap,
    )
    assert llm.executor.num_preemptions > 0


@pytest.mark.parametrize(
    ("k", "options", "most"),
    [
        # fills its last rows with guessed states, which runs of over two tokens keep
        (3, {"vanilla": True, "chain": "target_shift"}, 1),
        (3, {"vanilla": True, "chain": "none"}, 3),
        # one layer reused further than the checkpoint has layers
        (6, {"vanilla": False}, 6),
    ],
    ids=["target_shift", "none", "six-drafts"],
)
def test_other_chains(harness, k, options, most):
    """Against a chained full recomputation."""
    prompts = prompts_of_lengths([1, 4, 11], 7)
    chunks = {"chunk_policy": lambda _, limit: min(limit, 4)}
    run(harness, prompts, 14, k=k, accept=random_accept(3, most), **options, **chunks)


@pytest.mark.parametrize("vanilla", WORKERS)
def test_latent_attention(mla_harness, vanilla):
    prompts = prompts_of_lengths([1, 6, 13], 8)
    options = {"vanilla": vanilla, "chunk_policy": lambda _, limit: min(limit, 5)}
    run(mla_harness, prompts, 12, k=3, accept=random_accept(4, 3), **options)
