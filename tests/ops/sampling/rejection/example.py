"""Rejection sampling in plain Python: one generation, distributions as lists.

``drafts`` are those that are present. There may be more rows: after the last draft nothing is
tested, so the next token is a sample of the target.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from mtp_plugin.ops.sampling import Role
from tests.ops.sampling.example import (
    Options,
    gumbel,
    kept,
    philox,
    rounded,
    uniform,
)

Shares = Sequence[float]


class Noise(NamedTuple):
    """What the draws of a generation are made with."""

    seed: int
    index: int
    """Of the token that its first row draws."""
    step: int

    def word(self, token: int, row: int, role: Role) -> int:
        """The random word of a token in a row."""
        counter = (token // 4, (self.index + row) % 2**32, role, self.step)
        return philox(counter, (self.seed % 2**32, self.seed >> 32))[token % 4]


class Verdict(NamedTuple):
    """Number of accepted drafts, the token after them, and the distance to another result."""

    matches: int
    token: int
    """-1: the row has no value."""
    margin: float


def verify(
    p: Sequence[Shares],
    q: Sequence[Shares],
    drafts: Sequence[int],
    noise: Noise,
    *,
    by_block: bool,
) -> Verdict:
    """Verify drafts, number by number."""
    probs = acceptance_probs(p, q, drafts, by_block=by_block)
    tests = [uniform(noise.word(0, row, Role.ACCEPTANCE)) for row in range(len(drafts))]
    is_accepted = [test < share for test, share in zip(tests, probs, strict=True)]
    if by_block:
        matches = max((i for i, each in enumerate(is_accepted, 1) if each), default=0)
        tested = len(is_accepted)
    else:
        matches = sum(itertools.takewhile(bool, is_accepted))
        tested = matches + 1
    gaps = [abs(test - share) for test, share in zip(tests[:tested], probs[:tested], strict=True)]
    if not any(p[matches]):
        return Verdict(matches, -1, min(gaps, default=1.0))
    following = shares_after(p, q, drafts, matches, by_block=by_block)
    noisy = {
        token: math.log(share) + gumbel(noise.word(token, matches, Role.RECOVERED))
        for token, share in enumerate(following)
        if share > 0
    }
    token = max(noisy, key=lambda token: noisy[token])
    gaps += [noisy[token] - score for other, score in noisy.items() if other != token]
    return Verdict(matches, token, min(gaps, default=1.0))


def those_there(q: Sequence[Shares], drafts: Sequence[int], number: int) -> Sequence[int]:
    """The first ``number`` drafts, up to one that has probability 0."""
    impossible = [i for i, draft in enumerate(drafts) if not q[i][draft]]
    return drafts[: min([number, *impossible])]


def shares_of(row: Sequence[float], options: Options) -> Shares:
    """Sampling distribution of a row of logits; all 0 where no value is usable."""
    values = [-math.inf if math.isnan(value) else value for value in row]
    highest = max(values)
    if highest == -math.inf:
        return [0.0] * len(values)
    if highest == math.inf:
        return _all_on(values.index(highest), len(values))
    scores = [rounded(rounded(value - highest) / options.temperature) for value in values]
    stays = set(kept(scores, options))
    weights = [math.exp(score) if i in stays else 0.0 for i, score in enumerate(scores)]
    mass = math.fsum(weights)
    return [weight / mass for weight in weights]


def forced_shares(
    p: Sequence[Shares], q: Sequence[Shares], drafts: Sequence[int], forced: Sequence[int]
) -> tuple[list[Shares], list[Shares]]:
    """Target's and drafts' rows, where a row that forces an id, no -1, is all on it, and that of
    its draft all on the draft, whatever its distribution was."""
    of_target = [
        row if only < 0 else _all_on(only, len(row)) for row, only in zip(p, forced, strict=True)
    ]
    of_drafts = [
        row if only < 0 else _all_on(draft, len(row))
        for row, draft, only in zip(q, drafts, forced, strict=False)
    ]
    return of_target, of_drafts


def _all_on(token: int, number: int) -> Shares:
    return [float(each == token) for each in range(number)]


def joint_probs(p: Sequence[Shares], q: Sequence[Shares], drafts: Sequence[int]) -> list[float]:
    """Of 0, 1, ... drafts together."""
    probs = [1.0]
    for i, draft in enumerate(drafts):
        if probs[-1] * p[i][draft] == 0:
            probs.append(0.0)
        else:
            ratio = p[i][draft] / q[i][draft] if q[i][draft] else float("inf")
            probs.append(min(probs[-1] * ratio, 1.0))
    return probs


def rest(scale: float, p: Shares, q: Shares) -> list[float]:
    """max(scale * p - q, 0)."""
    return [max(scale * a - b, 0.0) for a, b in zip(p, q, strict=True)]


def acceptance_probs(
    p: Sequence[Shares], q: Sequence[Shares], drafts: Sequence[int], *, by_block: bool
) -> list[float]:
    """Acceptance probability of every draft; under block verification of every prefix."""
    if not by_block:
        return [
            min(p[i][draft] / q[i][draft], 1.0) if q[i][draft] else 1.0
            for i, draft in enumerate(drafts)
        ]
    probs, number = joint_probs(p, q, drafts), len(drafts)
    of_tests = []
    for i in range(1, number):
        mass = sum(rest(probs[i], p[i], q[i]))
        of_tests.append(mass / (mass + 1 - probs[i]) if mass else 0.0)
    return of_tests + probs[1:][-1:]


def chances(
    p: Sequence[Shares], q: Sequence[Shares], drafts: Sequence[int], *, by_block: bool
) -> list[float]:
    """Probability of every number of accepted drafts, 0 to all."""
    probs, number = acceptance_probs(p, q, drafts, by_block=by_block), len(drafts)
    left, of_numbers = 1.0, [0.0] * (number + 1)
    if by_block:
        for i in range(number, 0, -1):
            of_numbers[i] = left * probs[i - 1]
            left *= 1 - probs[i - 1]
        of_numbers[0] = left
        return of_numbers
    for i, share in enumerate(probs):
        of_numbers[i] = left * (1 - share)
        left *= share
    of_numbers[number] = left
    return of_numbers


def shares_after(
    p: Sequence[Shares],
    q: Sequence[Shares],
    drafts: Sequence[int],
    matches: int,
    *,
    by_block: bool,
) -> list[float]:
    """Distribution of the token after ``matches`` accepted drafts."""
    if matches == len(drafts):
        return list(p[matches])
    scale = joint_probs(p, q, drafts)[matches] if by_block else 1.0
    left = rest(scale, p[matches], q[matches])
    mass = sum(left)
    return [share / mass for share in left] if mass else list(p[matches])
