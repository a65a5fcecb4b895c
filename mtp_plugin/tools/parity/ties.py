"""When two tokens are equally good but for the rounding of half precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mtp_plugin.errors import ConfigError, expect

TIE_ULPS = 4.0
"""Each of two logits may come out two units in the last place off in another order of additions:
half of one by its own rounding, the rest by that of the states it is computed from."""

SAMPLED_GAP = 1e-5
"""Noisy scores so close are a tie in float32 too: logarithms of the noise differ by device."""

LOGPROB_GAP = 1e-4
"""Log-probabilities so close are the same in float32 too: sums are taken in another order."""


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of a dtype at a magnitude; 0.0 at infinities."""
    if not math.isfinite(value):
        return 0.0
    facts = torch.finfo(dtype)
    magnitude = max(abs(value), facts.tiny)
    return 2.0 ** (math.frexp(magnitude)[1] - 1) * facts.eps


@dataclass(frozen=True)
class TieRule:
    """How far apart the logits of two tokens may be where either may be chosen.

    Args:
        dtype: of the model; in float32 no difference of logits counts as a tie, where none is
            divided by a temperature.
        ulps: of the dtype at the magnitude of the higher logit.

    Raises:
        ConfigError: a negative number of ulps.
    """

    dtype: torch.dtype
    ulps: float = TIE_ULPS

    def __post_init__(self) -> None:
        expect(
            self.ulps >= 0,
            ConfigError,
            f"tie tolerance: expected at least 0 ulps, got {self.ulps}",
        )

    def sampled_tolerance(self, logit: float, temperature: float) -> float:
        """The largest excusable gap of noisy scores, which are logits over the temperature; those
        of float32 have their units in the last place too, which a low temperature makes large."""
        if self.ulps == 0:
            return 0.0
        return max(self.ulps * ulp(logit, self.dtype) / temperature, SAMPLED_GAP)

    def logprob_tolerance(self, logit: float, temperature: float) -> float:
        """The largest excusable gap of log-probabilities, which are of logits over the temperature.

        Args:
            logit: the largest of the row, by magnitude.
        """
        return max(self.ulps * ulp(logit, self.dtype) / temperature, LOGPROB_GAP)

    def tolerance(self, logit: float) -> float:
        """The largest excusable gap below a logit."""
        if self.dtype is torch.float32:
            return 0.0
        return self.ulps * ulp(logit, self.dtype)
