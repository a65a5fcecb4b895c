"""Compare output tokens with non-speculative decoding, token by token, except for ties."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.infer import SamplingRule
from mtp_plugin.tools.parity.reference import Oracle
from mtp_plugin.tools.parity.sampled_gap import gap_of_sampled_token

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


@dataclass(frozen=True)
class Divergence:
    """An output token that differs from non-speculative decoding."""

    position: int
    """Position in the output, counted from 0."""
    token: int | None
    """The output token; None: the output had ended."""
    expected: int | None
    """The token of non-speculative decoding; None: it had ended."""
    gap: float | None = None
    """Logit of the expected token minus that of the output token, given the same prefix; see
    `gap_of_sampled_token` for sampled tokens. None unless there are two tokens."""
    tolerance: float = 0.0
    """Largest gap that counts as a tie."""

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.gap is not None and self.tolerance > 0 and abs(self.gap) <= self.tolerance


@dataclass(frozen=True)
class Comparison:
    """Comparison of one output with non-speculative decoding."""

    num_equal: int
    """Number of tokens before the first difference that is not a tie, including ties."""
    ties: list[Divergence] = field(default_factory=list)
    difference: Divergence | None = None
    """The first difference that is not a tie; later tokens were not compared."""


def compare_with_continuations(
    emitted: Sequence[int],
    continue_from: Callable[[list[int]], list[int]],
    measure: Callable[[int, int, int], Divergence],
) -> Comparison:
    """Compare with non-speculative decoding, which continues from the output prefix after a tie.

    Args:
        emitted: output tokens of one request.
        continue_from: prefix of them -> the prefix continued by non-speculative decoding.
        measure: (position, output token, expected token) -> the divergence with its gap.
    """
    tokens = list(emitted)
    ties: list[Divergence] = []
    start = 0
    while True:
        expected = continue_from(tokens[:start])
        position = _first_difference(tokens, expected, start)
        if position is None:
            return Comparison(len(tokens), ties)
        ours = tokens[position] if position < len(tokens) else None
        theirs = expected[position] if position < len(expected) else None
        found = Divergence(position, ours, theirs)
        if ours is not None and theirs is not None:
            found = measure(position, ours, theirs)
        if not found.is_tie:
            return Comparison(position, ties, found)
        ties.append(found)
        start = position + 1


def measure_gap(
    oracle: Oracle, rule: TieRule, sampling: SamplingRule, emitted: Sequence[int]
) -> Callable[[int, int, int], Divergence]:
    """Return a function that measures the gap of two tokens after a common prefix.

    Args:
        sampling: of the request, with its prompt.
        emitted: its tokens.
    """

    def measure(position: int, token: int, expected: int) -> Divergence:
        output = emitted[:position]
        row = oracle.logits([*sampling.prompt, *output], 1)[0]
        logits = sampling.edited(row, output)
        higher, lower = float(logits[expected]), float(logits[token])
        highest = max(higher, lower)
        if sampling.is_greedy:
            return Divergence(position, token, expected, higher - lower, rule.tolerance(highest))
        gap = gap_of_sampled_token(sampling, row, output, token)
        tolerance = rule.sampled_tolerance(highest, sampling.temperature)
        return Divergence(position, token, expected, gap, tolerance)

    return measure


def _first_difference(ours: list[int], theirs: list[int], start: int) -> int | None:
    """Return the first position at which two outputs differ or one has ended; None: equal."""
    for position in range(start, max(len(ours), len(theirs))):
        if ours[position : position + 1] != theirs[position : position + 1]:
            return position
    return None
