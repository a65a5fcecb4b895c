"""How far a row is from drawing another token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.infer import SamplingRule
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.tools.parity import gap_of_sampled_token

VOCAB = 12
OPTIONS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.3, 1.0, 2.0]), "seed": st.integers(0, 2**32)},
    optional={
        "top_k": st.integers(2, VOCAB),
        "top_p": st.floats(0.05, 0.99),
        "min_p": st.floats(0.01, 0.9),
        "bad_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-2, 2), max_size=2),
    },
)


def rule_of(**options) -> SamplingRule:
    return SamplingRule(SamplingParams(**{"temperature": 1.0, **options}), [1])


@settings(max_examples=100, deadline=None)
@given(OPTIONS, st.integers(0, 2**32), st.sampled_from([1e-3, 0.05, 0.4, 2.0]))
def test_a_row_that_is_a_little_off_draws_what_is_that_near(options, rng, gap) -> None:
    """Two scores come a gap closer when each is off by half of it."""
    rule, torch_rng = rule_of(**options), torch.Generator().manual_seed(rng)
    row = torch.randn(VOCAB, generator=torch_rng)
    off = (torch.rand(VOCAB, generator=torch_rng) - 0.5) * gap * options["temperature"]
    assert gap_of_sampled_token(rule, row, [], rule.choose(row, [])) == 0.0
    sampled = rule.choose(row + off, [])
    assert gap_of_sampled_token(rule, row, [], sampled) <= gap + 1e-5


def test_without_cuts_it_is_the_lead() -> None:
    rule, row = rule_of(temperature=0.5), torch.randn(VOCAB)
    noisy = (row - row.max()) / 0.5 + rule.noise([], VOCAB)
    for token in range(VOCAB):
        expected = float(noisy.max() - noisy[token])
        assert gap_of_sampled_token(rule, row, [], token) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "distance"),
    [
        ({"top_k": 2}, 0.25),  # to the second score
        ({"min_p": math.exp(-1.0)}, 0.5),  # to the weight that is needed
        ({"top_p": 0.7}, 0.25),  # the second rank is kept
        # the second rank is 0.67 of probability away, and 0.25 of scores
        ({"top_p": 0.5}, -math.log(math.exp(-1.25) + math.exp(-1.5))),
        ({"top_p": 0.7, "min_p": math.exp(-1.0)}, 0.5),
        ({"top_k": 2, "top_p": 0.8}, 0.25),
    ],
)
def test_outside_a_cut_it_is_the_way_to_it(options, distance) -> None:
    """Of three scores the last, which noise makes the highest."""
    row = torch.tensor([0.0, -1.25, -1.5])
    rules = (rule_of(**options, seed=seed) for seed in range(1000))
    rule = next(rule for rule in rules if int((row + rule.noise([], 3)).argmax()) == 2)
    assert gap_of_sampled_token(rule, row, [], 2) == pytest.approx(distance, abs=1e-6)


def test_what_a_cut_may_leave_out_is_in_the_way_by_its_distance_from_it() -> None:
    """The second of two kept scores is sampled, the first has the lower noisy score."""
    row = torch.tensor([0.0, -1.0, -1.125])
    rules = (rule_of(top_k=2, seed=seed) for seed in range(1000))
    noisy = ((rule, row + rule.noise([], 3)) for rule in rules)
    rule = next(rule for rule, scores in noisy if scores[1] > scores[0] + 1 > scores[2] + 2)
    assert rule.choose(row, []) == 1
    assert gap_of_sampled_token(rule, row, [], 0) == pytest.approx(0.125, abs=1e-6)


def test_a_score_that_comes_to_another_rank_may_leave_the_share() -> None:
    """The first of two near scores is kept alone; as the second it would not be."""
    row = torch.tensor([0.0, -0.125, -3.0])
    rules = (rule_of(top_p=0.5, seed=seed) for seed in range(1000))
    noisy = ((rule, row + rule.noise([], 3)) for rule in rules)
    rule = next(rule for rule, scores in noisy if scores[0] > scores[1] + 1)
    assert rule.choose(row, []) == 0
    assert gap_of_sampled_token(rule, row, [], 1) == pytest.approx(0.125, abs=1e-6)


def test_ids_that_are_never_written_are_infinitely_far() -> None:
    rule = rule_of(bad_token_ids=[3])
    assert gap_of_sampled_token(rule, torch.zeros(VOCAB), [], 3) == math.inf
