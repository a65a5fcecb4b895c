"""Rounding ties: when two tokens are equally likely up to half-precision rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mtp_plugin.errors import ConfigError, expect

TIE_ULPS = 4.0
"""Another order of additions may change each of two logits by two units in the last place: half a
unit by its own rounding, the rest by the rounding of the hidden states."""

SAMPLED_GAP = 1e-5
"""Gap of noisy scores that is a tie in float32 too: logarithms of the noise differ by device."""

LOGPROB_GAP = 1e-4
"""Gap of log-probabilities that is a tie in float32 too: the order of additions differs."""


def ulp(value: float, dtype: torch.dtype) -> float:
    """Return the distance between adjacent numbers of a dtype at a magnitude; 0.0 at infinity."""
    if not math.isfinite(value):
        return 0.0
    facts = torch.finfo(dtype)
    magnitude = max(abs(value), facts.tiny)
    return 2.0 ** (math.frexp(magnitude)[1] - 1) * facts.eps


@dataclass(frozen=True)
class TieRule:
    """How far apart the logits of two tokens may be to count as a tie.

    Args:
        dtype: dtype of the model; in float32 greedy decoding has no ties.
        ulps: units in the last place of the dtype, at the magnitude of the higher logit.

    Raises:
        ConfigError: the number of ulps is negative.
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
        """Return the largest gap of noisy scores (logits divided by the temperature) that is a tie.

        A low temperature also enlarges the rounding of float32 logits."""
        if self.ulps == 0:
            return 0.0
        return max(self.ulps * ulp(logit, self.dtype) / temperature, SAMPLED_GAP)

    def logprob_tolerance(self, logit: float, temperature: float) -> float:
        """Return the largest gap of log-probabilities that is a tie.

        Args:
            logit: the logit with the largest magnitude in the row.
        """
        return max(self.ulps * ulp(logit, self.dtype) / temperature, LOGPROB_GAP)

    def tolerance(self, logit: float) -> float:
        """Return the largest gap below a logit that is a tie."""
        if self.dtype is torch.float32:
            return 0.0
        return self.ulps * ulp(logit, self.dtype)
