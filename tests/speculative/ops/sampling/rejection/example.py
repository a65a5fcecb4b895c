"""Rejection sampling in plain Python: one generation, distributions as lists.

``drafts`` are those that are there. Rows may be more: behind the last draft nothing was tested, so
what follows it is the target's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from mtp_plugin.speculative.ops.sampling import Role
from tests.speculative.ops.sampling.example import (
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


class Judged(NamedTuple):
    """How many drafts stand, the token behind them, and how near that was to being another."""

    matches: int
    token: int
    """-1: the row has no value."""
    margin: float


def judged(
    p: Sequence[Shares],
    q: Sequence[Shares],
    drafts: Sequence[int],
    noise: Noise,
    *,
    by_block: bool,
) -> Judged:
    """What is made of drafts, draw by draw."""
    odds = odds_of_tests(p, q, drafts, by_block=by_block)
    tests = [uniform(noise.word(0, row, Role.ACCEPTANCE)) for row in range(len(drafts))]
    stands = [test < share for test, share in zip(tests, odds, strict=True)]
    if by_block:
        matches = max((i for i, each in enumerate(stands, 1) if each), default=0)
        asked = len(stands)
    else:
        matches = sum(itertools.takewhile(bool, stands))
        asked = matches + 1
    gaps = [abs(test - share) for test, share in zip(tests[:asked], odds[:asked], strict=True)]
    if not any(p[matches]):
        return Judged(matches, -1, min(gaps, default=1.0))
    behind = shares_behind(p, q, drafts, matches, by_block=by_block)
    noisy = {
        token: math.log(share) + gumbel(noise.word(token, matches, Role.RECOVERED))
        for token, share in enumerate(behind)
        if share > 0
    }
    token = max(noisy, key=lambda token: noisy[token])
    gaps += [noisy[token] - score for other, score in noisy.items() if other != token]
    return Judged(matches, token, min(gaps, default=1.0))


def those_there(q: Sequence[Shares], drafts: Sequence[int], number: int) -> Sequence[int]:
    """The first ``number`` drafts, up to one that cannot have been drawn."""
    undrawn = [i for i, draft in enumerate(drafts) if not q[i][draft]]
    return drafts[: min([number, *undrawn])]


def shares_of(row: Sequence[float], options: Options) -> Shares:
    """What a row of logits is drawn from; all 0 where no value is usable."""
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
    its draft all on the draft, whatever it was drawn from."""
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


def joint_odds(p: Sequence[Shares], q: Sequence[Shares], drafts: Sequence[int]) -> list[float]:
    """Of 0, 1, ... drafts together."""
    odds = [1.0]
    for i, draft in enumerate(drafts):
        if odds[-1] * p[i][draft] == 0:
            odds.append(0.0)
        else:
            ratio = p[i][draft] / q[i][draft] if q[i][draft] else float("inf")
            odds.append(min(odds[-1] * ratio, 1.0))
    return odds


def rest(scale: float, p: Shares, q: Shares) -> list[float]:
    """max(scale * p - q, 0)."""
    return [max(scale * a - b, 0.0) for a, b in zip(p, q, strict=True)]


def odds_of_tests(
    p: Sequence[Shares], q: Sequence[Shares], drafts: Sequence[int], *, by_block: bool
) -> list[float]:
    """Of every draft's test, how often it says that the draft stands, by block with all before."""
    if not by_block:
        return [
            min(p[i][draft] / q[i][draft], 1.0) if q[i][draft] else 1.0
            for i, draft in enumerate(drafts)
        ]
    odds, number = joint_odds(p, q, drafts), len(drafts)
    of_tests = []
    for i in range(1, number):
        mass = sum(rest(odds[i], p[i], q[i]))
        of_tests.append(mass / (mass + 1 - odds[i]) if mass else 0.0)
    return of_tests + odds[1:][-1:]


def chances(
    p: Sequence[Shares], q: Sequence[Shares], drafts: Sequence[int], *, by_block: bool
) -> list[float]:
    """Of every number of drafts, 0 to all, that so many stand."""
    odds, number = odds_of_tests(p, q, drafts, by_block=by_block), len(drafts)
    left, of_numbers = 1.0, [0.0] * (number + 1)
    if by_block:
        for i in range(number, 0, -1):
            of_numbers[i] = left * odds[i - 1]
            left *= 1 - odds[i - 1]
        of_numbers[0] = left
        return of_numbers
    for i, share in enumerate(odds):
        of_numbers[i] = left * (1 - share)
        left *= share
    of_numbers[number] = left
    return of_numbers


def shares_behind(
    p: Sequence[Shares],
    q: Sequence[Shares],
    drafts: Sequence[int],
    matches: int,
    *,
    by_block: bool,
) -> list[float]:
    """What is drawn from behind ``matches`` drafts."""
    if matches == len(drafts):
        return list(p[matches])
    scale = joint_odds(p, q, drafts)[matches] if by_block else 1.0
    left = rest(scale, p[matches], q[matches])
    mass = sum(left)
    return [share / mass for share in left] if mass else list(p[matches])
