"""Compare output tokens with non-speculative decoding, token by token, except for ties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from mtp_plugin.infer import SamplingRule
from mtp_plugin.tools.parity.oracle import Oracle
from mtp_plugin.tools.parity.sampled_gap import gap_of_sampled_token
from mtp_plugin.tools.parity.ties import TieRule


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
        position = first_difference(tokens, expected, start)
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


def compare_forced(
    oracle: Oracle,
    rule: TieRule,
    prompt_ids: Sequence[int],
    emitted: Sequence[int],
    *,
    start: int = 0,
) -> Comparison:
    """Compare every token from ``start`` on with the argmax after the output prefix.

    One forward pass, no decoding: meant for half precision, where the order of additions decides
    between near-equal tokens anyway.
    """
    tokens = list(emitted)
    count = len(tokens) - start
    if count < 1:
        return Comparison(len(tokens))
    logits = oracle.logits([*prompt_ids, *tokens[:-1]], count)
    logits = logits.masked_fill(logits.isnan(), -torch.inf)  # NaN is never chosen
    chosen = torch.tensor(tokens[start:], device=logits.device)
    best, expected = logits.max(dim=-1)
    gaps = best - logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
    other = (expected != chosen).nonzero().squeeze(1).tolist()
    ties: list[Divergence] = []
    for row in other:
        found = Divergence(
            position=start + row,
            token=tokens[start + row],
            expected=int(expected[row]),
            gap=float(gaps[row]),
            tolerance=rule.tolerance(float(best[row])),
        )
        if not found.is_tie:
            return Comparison(start + row, ties, found)
        ties.append(found)
    return Comparison(len(tokens), ties)


def first_difference(ours: list[int], theirs: list[int], start: int = 0) -> int | None:
    """Return the first position at which two outputs differ or one has ended; None: equal."""
    for position in range(start, max(len(ours), len(theirs))):
        if ours[position : position + 1] != theirs[position : position + 1]:
            return position
    return None
