"""Text under a budget of thinking is plain decoding's under the same budget."""

from __future__ import annotations

import pytest

from mtp_plugin.errors import ConfigError, RequestError
from mtp_plugin.hosts.embedded import SamplingParams
from mtp_plugin.infer.thinking import Thinking
from tests.hosts.embedded.conftest import LOOPS, WORKERS, decoded, generate

NUM_TOKENS = 20
BEGIN, END = 5, 6
TAGS = {"begin_thinking_phase_token": BEGIN, "end_thinking_phase_token": END}
TWO = (9, END)
"""An end of two ids."""


def thinking_of(end) -> Thinking:
    return Thinking(BEGIN, end, END)


def spec(end, **mtp):
    mtp = {"check_metadata": True, **mtp}
    return {**TAGS, "mtp": mtp if end == (END,) else {**mtp, "thinking_end": list(end)}}


class Tags:
    """A tokenizer that knows the two tags, for where no config can name them."""

    def encode(self, text, add_special_tokens=True):  # noqa: ARG002
        return {"<think>": [BEGIN], "</think>": [END]}.get(text, [1, 2])

    def decode(self, ids, skip_special_tokens=True):  # noqa: ARG002
        return "".join(chr(97 + token % 26) for token in ids)


def params_of(place, **more):
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 7 + place} if place % 3 == 2 else {}
    budget = (0, 1, 2, 3, 5, 7, None, 11)[place % 8]
    requested = {"thinking_token_budget": budget, **sampled, **more}
    return SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, **requested)


def batch_of(prompts, **more):
    """Most think from their prompt on, one from amid it; one has thought already."""
    clean = [[t for t in prompt if t not in (BEGIN, END)] for prompt in prompts]
    thinking = [
        [BEGIN, *prompt] if place != 4 else [BEGIN, END, *prompt]
        for place, prompt in enumerate(clean)
    ]
    thinking[5] = [*clean[5][:4], BEGIN, *clean[5][4:]]
    return thinking, [params_of(place, **more) for place in range(len(prompts))]


def expected(harness, prompts, params, end):
    return decoded(harness, prompts, params, thinking=thinking_of(end))


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize(
    ("k", "end", "no_overlap"),
    [
        (1, TWO, False),
        (2, TWO, False),
        (3, TWO, False),
        (3, TWO, True),
        (2, (END,), False),
    ],
)
def test_r53_text_of_a_budget(harness, prompts, end, k, vanilla, no_overlap):
    """R53: the end comes exactly where the budget is spent, within runs and across them."""
    thinking, params = batch_of(prompts)
    llm = harness.llm(
        k=k, vanilla=vanilla, disable_overlap_scheduler=no_overlap, speculative=spec(end)
    )
    texts = generate(llm, thinking, params)
    assert texts == expected(harness, thinking, params, end)
    for place, budget in ((0, 0), (1, 1), (3, 3)):
        assert texts[place][budget : budget + len(end)] == list(end)
    assert llm.executor.acceptance.acceptance_length > 1.1


@pytest.mark.parametrize("no_overlap", LOOPS)
def test_r53_without_drafts_by_the_tags_of_a_tokenizer(harness, prompts, no_overlap):
    thinking, params = batch_of(prompts)
    llm = harness.llm(k=0, tokenizer=Tags(), disable_overlap_scheduler=no_overlap)
    assert generate(llm, thinking, params) == expected(harness, thinking, params, (END,))
    drafted = harness.llm(k=2, tokenizer=Tags())
    assert generate(drafted, thinking, params) == expected(harness, thinking, params, (END,))


@pytest.mark.parametrize("tags", [{}, {"begin_thinking_phase": "<think>"}], ids=["own", "named"])
def test_r53_an_end_in_ids_overrides_the_tag_of_a_tokenizer(harness, prompts, tags):
    thinking, params = batch_of(prompts)
    llm = harness.llm(tokenizer=Tags(), speculative={"mtp": {"thinking_end": list(TWO), **tags}})
    assert generate(llm, thinking, params) == expected(harness, thinking, params, TWO)


@pytest.mark.parametrize("vanilla", WORKERS)
@pytest.mark.parametrize("end", [(END,), TWO], ids=["one", "two"])
def test_r53_chunks_and_preemption_keep_the_count(harness, prompts, end, vanilla):
    thinking, params = batch_of(prompts)
    llm = harness.llm(
        vanilla=vanilla,
        max_num_tokens=36,
        kv_cache_config={"max_tokens": 96},
        kv_fill=float("nan"),
        speculative=spec(end),
    )
    assert generate(llm, thinking, params) == expected(harness, thinking, params, end)
    assert llm.executor.num_preemptions > 0


def test_the_end_has_priority_over_other_edits(harness, prompts):
    """Ids that are not allowed, banned, or would end the text too early are forced all the same."""
    edits = {
        "allowed_token_ids": tuple(range(20, 128)),
        "bad_token_ids": (END,),
        "stop_token_ids": (9,),
        "min_tokens": NUM_TOKENS,
        "repetition_penalty": 1.4,
    }
    thinking, params = batch_of(prompts, **edits)
    llm = harness.llm(speculative=spec(TWO))
    assert generate(llm, thinking, params) == expected(harness, thinking, params, TWO)


def test_relaxed_requests_end_there_too(harness, target, prompts):
    """A forced row is never relaxed; the phase ends after it, and what follows is strict."""
    thinking, _ = batch_of(prompts)
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
    thinking, _ = batch_of(prompts)
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
    thinking, _ = batch_of(prompts)
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
