"""Plain speculative decoding: the text of the target alone, or its distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mtp_plugin.infer import (
    Continuation,
    Draft,
    Role,
    SamplingRule,
    Scorer,
    Speculated,
    Thinking,
    TransformersLanguageModel,
    decode,
    rejection,
    speculative_decode,
)
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.states import FinishReason
from tests.infer.models import LanguageModelDrafter, TableModel

PROMPT = [3, 1, 4, 1, 5]
TARGET = TableModel(seed=1)
CHEAP = TableModel(seed=2, like=TARGET, noise=0.7)
THINKING = Thinking(4, (6, 3))
END = 2
SAMPLED = {"temperature": 1.6, "seed": 6, "ignore_eos": True}
OPTIONS: list[dict[str, Any]] = [
    {},
    SAMPLED,
    {**SAMPLED, "top_k": 2},
    {**SAMPLED, "top_p": 0.7},
    {**SAMPLED, "min_p": 0.2},
    {"top_p": 0.99},
    {"min_tokens": 9, "stop_token_ids": [6, 8]},
    {"stop_token_ids": [7, 8]},
    {"ignore_eos": True},
    {"repetition_penalty": 1.7},
    {**SAMPLED, "presence_penalty": 0.8, "prompt_ignore_length": 2},
    {"frequency_penalty": 0.9},
    {"logit_bias": {7: 2.0, 9: -4.0}},
    {"allowed_token_ids": [1, 2, 3, 5, 8]},
    {"bad_words": [(5, 2), (1, 5, 6), (9,)]},
    {"bad_token_ids": [0, 2, 11]},
    {"thinking_token_budget": 3},
    {**SAMPLED, "thinking_token_budget": 0, "logit_bias": {4: 2.0}},
    {"logprobs": 3, "prompt_logprobs": 2},
]
NAMES = [" ".join(options).replace("seed ignore_eos", "seed") or "greedy" for options in OPTIONS]


class Script:
    """Drafts the text that it was given, with every so-manieth token wrong."""

    def __init__(self, text: Sequence[int], wrong_every: int = 0) -> None:
        self.text = [
            (token + 1) % 12 if wrong_every and n % wrong_every == wrong_every - 1 else token
            for n, token in enumerate(text)
        ]

    def draft(self, _: SamplingRule, output: Sequence[int], num_drafts: int) -> Draft:
        return Draft(self.text[len(output) : len(output) + num_drafts])


def requested(options: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 24, **options})


def continuation(options: dict[str, Any], **more: Any) -> Continuation:
    more = {"end_ids": [END], "thinking": THINKING, **more}
    return Continuation(PROMPT, requested(options), **more)


def plain(options: dict[str, Any]) -> Any:
    return decode(TARGET, PROMPT, requested(options), end_ids=[END], thinking=THINKING)


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_drafts_change_no_text(options: dict[str, Any]) -> None:
    expected, k = plain(options), 4
    drafters = {
        "model": LanguageModelDrafter(CHEAP),
        "itself": LanguageModelDrafter(TARGET),
        "right": Script(expected.token_ids),
        "wrong": Script(expected.token_ids, wrong_every=1),
        "mixed": Script(expected.token_ids, wrong_every=3),
    }
    found: dict[str, Speculated] = {}
    for name, drafter in drafters.items():
        found[name] = speculative_decode(TARGET, drafter, continuation(options), num_drafts=k)
        assert found[name].decoded == expected, name
    count = len(expected.token_ids)
    for right in (found["right"], found["itself"]):
        # every step but the last emits K + 1 tokens
        assert right.num_steps == -(-count // (k + 1))
    assert (found["wrong"].num_steps, found["wrong"].num_accepted) == (count, 0)
    for one in found.values():
        assert count - one.num_steps <= one.num_accepted <= sum(one.drafted)


def test_every_option_shows_in_the_text() -> None:
    """Otherwise the test above would say nothing of it."""
    texts = {name: plain(options) for name, options in zip(NAMES, OPTIONS, strict=True)}
    for name, text in texts.items():
        bare = plain(SAMPLED if "temperature" in name else {})
        has_logprobs = text.logprobs is not None
        assert name in ("greedy", "temperature seed") or has_logprobs or text != bare, name


@pytest.mark.parametrize("options", OPTIONS[::3], ids=NAMES[::3])
def test_processed_log_probabilities_are_those_without_drafts(options: dict[str, Any]) -> None:
    """Each after the accepted tokens of its own run."""
    options = {**options, "logprobs": 3, "presence_penalty": 0.5}
    expected = decode(
        TARGET,
        PROMPT,
        requested(options),
        end_ids=[END],
        thinking=THINKING,
        logprobs_mode="processed",
    )
    text = continuation(options, logprobs_mode="processed")
    ran = speculative_decode(TARGET, Script(expected.token_ids, 4), text, num_drafts=3)
    assert ran.num_accepted > 0
    assert ran.decoded == expected
    assert ran.decoded.logprobs != plain(options).logprobs


def test_drafts_are_counted_by_hand() -> None:
    text = plain({"ignore_eos": True}).token_ids
    options = {"ignore_eos": True, "max_new_tokens": 8}
    # right, right, wrong | right, wrong, right | right, wrong, - | and one token more
    ran = speculative_decode(TARGET, Script(text, 3), continuation(options), num_drafts=3)
    assert ran.decoded.token_ids == text[:8]
    assert (ran.num_steps, sum(ran.drafted), ran.num_accepted) == (3, 9, 6)


def test_a_stop_inside_a_run_ends_it_there() -> None:
    text = plain({"ignore_eos": True}).token_ids
    stop = next(token for token in text if text.index(token) == 2)
    options = {"ignore_eos": True, "stop_token_ids": [stop], "logprobs": 0}
    ran = speculative_decode(TARGET, Script(text), continuation(options), num_drafts=4)
    assert ran.decoded.token_ids == text[:3]
    assert ran.decoded.finish_reason is FinishReason.END_ID
    assert len(ran.decoded.logprobs) == 3
    assert (ran.num_steps, sum(ran.drafted), ran.num_accepted) == (1, 4, 3)


def test_the_target_reads_every_draft_once_and_forgets_the_rejected() -> None:
    target = TableModel(seed=1)
    text = plain({"ignore_eos": True}).token_ids
    options = {"ignore_eos": True, "max_new_tokens": 9}
    drafter = Script(text, wrong_every=3)
    ran = speculative_decode(target, drafter, continuation(options), num_drafts=2)
    assert ran.decoded.token_ids == text[:9]
    # the prompt with two drafts; then what was emitted last, with two drafts
    assert target.num_fed == [len(PROMPT) + 2] + [3] * (ran.num_steps - 1)


def test_a_scorer_reads_what_is_new() -> None:
    model = TableModel()
    scorer = Scorer(model)
    assert scorer.score([1, 2, 3]).shape == (3, 12)
    torch.testing.assert_close(scorer.score([1, 2, 5, 6])[0], model.rows[2, 5], rtol=0, atol=0)
    assert scorer.score([1, 2, 5, 6]).shape == (1, 12)
    assert scorer.score([1, 2, 5], num_rows=2).shape == (2, 12)
    assert model.num_fed == [3, 2, 1, 2]


def test_without_drafts_every_step_emits_one_token() -> None:
    ran = speculative_decode(TARGET, Script([]), continuation(SAMPLED), num_drafts=0)
    assert ran.decoded == plain(SAMPLED)
    assert ran.num_steps == len(ran.decoded.token_ids)


def test_with_a_transformer(target: Callable[[str], PreTrainedModel]) -> None:
    model = target("deepseek_v3")
    wrapped = TransformersLanguageModel(model)
    for options in ({}, {**SAMPLED, "top_k": 20, "repetition_penalty": 1.2}):
        params = SamplingParams(max_new_tokens=16, **options)
        expected = decode(model, PROMPT, params)
        for k in (1, 4):
            ran = speculative_decode(
                model, LanguageModelDrafter(wrapped), Continuation(PROMPT, params), num_drafts=k
            )
            assert ran.decoded == expected
            assert ran.num_steps == -(-16 // (k + 1))


# --- rejection ---


def test_rejection_of_greedy_requests_is_exact() -> None:
    ran = speculative_decode(
        TARGET, LanguageModelDrafter(CHEAP), continuation({}), num_drafts=3, verify=rejection
    )
    assert ran.decoded == plain({})


def test_rejection_repeats_with_its_seed() -> None:
    def text(seed: int) -> list[int]:
        drafter = LanguageModelDrafter(CHEAP, Role.DRAFT)
        options = {**SAMPLED, "seed": seed}
        request = continuation(options)
        return speculative_decode(
            TARGET, drafter, request, num_drafts=3, verify=rejection
        ).decoded.token_ids

    assert text(1) == text(1)
    assert len({tuple(text(seed)) for seed in range(6)}) > 3


@pytest.mark.parametrize("is_sampled", [True, False], ids=["sampled drafts", "one guess"])
def test_rejection_keeps_the_distribution(is_sampled: bool) -> None:
    """Chi-square of the first two tokens, of which none, one or both were drafts."""
    vocab, draws, prompt = 4, 900, [1, 2]
    target = TableModel(vocab, seed=4).rows / 2
    cheap = target + torch.randn(target.shape, generator=torch.Generator().manual_seed(1))
    counts = torch.zeros(vocab, vocab, dtype=torch.float64)
    num_accepted = 0
    for seed in range(draws):
        rule = SamplingRule(SamplingParams(temperature=0.8, top_k=3, seed=seed), prompt)
        first = rule.choose(cheap[1, 2], [], Role.DRAFT) if is_sampled else 3
        distributions = [rule.probabilities(cheap[1, 2], [])] if is_sampled else None
        rows = torch.stack([target[1, 2], target[2, first]])
        run = rejection(rule, rows, Draft([first], distributions), [])
        num_accepted += len(run) - 1
        if len(run) == 1:  # the next step, without drafts
            run += rejection(rule, target[2, run[0]].unsqueeze(0), Draft([]), run)
        counts[run[0], run[1]] += 1
    firsts = rule.probabilities(target[1, 2], [])
    seconds = [rule.probabilities(target[2, one], [one]) for one in range(vocab)]
    expected = draws * firsts.unsqueeze(1) * torch.stack(seconds)
    assert draws / 4 < num_accepted < draws
    assert counts[expected == 0].sum() == 0
    wanted, seen = expected[expected > 0], counts[expected > 0]
    assert wanted.min() > 5
    # 99.9 % of 8 degrees of freedom
    assert float(((seen - wanted) ** 2 / wanted).sum()) < 26.1


def test_rejection_draws_what_it_must_where_a_draft_is_all_there_is() -> None:
    """A forced id among the drafts is accepted; any other is rejected."""
    params = SamplingParams(**SAMPLED, allowed_token_ids=[7])
    rule = SamplingRule(params, PROMPT)
    rows = torch.randn(3, 12)
    assert rejection(rule, rows, Draft([7, 7]), []) == [7, 7, 7]
    assert rejection(rule, rows, Draft([7, 3]), []) == [7, 7]
    rows[1] = torch.nan
    assert rejection(rule, rows, Draft([7, 7]), []) == [7, -1]


# --- errors ---


def test_a_row_without_values_fails_after_the_accepted_drafts() -> None:
    broken = TableModel(seed=1)
    text = plain({"ignore_eos": True}).token_ids
    broken.rows[text[1], text[2]] = torch.nan
    options = {"ignore_eos": True}
    expected = decode(broken, PROMPT, requested(options))
    assert expected.finish_reason is FinishReason.ERROR
    assert expected.token_ids == text[:3]
    ran = speculative_decode(broken, Script(text), continuation(options), num_drafts=4)
    assert ran.decoded == expected


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"speculate": False}, 0),
        ({"speculate": False, "max_draft_len": 2}, 0),
        ({"max_draft_len": 0}, 0),
        ({"max_draft_len": 2}, 2),
        ({"max_draft_len": 9}, 3),
    ],
)
def test_as_many_drafts_as_the_request_allows(options: dict[str, Any], most: int) -> None:
    """As if no more could be drafted."""
    drafter, request = LanguageModelDrafter(CHEAP, Role.DRAFT), {**SAMPLED, **options}
    ran = speculative_decode(TARGET, drafter, continuation(request), num_drafts=3)
    assert max(ran.drafted) == most
    bare = continuation(SAMPLED)
    assert ran == speculative_decode(TARGET, drafter, bare, num_drafts=most)
