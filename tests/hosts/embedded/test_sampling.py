"""Sampled text is the target's own: whatever K, worker, loop, batch mates, chunks or pressure."""

from __future__ import annotations

import random

import pytest

from mtp_plugin.hosts.embedded import SamplingParams
from tests.hosts.embedded.conftest import LOOPS, WORKERS, decoded, generate

NUM_TOKENS = 20
GREEDY_DRAFTS = {"draft_sampling": "greedy"}
OPTIONS = [
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.3, "top_k": 4},
    {},
    {"temperature": 0.9, "min_p": 0.2},
    {"top_p": 0.5},
    {"top_k": 9, "temperature": 0.4, "min_p": 0.01},
]


def params_of(place: int, **more) -> SamplingParams:
    requested = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 100 + place, **more}
    return SamplingParams(**OPTIONS[place % len(OPTIONS)], **requested)


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_text_of_a_seed(harness, prompts, no_overlap, vanilla, k):
    params = [params_of(place) for place in range(len(prompts))]
    llm = harness.llm(k=k, vanilla=vanilla, disable_overlap_scheduler=no_overlap)
    assert generate(llm, prompts, params) == decoded(harness, prompts, params)
    if k:
        assert llm.executor.acceptance.acceptance_length > 1.15


@pytest.mark.parametrize("k", [4, 5, 6, 7])
def test_text_of_a_seed_with_many_drafts(harness, prompts, k):
    params = [params_of(place) for place in range(len(prompts))]
    llm = harness.llm(k=k, vanilla=False, max_num_tokens=128)
    assert generate(llm, prompts, params) == decoded(harness, prompts, params)
    assert llm.executor.acceptance.acceptance_length > 1.15


@pytest.mark.parametrize("vanilla", WORKERS)
def test_chunks_and_preemption_keep_the_text(harness, prompts, vanilla):
    params = [params_of(place) for place in range(len(prompts))]
    llm = harness.llm(
        vanilla=vanilla,
        max_num_tokens=36,
        kv_cache_config={"max_tokens": 96},
        kv_fill=float("nan"),
    )
    assert generate(llm, prompts, params) == decoded(harness, prompts, params)
    assert llm.executor.num_preemptions > 0


def test_requests_without_a_seed_draw_by_their_number(harness, prompts):
    params = [params_of(1, seed=None) for _ in range(4)]
    same = [prompts[3]] * 4
    llm = harness.llm()
    first = generate(llm, same, params)
    assert first == decoded(harness, same, params)
    assert len({tuple(text) for text in first}) == 4
    assert generate(llm, same, params) == decoded(harness, same, params, first_number=4)
    assert generate(harness.llm(k=0), same, params) == first


def test_greedy_requests_among_sampled_ones_stay_greedy(harness, target, prompts):
    params = [
        params_of(1) if place % 2 else SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
        for place in range(len(prompts))
    ]
    texts = generate(harness.llm(), prompts, params)
    assert texts[::2] == [target.greedy(prompt, NUM_TOKENS) for prompt in prompts[::2]]


def test_stops_and_least_lengths_of_sampled_requests(harness, prompts):
    rng = random.Random(3)
    free = generate(harness.llm(k=0), prompts, [params_of(i) for i in range(len(prompts))])
    stops = [rng.choice(text) for text in free]
    params = [
        params_of(i, stop_token_ids=[stop], min_tokens=9 if i % 2 else 0)
        for i, stop in enumerate(stops)
    ]
    plain = generate(harness.llm(k=0), prompts, params)
    for text, cut, stop, requested in zip(free, plain, stops, params, strict=True):
        assert stop not in cut[: max(requested.min_tokens, len(cut) - 1)]
        if not requested.min_tokens:
            assert cut == text[: text.index(stop) + 1]
    for vanilla in (False, True):
        assert generate(harness.llm(vanilla=vanilla), prompts, params) == plain


@pytest.mark.parametrize("vanilla", WORKERS)
def test_greedy_drafts_of_sampled_requests_change_nothing(harness, prompts, vanilla):
    """Fewer of them are right: the target draws, and the first choice is drafted."""
    params = [params_of(place) for place in range(len(prompts))]
    coupled, greedy = harness.llm(vanilla=vanilla), harness.llm(vanilla=vanilla, mtp=GREEDY_DRAFTS)
    assert generate(greedy, prompts, params) == generate(coupled, prompts, params)
    lengths = [llm.executor.acceptance.acceptance_length for llm in (greedy, coupled)]
    assert lengths[0] < lengths[1]


def test_a_cut_draft_vocabulary_changes_nothing(harness, prompts):
    params = [params_of(place) for place in range(len(prompts))]
    llm = harness.llm(mtp={"draft_vocab": 100})
    assert generate(llm, prompts, params) == generate(harness.llm(k=0), prompts, params)
    assert llm.executor.acceptance.acceptance_length > 1.05


RELAXED = {
    "use_relaxed_acceptance_for_thinking": True,
    "relaxed_topk": 8,
    "relaxed_delta": 0.9,
    "begin_thinking_phase_token": 5,
    "end_thinking_phase_token": 6,
}


@pytest.mark.parametrize("vanilla", WORKERS)
def test_where_acceptance_is_relaxed_draws_are_coupled(harness, prompts, vanilla):
    """Of thinking requests in one batch those with a temperature keep their text; greedy ones are
    relaxed, and written by no other drafts than alone."""
    thinking = [[5, *(t for t in prompt if t not in (5, 6))] for prompt in prompts]
    greedy = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    params = [params_of(place) if place % 2 else greedy for place in range(len(prompts))]
    mixed = generate(harness.llm(vanilla=vanilla, speculative=RELAXED), thinking, params)
    assert mixed[1::2] == decoded(harness, thinking, params)[1::2]
    alone = generate(harness.llm(vanilla=vanilla, speculative=RELAXED), thinking[::2], greedy)
    assert mixed[::2] == alone
    assert mixed[::2] != generate(harness.llm(vanilla=vanilla), thinking[::2], greedy)
