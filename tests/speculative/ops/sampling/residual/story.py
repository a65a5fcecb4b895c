"""How far drafts stand, told in plain numbers: one generation, distributions as lists."""

from __future__ import annotations

from collections.abc import Sequence

Shares = Sequence[float]


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


def chances(
    p: Sequence[Shares], q: Sequence[Shares], drafts: Sequence[int], *, by_block: bool
) -> list[float]:
    """Of every number of drafts, 0 to all, that so many stand."""
    odds, number = joint_odds(p, q, drafts), len(drafts)
    left, of_numbers = 1.0, [0.0] * (number + 1)
    if by_block:
        for i in range(number, 0, -1):
            mass = sum(rest(odds[i], p[i], q[i])) if i < number else 0.0
            share = odds[i] if i == number else mass / (mass + 1 - odds[i]) if mass else 0.0
            of_numbers[i] = left * share
            left *= 1 - share
        of_numbers[0] = left
        return of_numbers
    for i, draft in enumerate(drafts):
        share = min(p[i][draft] / q[i][draft], 1.0) if q[i][draft] else 1.0
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
