"""Whole outputs equal those of plain decoding, in every worker and loop, chunk and preemption.

Requests of four kinds, each kind in its own batch: tokens, finish reason and log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.hosts.embedded.outputs import FINISH_REASONS
from mtp_plugin.infer import Decoded, Thinking, decode
from tests.greedy import greedy_decode
from tests.hosts.embedded.conftest import WORKERS, assert_drained, decoded, generate
from tests.hosts.embedded.requests_by_kind import BEGIN, END, KINDS, make_batch, sampled_params
from tests.hosts.embedded.test_random_requests import same_logprobs

NUM_TOKENS = 16
THINKING_END = (9, END)
TIGHT = {"max_num_tokens": 36, "kv_cache_config": {"max_tokens": 96}, "kv_fill": float("nan")}
"""Prompts come in chunks, and requests are preempted."""
ENGINES: dict[str, dict] = {
    "whole": {"kv_fill": float("nan")},
    "tight": TIGHT,
    "chunked": {"max_num_tokens": 36, "kv_fill": float("nan")},
    "few": {"max_batch_size": 3},
    "without-drafts": {"k": 0},
    "one-draft": {"k": 1},
    "many-drafts": {"k": 6, "max_num_tokens": 128},
}
# kind, engine, vanilla, no_overlap: every kind in every worker and loop
CASES = [
    (kind, "tight" if vanilla == no_overlap else "whole", vanilla, no_overlap)
    for kind, vanilla, no_overlap in product(KINDS, (False, True), (False, True))
]
CASES += [
    ("greedy", "tight", True, False),
    ("greedy", "chunked", False, False),
    ("greedy", "one-draft", True, True),
    ("greedy", "without-drafts", False, False),
    ("sampled", "tight", False, True),
    ("sampled", "many-drafts", False, False),
    ("processed", "few", True, False),
    ("processed", "many-drafts", False, True),
    ("thinking", "one-draft", False, False),
]


@pytest.fixture(scope="module")
def reference_of() -> Callable[..., list[Decoded]]:
    """Return what plain decoding gives each request of a kind, computed once."""
    made: dict[str, list[Decoded]] = {}

    def give(harness, prompts, kind: str) -> list[Decoded]:
        if kind not in made:
            batch = zip(*make_batch(kind, prompts, NUM_TOKENS), strict=True)
            thinking = Thinking(BEGIN, THINKING_END, END)
            target = harness.oracle_model.target
            made[kind] = [decode(target, p, params, thinking=thinking) for p, params in batch]
        return made[kind]

    return give


@pytest.mark.parametrize(("kind", "engine", "vanilla", "no_overlap"), CASES)
def test_outputs_equal_the_reference(
    harness, prompts, reference_of, kind, engine, vanilla, no_overlap
):
    expected = reference_of(harness, prompts, kind)
    options = {"vanilla": vanilla, "disable_overlap_scheduler": no_overlap, **ENGINES[engine]}
    if kind == "thinking":
        options["speculative"] = {
            "begin_thinking_phase_token": BEGIN,
            "end_thinking_phase_token": END,
            "mtp": {"check_metadata": True, "thinking_end": list(THINKING_END)},
        }
    llm = harness.llm(**options)
    outputs = llm.generate(*make_batch(kind, prompts, NUM_TOKENS))
    assert_drained(llm)
    for output, one in zip(outputs, expected, strict=True):
        assert output.token_ids == one.token_ids
        assert output.finish_reason == FINISH_REASONS[one.finish_reason]
        same_logprobs(one.token_ids, output.logprobs, one.logprobs)
        same_logprobs(output.prompt_token_ids, output.prompt_logprobs, one.prompt_logprobs)
    assert bool(llm.executor.num_preemptions) == (engine == "tight")
    # a run without any acceptance has broken drafts
    floor = 1.0 if engine == "without-drafts" else 1.15 if kind in ("greedy", "sampled") else 1.1
    assert llm.executor.acceptance.acceptance_length >= floor


def test_the_two_oracles_agree(harness, target, prompts):
    """The tests' full recomputation and the package's cached decoder are independent."""
    for prompt in prompts[2:5]:
        expected = target.greedy(prompt, NUM_TOKENS)
        assert greedy_decode(harness.oracle_model.target, prompt, NUM_TOKENS) == expected


def test_greedy_output_is_that_of_generate(harness, prompts):
    """With the same processors of transformers, after three drafts."""
    requested = SamplingParams(
        max_new_tokens=NUM_TOKENS,
        ignore_eos=True,
        repetition_penalty=1.4,
        logit_bias={7: 1.5, 9: -2.0},
        bad_words=((3, 4), (5,)),
    )
    options = {
        "repetition_penalty": 1.4,
        "sequence_bias": [[[7], 1.5], [[9], -2.0]],
        "bad_words_ids": [[3, 4], [5]],
        "max_new_tokens": NUM_TOKENS,
        "eos_token_id": None,
        "pad_token_id": 0,
        "do_sample": False,
    }
    want = []
    for prompt in prompts[2:6]:
        ids = torch.tensor([prompt])
        text = harness.oracle_model.target.generate(
            ids, attention_mask=torch.ones_like(ids), **options
        )
        want.append(text[0, len(prompt) :].tolist())
    assert generate(harness.llm(), prompts[2:6], requested) == want


@pytest.mark.parametrize(("vanilla", "no_overlap"), [(False, False), (True, True)])
def test_prompts_in_chunks_while_requests_generate(harness, target, prompts, no_overlap, vanilla):
    llm = harness.llm(
        vanilla=vanilla,
        disable_overlap_scheduler=no_overlap,
        max_batch_size=3,
        max_num_tokens=16,
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
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert generate(llm, prompts, params) == [target.greedy(p, NUM_TOKENS) for p in prompts]
    assert max(mixed) <= 12
    assert len(mixed) > 5


@pytest.mark.parametrize("window", ["exact", "trtllm"])
@pytest.mark.parametrize("chain", ["output", "target_shift", "none"])
def test_vanilla_variants(harness, target, prompts, window, chain):
    llm = harness.llm(vanilla=True, mtp={"draft_window": window, "chain": chain})
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert generate(llm, prompts, params) == [target.greedy(p, NUM_TOKENS) for p in prompts]


@pytest.mark.parametrize("vanilla", WORKERS)
def test_latent_attention(mla_harness, prompts, vanilla):
    llm = mla_harness.llm(vanilla=vanilla, max_num_tokens=32)
    few, params = prompts[2:7:2], SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    model = mla_harness.oracle_model.target
    assert generate(llm, few, params) == [greedy_decode(model, p, NUM_TOKENS) for p in few]


def test_bad_words_that_begin_in_front_of_a_preemption(harness, prompts):
    """Their first ids are among the last tokens of an output that was prefilled again."""
    prompts = prompts[3:]
    params = [
        SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.8, seed=place)
        for place in range(len(prompts))
    ]
    for _ in range(2):  # words of the output, and of what is written in place of them
        params = [
            replace(one, bad_words=(*one.bad_words, *pairwise(text)))
            for one, text in zip(params, decoded(harness, prompts, params), strict=True)
        ]
    llm = harness.llm(**TIGHT)
    assert generate(llm, prompts, params) == decoded(harness, prompts, params)
    assert llm.executor.num_preemptions > 0


def test_what_a_request_generated_is_never_its_prompt(harness, prompts):
    """After a preemption its output is prefilled, and counts all the same: of the prompt nothing
    does here."""
    requested = {"frequency_penalty": 0.8, "presence_penalty": 0.5, "prompt_ignore_length": 100}
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, **requested)
    llm = harness.llm(**TIGHT)
    assert generate(llm, prompts, params) == decoded(harness, prompts, [params] * len(prompts))
    assert llm.executor.num_preemptions > 0


# --- sampled requests ---


def test_requests_without_a_seed_draw_by_their_number(harness, prompts):
    params = [sampled_params(1, NUM_TOKENS, seed=None) for _ in range(4)]
    same = [prompts[3]] * 4
    llm = harness.llm()
    first = generate(llm, same, params)
    assert first == decoded(harness, same, params)
    assert len({tuple(text) for text in first}) == 4
    assert generate(llm, same, params) == decoded(harness, same, params, first_number=4)


@pytest.mark.parametrize("vanilla", WORKERS)
def test_other_drafts_of_sampled_requests_change_nothing(harness, prompts, vanilla):
    """Greedy drafts, of which fewer are accepted, and drafts of a part of the vocabulary."""
    params = [sampled_params(place, NUM_TOKENS) for place in range(len(prompts))]
    lengths, texts = [], []
    for mtp in ({}, {"draft_sampling": "greedy"}, {"draft_vocab": 100}):
        llm = harness.llm(vanilla=vanilla, mtp=mtp)
        texts.append(generate(llm, prompts, params))
        lengths.append(llm.executor.acceptance.acceptance_length)
    assert texts[1] == texts[2] == texts[0]
    assert lengths[1] < lengths[0]
    assert min(lengths) > 1.05


def test_sampled_requests_are_coupled_where_acceptance_is_relaxed(harness, prompts):
    """Greedy requests of the same batch are relaxed, and their output is that of a batch alone."""
    relaxed = {
        "use_relaxed_acceptance_for_thinking": True,
        "relaxed_topk": 8,
        "relaxed_delta": 0.9,
        "begin_thinking_phase_token": BEGIN,
        "end_thinking_phase_token": END,
    }
    thinking = [[BEGIN, *(t for t in prompt if t not in (BEGIN, END))] for prompt in prompts]
    greedy = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    params = [sampled_params(i, NUM_TOKENS) if i % 2 else greedy for i in range(len(prompts))]
    mixed = generate(harness.llm(speculative=relaxed), thinking, params)
    assert mixed[1::2] == decoded(harness, thinking[1::2], params[1::2])
    assert mixed[::2] == generate(harness.llm(speculative=relaxed), thinking[::2], greedy)
    assert mixed[::2] != generate(harness.llm(), thinking[::2], greedy)
