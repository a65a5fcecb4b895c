"""The rule of one request, compared with a plain Python example and with given values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import RequestError, TensorContractError
from mtp_plugin.infer import RequestSampleStrategy, SamplingRule, Thinking
from mtp_plugin.requests.columns import FLOAT32_MAX
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.seeds import seed_words
from tests.infer import example

VOCAB = 11
IDS = st.integers(0, VOCAB - 1)
VALUES = st.one_of(
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0, -2.5]),
    st.floats(-8, 8, width=32),
)
PENALTIES = st.floats(-2, 2, width=32)


def changing(**options: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the options."""
    return st.fixed_dictionaries({}, optional=options)


OPTIONS = changing(
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.floats(0, 1, width=32),
    min_p=st.floats(0, 1, width=32),
    logit_bias=st.dictionaries(IDS, st.floats(-5, 5, width=32), max_size=4),
    allowed_token_ids=st.lists(IDS, min_size=1, max_size=6),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=4),
    bad_token_ids=st.lists(IDS, max_size=2),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(IDS, max_size=3),
    ignore_eos=st.booleans(),
    repetition_penalty=st.floats(0.25, 4, width=32),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    prompt_ignore_length=st.integers(0, 4),
    thinking_token_budget=st.integers(0, 4),
)
TOKENS = st.lists(IDS, max_size=6)
THINKING = Thinking(1, (2, 3))


@settings(max_examples=150, deadline=None)
@given(
    row=st.lists(VALUES, min_size=VOCAB, max_size=VOCAB),
    options=OPTIONS,
    prompt=st.lists(IDS, min_size=1, max_size=6),
    output=TOKENS,
    end_ids=st.lists(IDS, max_size=3),
    seed=st.integers(-(2**63), 2**64 - 1),
)
def test_choices_are_those_of_the_example(row, options, prompt, output, end_ids, seed) -> None:
    try:
        params = SamplingParams(**options, seed=seed)
    except RequestError:
        return  # nothing allowed is left
    rule = SamplingRule(params, prompt, end_ids=end_ids, thinking=THINKING)
    expected = example.choose(row, params, prompt, output, end_ids=end_ids, thinking=THINKING)
    assert rule.choose(torch.tensor(row), output) == expected
    if rule.forced(output) is None:
        values = rule.edited(torch.tensor(row), output).tolist()
        assert values == example.edited(row, params, prompt, output, end_ids)


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 4), max_size=12),
    budget=st.integers(0, 4),
    end=st.sampled_from([(2,), (2, 3), (2, 2), (2, 3, 2), (4, 2, 3)]),
)
def test_forced_ids_are_those_of_the_example(prompt, output, budget, end) -> None:
    params, thinking = SamplingParams(thinking_token_budget=budget), Thinking(1, end)
    # only texts that kept to the rule have a future
    obedient: list[int] = []
    for token in output:
        forced = example.forced_id(params, prompt, obedient, thinking)
        obedient.append(token if forced is None else forced)
    rule = SamplingRule(params, prompt, thinking=thinking)
    for count in range(len(obedient) + 1):
        expected = example.forced_id(params, prompt, obedient[:count], thinking)
        assert rule.forced(obedient[:count]) == expected


def written(rule: SamplingRule, free: list[int]) -> list[int]:
    """A text whose free choices are these."""
    output: list[int] = []
    for token in free:
        row = torch.zeros(16)
        row[token] = 9.0
        output.append(rule.choose(row, output))
    return output


@pytest.mark.parametrize(
    ("prompt", "budget", "free", "expected"),
    [
        ([1], 0, [5, 5, 5], [2, 3, 5]),
        ([1], 2, [5, 6, 7, 7, 7], [5, 6, 2, 3, 7]),
        ([1, 9, 9, 9], 2, [5, 6, 7, 7, 7], [5, 6, 2, 3, 7]),  # the prompt's are not counted
        ([1, 2, 3], 0, [5, 6], [5, 6]),  # ended in the prompt
        ([7], 2, [5, 1, 5, 6, 7, 7], [5, 1, 5, 6, 2, 3]),  # begun in the text
        ([1], 2, [5, 2, 3, 7, 7], [5, 2, 3, 7, 7]),  # under way in time
        ([1], 2, [5, 2, 9, 7, 7], [5, 2, 3, 7, 7]),  # under way, and kept to
        ([1], 1, [5, 6, 6, 1, 7, 8, 8, 9], [5, 2, 3, 1, 7, 2, 3, 9]),  # a second phase
        ([1], 3, [5, 1, 5, 6, 6, 6], [5, 1, 5, 2, 3, 6]),  # beginning again gains nothing
    ],
)
def test_a_spent_budget_ends_the_thinking(prompt, budget, free, expected) -> None:
    params = SamplingParams(thinking_token_budget=budget)
    assert written(SamplingRule(params, prompt, thinking=THINKING), free) == expected


def test_a_forced_id_goes_before_everything() -> None:
    params = SamplingParams(
        thinking_token_budget=0, allowed_token_ids=[5], bad_token_ids=[2], min_tokens=9
    )
    rule = SamplingRule(params, [1], end_ids=[2], thinking=THINKING)
    assert written(rule, [5, 5, 5]) == [2, 3, 5]
    probabilities = rule.probabilities(torch.randn(16), [])
    assert probabilities.tolist() == [float(token == 2) for token in range(16)]


