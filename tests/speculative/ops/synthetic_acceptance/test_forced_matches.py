"""Story, reference and kernel of the draws, and the shares of steps that they give."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import ConfigError, TensorContractError
from mtp_plugin.speculative.ops.synthetic_acceptance import (
    SyntheticRule,
    launch,
    reference,
    synthetic_rule,
)
from tests.kernels.top_k.launches import captured, poisoned_outputs
from tests.speculative.ops.on_device import DEVICE, INDEX_DTYPES, POISON, forbid_launches, vector
from tests.speculative.ops.synthetic_acceptance import story

MODULES = [pytest.param(reference, id="reference"), pytest.param(launch, id="kernel")]
CERTAIN = 2**30

seeds = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**31, 2**32 - 1])
shares = st.lists(st.floats(0, 1) | st.sampled_from([0.0, 1.0]), max_size=9).map(
    lambda rates: sorted(rates, reverse=True)
)


def rule_of(thresholds: list[int], seed: int) -> SyntheticRule:
    return SyntheticRule(vector(thresholds, torch.int32), vector([seed]))


@given(
    positions=st.lists(st.integers(0, 2**31 - 20) | st.integers(0, 40), max_size=70),
    dtype=st.sampled_from(INDEX_DTYPES),
    stride=st.integers(1, 3),
    thresholds=st.lists(
        st.integers(0, CERTAIN) | st.sampled_from([0, CERTAIN, CERTAIN - 1]), max_size=9
    ),
    seed=seeds,
    first_number=st.none() | st.integers(0, 2**31 - 80),
)
def test_reference_and_kernel_are_the_story(
    positions: list[int],
    dtype: torch.dtype,
    stride: int,
    thresholds: list[int],
    seed: int,
    first_number: int | None,
) -> None:
    wide = torch.full((len(positions), stride + 1), -777, dtype=dtype, device=DEVICE)
    wide[:, 0] = vector(positions, dtype)
    numbers, given_numbers = [0] * len(positions), None
    if first_number is not None:
        numbers = [first_number + i for i in range(len(positions))]
        wide[:, 1] = vector(numbers, dtype)
        given_numbers = wide[:, 1]
    before = wide.clone()
    told = [
        story.forced(position, thresholds, seed, number)
        for position, number in zip(positions, numbers, strict=True)
    ]
    rule = rule_of(thresholds, seed)
    for module in (reference, launch):
        with poisoned_outputs(launch):
            forced = module.forced_matches(wide[:, 0], rule, given_numbers)
        assert forced.dtype == torch.int32
        assert forced.tolist() == told
    assert torch.equal(wide, before)


@pytest.mark.parametrize(
    ("seed", "draws"),
    [
        (0, [1053980816, 536506620, 100065276, 681475419]),
        (7, [558947160, 416179284, 180906342, 553857852]),
        (2**32 - 1, [543702670, 1054910314, 498578609, 849874168]),
    ],
)
@pytest.mark.parametrize("module", MODULES)
def test_golden_draws(module: Any, seed: int, draws: list[int]) -> None:
    """A draw is found as the lowest threshold under which its draft stands."""
    assert story.mixed(1) == 0x514E28B7  # what Murmur3 gives for no bytes and seed 1
    assert [story.draw(seed, position) for position in range(1, 5)] == draws
    for position, draw in enumerate(draws, 1):
        for threshold, stands in ((draw, 0), (draw + 1, 1)):
            forced = module.forced_matches(vector([position - 1]), rule_of([threshold], seed))
            assert forced.tolist() == [stands]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    "shares", [(0.8, 0.6, 0.4), (0.95, 0.95, 0.1, 0.1), (0.5,), (1.0, 0.3, 0.0), (0.9, 0.81, 0.729)]
)
def test_shares_of_steps_are_those_asked_for(module: Any, shares: tuple[float, ...]) -> None:
    """Over many positions; K = 1 to 4, some drafts certain, some hopeless."""
    steps = 20_000 if module is reference else 4_000
    for seed in (0, 1, 12345):
        rule = synthetic_rule(shares, seed, DEVICE)
        # far enough apart that no draw is read twice
        forced = module.forced_matches(torch.arange(steps, device=DEVICE) * 5, rule)
        for i, share in enumerate(shares):
            measured = float((forced > i).double().mean())
            deviation = math.sqrt(share * (1 - share) / steps)
            assert abs(measured - share) <= 4 * deviation, (seed, i)


def test_neighbours_are_independent() -> None:
    """Draws of one seed at p and p+1, and of two seeds at p, agree by chance alone."""
    steps = 40_000
    positions = torch.arange(steps, device=DEVICE)
    half = {
        seed: reference.forced_matches(positions, synthetic_rule([0.5], seed, DEVICE)).double()
        for seed in (0, 1, 2)
    }
    bound = 4 / math.sqrt(steps)
    for one, other in (
        (half[0][1:], half[0][:-1]),
        (half[0][2:], half[0][:-2]),
        (half[0], half[1]),
        (half[1], half[2]),
    ):
        assert abs(float(((one - 0.5) * (other - 0.5)).mean() * 4)) < bound


def test_requests_at_equal_positions_are_independent() -> None:
    """A batch of prompts of one length draws anew for each; neighbours agree by chance alone."""
    batch, steps, shares = 64, 400, (0.8, 0.6, 0.4)
    rule = synthetic_rule(shares, 3, DEVICE)
    positions = torch.arange(steps, device=DEVICE).repeat_interleave(batch) * 5
    numbers = torch.arange(batch, device=DEVICE).repeat(steps)
    forced = reference.forced_matches(positions, rule, numbers)
    assert torch.equal(forced, launch.forced_matches(positions, rule, numbers))
    for i, share in enumerate(shares):
        measured = float((forced > i).double().mean())
        assert abs(measured - share) <= 4 * math.sqrt(share * (1 - share) / (batch * steps))
    first = (forced > 0).double().view(steps, batch) - shares[0]
    agreement = (first[:, 1:] * first[:, :-1]).mean() / (shares[0] * (1 - shares[0]))
    assert abs(float(agreement)) < 4 / math.sqrt(steps * (batch - 1))


def test_a_walk_reads_every_draw_once() -> None:
    """A request that steps on by its run and one meets the shares too."""
    shares, seed, steps = (0.8, 0.6, 0.4), 3, 20_000
    rule = synthetic_rule(shares, seed)
    thresholds = rule.thresholds.tolist()
    position, counts = 0, [0, 0, 0]
    for _ in range(steps):
        run = story.forced(position, thresholds, seed)
        for i in range(run):
            counts[i] += 1
        position += run + 1
    for share, count in zip(shares, counts, strict=True):
        assert abs(count / steps - share) <= 4 * math.sqrt(share * (1 - share) / steps)


def test_thresholds_are_conditional() -> None:
    rule = synthetic_rule([0.8, 0.6, 0.6, 0.0, 0.0], 5)
    assert rule.thresholds.tolist() == [round(0.8 * CERTAIN), round(0.75 * CERTAIN), CERTAIN, 0, 0]
    assert rule.seed.tolist() == [5]
    assert synthetic_rule([1.0, 1.0], 0).thresholds.tolist() == [CERTAIN, CERTAIN]


@given(shares=shares, seed=seeds)
def test_any_shares_give_thresholds(shares: list[float], seed: int) -> None:
    thresholds = synthetic_rule(shares, seed).thresholds
    assert thresholds.shape == (len(shares),)
    assert ((thresholds >= 0) & (thresholds <= CERTAIN)).all()


@pytest.mark.parametrize(
    ("shares", "seed", "message"),
    [
        ([0.5, 0.6], 0, r"expected shares from 0 to 1 that do not rise, got \[0.5, 0.6\]"),
        ([1.1], 0, "expected shares from 0 to 1"),
        ([-0.1], 0, "expected shares from 0 to 1"),
        ([math.nan], 0, "expected shares from 0 to 1"),
        ([0.5], -1, r"expected a seed from 0 to 2\*\*32 - 1, got -1"),
        ([0.5], 2**32, "expected a seed"),
    ],
)
def test_rules_that_cannot_be(shares: list[float], seed: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        synthetic_rule(shares, seed)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    "positions", [torch.zeros(2), torch.zeros(2, 1).long(), torch.zeros(2).bool()]
)
def test_positions_that_are_none(module: Any, positions: torch.Tensor) -> None:
    with pytest.raises(TensorContractError, match=r"last_positions: expected integers \[G\], got"):
        module.forced_matches(positions.to(DEVICE), rule_of([1], 0))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    "numbers", [torch.zeros(2), torch.zeros(2, 1).long(), torch.zeros(3).int()]
)
def test_numbers_that_are_none(module: Any, numbers: torch.Tensor) -> None:
    with pytest.raises(TensorContractError, match=r"request_numbers: expected integers \[2\], got"):
        module.forced_matches(vector([1, 2]), rule_of([1], 0), numbers.to(DEVICE))


def test_nothing_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, launch)
    assert launch.forced_matches(vector([]), rule_of([1], 0)).shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "k"), [(1, 1), (64, 3), (1000, 16)])
def test_in_a_cuda_graph(batch: int, k: int) -> None:
    """Captured once, replayed at other positions, rates and seeds; the host is never asked."""
    positions = torch.arange(batch, device=DEVICE) * 3
    numbers = torch.arange(batch, device=DEVICE, dtype=torch.int32)
    rule = synthetic_rule([0.9**i for i in range(1, k + 1)], 1, DEVICE)
    graph, forced = captured(lambda: launch.forced_matches(positions, rule, numbers))
    for seed, rate in ((7, 0.5), (2**32 - 1, 0.99)):
        other = synthetic_rule([rate**i for i in range(1, k + 1)], seed, DEVICE)
        positions.add_(1717)
        numbers.add_(5)
        rule.thresholds.copy_(other.thresholds)
        rule.seed.copy_(other.seed)
        forced.fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(forced, reference.forced_matches(positions, other, numbers))
