"""The size of a unit in the last place, and what counts as a tie."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import ConfigError
from mtp_plugin.tools.parity import TIE_ULPS, Divergence, TieRule, ulp

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("value", "dtype", "distance"),
    [
        (1.0, torch.bfloat16, 2**-7),
        (1.99, torch.bfloat16, 2**-7),
        (2.0, torch.bfloat16, 2**-6),
        (-12.5, torch.bfloat16, 2**-4),
        (12.5, torch.float16, 2**-7),
        (0.75, torch.float32, 2**-24),
    ],
)
def test_an_ulp_is_the_distance_of_neighbours(
    value: float, dtype: torch.dtype, distance: float
) -> None:
    assert ulp(value, dtype) == distance


@given(st.floats(2**-10, 30000.0), st.sampled_from(HALVES))
def test_the_next_number_is_one_ulp_on(value: float, dtype: torch.dtype) -> None:
    number = torch.tensor(value, dtype=dtype)
    following = torch.nextafter(number.float().to(dtype), torch.tensor(math.inf, dtype=dtype))
    assert float(following.double() - number.double()) == ulp(float(number), dtype)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinities_excuse_nothing(value: float) -> None:
    assert TieRule(torch.bfloat16).tolerance(value) == 0.0


def test_zero_has_the_smallest_ulp() -> None:
    assert 0 < ulp(0.0, torch.bfloat16) < 1e-30


def test_the_tolerance_is_a_number_of_ulps_and_none_in_float32() -> None:
    assert TieRule(torch.bfloat16).tolerance(10.0) == TIE_ULPS * 2**-4
    assert TieRule(torch.bfloat16, 1.5).tolerance(-10.0) == 1.5 * 2**-4
    assert TieRule(torch.float32, 1000).tolerance(10.0) == 0.0


def test_noisy_scores_tie_by_the_temperature_and_by_the_rounding_of_noise() -> None:
    half, single = TieRule(torch.bfloat16), TieRule(torch.float32)
    assert half.sampled_tolerance(10.0, 0.5) == 2 * half.tolerance(10.0)
    assert single.sampled_tolerance(10.0, 0.01) == 4 * 2.0**-20 / 0.01
    assert half.sampled_tolerance(1e-9, 1.0) == single.sampled_tolerance(10.0, 0.5) == 1e-5
    for dtype in (torch.bfloat16, torch.float32):
        assert TieRule(dtype, 0).sampled_tolerance(10.0, 1.0) == 0.0


def test_a_negative_tolerance_is_named() -> None:
    with pytest.raises(ConfigError, match="tie tolerance: expected at least 0 ulps, got -1"):
        TieRule(torch.bfloat16, -1)


@pytest.mark.parametrize(
    ("gap", "tolerance", "is_tie"),
    [
        (0.25, 0.25, True),
        (-0.25, 0.25, True),
        (0.26, 0.25, False),
        (0.0, 0.0, False),  # float32: the lowest id was not chosen
        (None, 0.25, False),  # one of them had ended
        (math.nan, 0.25, False),
        (math.inf, 0.25, False),
    ],
)
def test_what_a_tie_is(gap: float | None, tolerance: float, is_tie: bool) -> None:
    assert Divergence(0, 1, 2, gap, tolerance).is_tie is is_tie