def test_a_single_id_may_end_what_has_a_longer_end() -> None:
    params = SamplingParams(thinking_token_budget=3)
    rule = SamplingRule(params, [1], thinking=Thinking(1, (7, 3), end_token=3))
    assert written(rule, [5, 3, 6, 6, 6]) == [5, 3, 6, 6, 6]
    assert written(rule, [5, 5, 5, 6, 6, 6]) == [5, 5, 5, 7, 3, 6]


def test_where_only_ends_are_left_they_may_come_early() -> None:
    params = SamplingParams(min_tokens=5, allowed_token_ids=[3, 4])
    row = torch.tensor([9.0, 8.0, 7.0, 1.0, 2.0])
    assert SamplingRule(params, [0], end_ids=[4]).choose(row, []) == 3
    assert SamplingRule(params, [0], end_ids=[3, 4]).choose(row, []) == 4


def test_a_row_without_usable_values_gives_no_token() -> None:
    nothing = torch.tensor([math.nan, -math.inf])
    for options in ({}, {"temperature": 1.0}):
        assert SamplingRule(SamplingParams(**options), [0]).choose(nothing, []) == -1
    banned = SamplingParams(allowed_token_ids=[1], bad_words=[(0, 1)])
    assert SamplingRule(banned, [0]).choose(torch.zeros(2), []) == -1


def test_infinity_is_certain() -> None:
    rule = SamplingRule(SamplingParams(temperature=1.0), [0])
    row = torch.tensor([5.0, math.inf, math.inf])
    assert rule.choose(row, []) == 1
    assert rule.probabilities(row, []).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": -3e38}, {"repetition_penalty": 1e-300}], ids=str
)
def test_infinity_is_added_to_no_masked_id(penalty: dict[str, float]) -> None:
    rule = SamplingRule(SamplingParams(bad_token_ids=[1], **penalty), [1, 1, 3, 3])
    row = torch.tensor([0.0, 5.0, 1.0, 2.0])
    assert rule.edited(row, [])[1] == -torch.inf
    assert rule.choose(row, []) == 3


def test_numbers_beyond_float32_are_the_largest_it_has() -> None:
    """As in a slot table."""
    row = torch.tensor([0.0, 1.0, 2.0, -1.0])
    for name, more in (
        ("temperature", {"top_k": 3, "seed": 45}),
        ("repetition_penalty", {}),
        ("presence_penalty", {}),
        ("frequency_penalty", {}),
    ):
        huge, largest = (
            SamplingRule(SamplingParams(**{name: value}, **more), [2])
            for value in (1e300, FLOAT32_MAX)
        )
        assert torch.equal(huge.scores(row, [1, 1]), largest.scores(row, [1, 1]))
        assert bool(huge.scores(row, [1, 1]).isfinite().any())
    rule = SamplingRule(SamplingParams(logit_bias={0: -1e300, 3: 1e300}), [2])
    assert rule.edited(row, []).tolist() == torch.tensor([-FLOAT32_MAX, 1, 2, FLOAT32_MAX]).tolist()


def test_ties_at_every_cut_keep_the_lowest_ids() -> None:
    row = torch.tensor([1.0, 3.0, 1.0, 3.0, 1.0, 3.0])

    def kept(**options: float) -> list[int]:
        rule = SamplingRule(SamplingParams(temperature=1.0, **options), [0])
        return rule.probabilities(row, []).nonzero().flatten().tolist()

    assert kept(top_k=2) == [1, 3]
    assert kept(top_k=4) == [0, 1, 3, 5]
    assert kept(top_p=0.5) == [1, 3]
    assert kept(top_k=2, top_p=0.5) == [1]
    assert kept(min_p=0.5) == [1, 3, 5]


def test_the_seed_is_the_request_s_or_follows_from_its_number() -> None:
    params = SamplingParams(temperature=1.0)
    assert SamplingRule(params, [0], number=7).seed == seed_words(None, 7)
    assert SamplingRule(params, [0], number=7, engine_seed=9).seed == seed_words(None, 7, 9)
    seeded = SamplingParams(temperature=1.0, seed=-1)
    assert SamplingRule(seeded, [0], number=7).seed == seed_words(2**64 - 1, 0)


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([0.0, 1.0, 2.0, -1.0])
    params = SamplingParams(temperature=0.7, min_p=0.05, seed=3)
    rule, draws = SamplingRule(params, [0]), 1000
    counts = torch.zeros(4)
    for number in range(draws):
        counts[rule.choose(row, [0] * number)] += 1
    expected = rule.probabilities(row, [])
    torch.testing.assert_close(counts.double() / draws, expected, rtol=0, atol=0.05)


def test_a_strategy_remembers_what_it_chose() -> None:
    rule = SamplingRule(SamplingParams(bad_words=[(0, 1, 1)]), [0])
    strategy = RequestSampleStrategy(rule, [])
    row = torch.tensor([[0.0, 5.0, 1.0]])
    assert [strategy.sample(row).tolist() for _ in range(4)] == [[1], [2], [1], [1]]
    assert strategy.output == [1, 2, 1, 1]
    with pytest.raises(TensorContractError, match=r"expected \[1, V\], got \[2, 3\]"):
        strategy.sample(row.expand(2, 3))
