"""Text under bias, allowed ids, bad words and penalties is the target's own, sampled or greedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtp_plugin.hosts.embedded import SamplingParams
from tests.hosts.embedded.conftest import LOOPS, WORKERS, decoded, generate

NUM_TOKENS = 24


def options_of(place: int, vocab: int, prompt: list[int]) -> dict:
    """Different ones for every place; half of them draw."""
    several = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"repetition_penalty": 0.7, "prompt_ignore_length": 3, "frequency_penalty": -0.2},
        {"logit_bias": {token: (-1) ** token * 1.5 for token in range(0, vocab, 3)}},
        {"allowed_token_ids": tuple(range(1, vocab, 4))},
        {"bad_words": tuple((a, b) for a in prompt[-1:] for b in range(0, vocab, 2))[:60]},
        {"bad_token_ids": tuple(range(0, 64)), "repetition_penalty": 1.1},
        {},
    ]
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 7 + place} if place % 2 else {}
    return several[place % len(several)] | sampled


def batch_of(prompts, vocab):
    return [
        SamplingParams(
            max_new_tokens=NUM_TOKENS, ignore_eos=True, **options_of(place, vocab, prompt)
        )
        for place, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("no_overlap", LOOPS)
@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("k", [0, 1, 3])
def test_text_of_edited_logits(harness, prompts, no_overlap, vanilla, k):
    llm = harness.llm(k=k, vanilla=vanilla, disable_overlap_scheduler=no_overlap)
    params = batch_of(prompts, harness.oracle_model.facts.vocab_size)
    assert generate(llm, prompts, params) == decoded(harness, prompts, params)
    if k:
        assert llm.executor.acceptance.acceptance_length > 1.1


@pytest.mark.parametrize("vanilla", WORKERS)
def test_greedy_text_is_that_of_generate(harness, prompts, vanilla):
    """With the same processors of transformers, after three drafts."""
    model = harness.oracle_model.target
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
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        want.append(text[0, len(prompt) :].tolist())
    assert generate(harness.llm(vanilla=vanilla), prompts, requested) == want


@pytest.mark.parametrize("k", [5, 7])
def test_text_of_edited_logits_with_many_drafts(harness, prompts, k):
    params = batch_of(prompts, harness.oracle_model.facts.vocab_size)
    llm = harness.llm(k=k)
    assert generate(llm, prompts, params) == decoded(harness, prompts, params)
    assert llm.executor.acceptance.acceptance_length > 1.1


@pytest.mark.parametrize("vanilla", WORKERS)
def test_chunks_and_preemption_keep_counts(harness, prompts, vanilla):
    params = batch_of(prompts, harness.oracle_model.facts.vocab_size)
    llm = harness.llm(
        vanilla=vanilla,
        max_num_tokens=36,
        kv_cache_config={"max_tokens": 96},
        kv_fill=float("nan"),
    )
    assert generate(llm, prompts, params) == decoded(harness, prompts, params)
    assert llm.executor.num_preemptions > 0


@pytest.mark.parametrize("vanilla", WORKERS)
def test_what_a_request_emitted_is_never_its_prompt(harness, prompts, vanilla):
    """After a preemption its output is prefilled, and counts all the same: of the prompt
    nothing does here."""
    requested = {"frequency_penalty": 0.8, "presence_penalty": 0.5, "prompt_ignore_length": 100}
    params = [SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, **requested)] * len(
        prompts
    )
    llm = harness.llm(vanilla=vanilla, max_num_tokens=36, kv_cache_config={"max_tokens": 96})
    assert generate(llm, prompts, params) == decoded(harness, prompts, params)
    assert llm.executor.num_preemptions > 0


@pytest.mark.thinned
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_bad_words_that_begin_in_front_of_a_preemption(harness, prompts, temperature):
    """Their first ids are among the last tokens of a text that was prefilled again."""
    requested = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": temperature}
    params = [SamplingParams(**requested, seed=place) for place in range(len(prompts))]
    for _ in range(3):  # words of the text, and of what is written in place of them
        words = [
            [tuple(text[i : i + 2]) for i in range(NUM_TOKENS - 1)]
            for text in decoded(harness, prompts, params)
        ]
        params = [
            replace(one, bad_words=tuple(dict.fromkeys((*one.bad_words, *more)))[:60])
            for one, more in zip(params, words, strict=True)
        ]
    llm = harness.llm(max_num_tokens=36, kv_cache_config={"max_tokens": 96})
    texts = generate(llm, prompts, params)
    assert texts == decoded(harness, prompts, params)
    assert llm.executor.num_preemptions > 0


def test_rows_are_used_again(harness, prompts):
    """More requests than rows, one after the other: none sees what another left."""
    llm = harness.llm(max_batch_size=2)
    params = batch_of(prompts, harness.oracle_model.facts.vocab_size)
    reference = decoded(harness, prompts, params)
    assert generate(llm, prompts, params) == reference


def test_a_penalty_changes_the_text(harness, prompts):
    llm = harness.llm()
    plain = llm.generate(prompts, SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True))
    requested = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, repetition_penalty=1.5)
    changed = llm.generate(prompts, requested)
    assert [o.token_ids for o in plain] != [o.token_ids for o in changed]
