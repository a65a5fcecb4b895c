"""Outputs under a thinking budget; `test_losslessness` compares them in every worker and loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtp_plugin.errors import ConfigError, RequestError
from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.infer.thinking import Thinking
from tests.hosts.embedded.conftest import WORKERS, decoded, generate
from tests.hosts.embedded.requests_by_kind import BEGIN, END, make_batch, thinking_prompts

NUM_TOKENS = 16
TAGS = {"begin_thinking_phase_token": BEGIN, "end_thinking_phase_token": END}
TWO = (9, END)
"""An end of two ids."""


def spec(end, **mtp):
    mtp = {"check_metadata": True, **mtp}
    return {**TAGS, "mtp": mtp if end == (END,) else {**mtp, "thinking_end": list(end)}}


class Tags:
    """A tokenizer that knows the two tags, for where no config can name them."""

    def encode(self, text, add_special_tokens=True):  # noqa: ARG002
        return {"<think>": [BEGIN], "</think>": [END]}.get(text, [1, 2])

    def decode(self, ids, skip_special_tokens=True):  # noqa: ARG002
        return "".join(chr(97 + token % 26) for token in ids)


EXPECTED: dict[tuple[int, ...], list[list[int]]] = {}
NAMED = {"thinking_end": list(TWO), "begin_thinking_phase": "<think>"}


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"k": 0, "tokenizer": Tags()}, (END,)),
        ({"k": 2, "tokenizer": Tags()}, (END,)),
        ({"tokenizer": Tags(), "speculative": {"mtp": {"thinking_end": list(TWO)}}}, TWO),
        ({"tokenizer": Tags(), "speculative": {"mtp": NAMED}}, TWO),
        ({"speculative": spec(TWO), "vanilla": True}, TWO),
    ],
    ids=["no-drafts", "tokenizer", "end", "begin-and-end", "config"],
)
def test_r53_output_of_a_budget(harness, prompts, options, end):
    """R53: the end comes exactly where the budget is spent, whatever names the tags."""
    batch = make_batch("thinking", prompts, NUM_TOKENS)
    texts = generate(harness.llm(**options), *batch)
    if end not in EXPECTED:
        EXPECTED[end] = decoded(harness, *batch, thinking=Thinking(BEGIN, end, END))
    assert texts == EXPECTED[end]
    for place, budget in ((0, 0), (1, 1), (3, 3)):
        assert texts[place][budget : budget + len(end)] == list(end)


def test_the_end_has_priority_over_other_edits(harness, prompts):
    """Ids that are not allowed, banned, or would end the text too early are forced all the same."""
    edits = {
        "allowed_token_ids": tuple(range(20, 128)),
        "bad_token_ids": (END,),
        "stop_token_ids": (9,),
        "min_tokens": NUM_TOKENS,
        "repetition_penalty": 1.4,
    }
    thinking, params = make_batch("thinking", prompts, NUM_TOKENS)
    params = [replace(one, **edits) for one in params]
    texts = generate(harness.llm(speculative=spec(TWO)), thinking, params)
    assert texts == decoded(harness, thinking, params, thinking=Thinking(BEGIN, TWO, END))


def test_relaxed_requests_end_there_too(harness, target, prompts):
    """A forced row is never relaxed; the phase ends after it, and what follows is strict."""
    thinking = thinking_prompts(prompts)
    relaxed = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 50, "relaxed_delta": 1}
    for end in ((END,), TWO):
        llm = harness.llm(speculative={**spec(end), **relaxed})
        requested = SamplingParams(
            max_new_tokens=NUM_TOKENS, ignore_eos=True, thinking_token_budget=4
        )
        for text, prompt in zip(generate(llm, thinking, requested), thinking, strict=True):
            if END in (*prompt, *text[:4]) or text[3] == TWO[0]:
                continue
            assert text[4 : 4 + len(end)] == list(end)
            prefix = [*prompt, *text[: 4 + len(end)]]
            reference = target.greedy(prefix, NUM_TOKENS - 4 - len(end))
            reference = reference[: reference.index(BEGIN)] if BEGIN in reference else reference
            assert text[4 + len(end) :][: len(reference)] == reference


@pytest.mark.parametrize(
    ("mtp", "sampled"),
    [
        ({"verification": "synthetic", "synthetic_acceptance": 1.0}, {}),
        ({"verification": "rejection", "draft_sampling": "plain"}, {"temperature": 0.9}),
        ({"verification": "block", "draft_sampling": "plain"}, {"temperature": 0.9}),
    ],
    ids=["synthetic", "rejection", "block"],
)
def test_r53_other_modes_end_there_too(harness, prompts, mtp, sampled):
    """R53: with every verification method, a forced row gives the forced token only."""
    thinking = thinking_prompts(prompts)
    llm = harness.llm(speculative=spec(TWO, **mtp))
    requested = SamplingParams(
        max_new_tokens=NUM_TOKENS, ignore_eos=True, thinking_token_budget=4, **sampled
    )
    for text, prompt in zip(generate(llm, thinking, requested), thinking, strict=True):
        if END not in (*prompt, *text[:4]) and text[3] != TWO[0]:
            assert tuple(text[4:6]) == TWO


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("draft_sampling", [None, "greedy"])
def test_every_draft_of_a_forced_end_is_accepted(harness, prompts, draft_sampling, vanilla):
    """Nothing but a long end is written: rejection sampling takes no more steps than others."""
    end = (9, 11, 13, 9, 15, 17, 19, 21, 23, 25, 27, 29, END)
    thinking = thinking_prompts(prompts)
    modes = ["coupled", "rejection", "block"]
    llm = harness.llm(vanilla=vanilla, speculative=spec(end, verification=modes))
    lengths = []
    for mode in modes:
        requested = SamplingParams(
            max_new_tokens=len(end),
            ignore_eos=True,
            thinking_token_budget=0,
            temperature=0.9,
            verification=mode,
            draft_sampling=draft_sampling,
        )
        assert generate(llm, thinking[:4], requested) == [list(end)] * 4
        lengths.append(llm.executor.acceptance.acceptance_length)
    assert lengths == [4.0] * 3


def test_a_budget_without_tags_is_refused_by_name(harness):
    requested = SamplingParams(thinking_token_budget=3)
    for llm in (harness.llm(), harness.llm(k=0)):
        with pytest.raises(RequestError, match="thinking_token_budget=3 is not enabled; set begin"):
            llm.generate([[1, 2]], requested)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mtp": {"thinking_end": [3]}}, r"thinking_end: \(3,\) is forced after the token"),
        ({**TAGS, "mtp": {"thinking_end": [200]}}, r"expected ids below 128, .* got \[200\]"),
    ],
)
def test_ends_that_cannot_be(harness, config, message):
    with pytest.raises(ConfigError, match=message):
        harness.llm(speculative=config)
