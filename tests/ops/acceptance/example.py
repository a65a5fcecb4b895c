"""Acceptance in plain Python, over lists of numbers.

A row is a list of logits. A request has one row (a prompt) or one more than it has drafts.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Rule(NamedTuple):
    """How a request accepts drafts that are not the target's first choice."""

    thinking: bool
    topk: int
    delta: float
    stop_ids: list[int]
    begin: int
    end: int
    samples: bool = False  # has a temperature


class Slot(NamedTuple):
    """What a request's slot says of its phase."""

    noted: int  # the phase that was noted
    in_force: float  # the delta in force: a host may write it
    limit: float  # the request's own delta

    @property
    def thinking(self) -> bool:
        """The delta in force says so; a request without one has but the note."""
        if self.in_force > 0:
            return True
        return self.limit == 0 and self.noted > 0

    @property
    def delta(self) -> float:
        """The delta while it thinks."""
        return self.in_force if self.in_force > 0 else self.limit

    def after(self, thinking: bool) -> Slot:
        """What the step leaves there."""
        return Slot(int(thinking), self.delta if thinking else 0.0, self.limit)


class Run(NamedTuple):
    """What a request emits in one step."""

    tokens: list[int]
    fine: bool = True
    thinking: bool = False
    margins: dict[int, float] = {}  # noqa: RUF012 - draft index -> distance that decided it


def first_choice(row: list[float]) -> int | None:
    """The lowest id of the highest value; None where no value is usable."""
    best = None
    for token, value in enumerate(row):
        usable = not math.isnan(value) and value > -math.inf
        if usable and (best is None or value > row[best]):
            best = token
    return best


class Row(NamedTuple):
    """What verifies one draft."""

    values: list[float]
    choice: int | None  # the target token; None: there is none
    only: int | None = None  # the only token that is accepted there


def rows_of(
    values: list[list[float]], choices: list[int] | None = None, only: list[int] | None = None
) -> list[Row]:
    """Rows whose choice is the first one, or the one given; -1: none."""
    rows = []
    for i, row in enumerate(values):
        choice = first_choice(row) if choices is None else choices[i]
        rows.append(
            Row(
                row,
                None if choice is None or choice < 0 else choice,
                None if only is None or only[i] < 0 else only[i],
            )
        )
    return rows


def prompt(row: Row, ends_prompt: bool) -> Run:
    """A prompt emits the target's token, a prompt chunk that does not end it nothing."""
    return _with_bonus([], row) if ends_prompt else Run([])


def _with_bonus(emitted: list[int], row: Row) -> Run:
    """The target adds one token after the drafts."""
    if row.choice is None:
        return Run(emitted, fine=False)
    return Run([*emitted, row.choice])


def strict(rows: list[Row], drafts: list[int]) -> Run:
    """Accept drafts while they are the target tokens, then add the bonus."""
    emitted: list[int] = []
    for row, draft in zip(rows, drafts, strict=False):
        if draft != row.choice:
            break
        emitted.append(draft)
    return _with_bonus(emitted, rows[len(emitted)])


def forced(rows: list[Row], drafts: list[int], count: int) -> Run:
    """Accept a number of drafts, up to one that is no token or that its row masks."""
    emitted: list[int] = []
    for row, draft in zip(rows, drafts[:count], strict=False):
        if row.only is not None:
            if draft != row.only:
                break
        elif not 0 <= draft < len(row.values) or _value(row.values, draft) == -math.inf:
            break
        emitted.append(draft)
    return _with_bonus(emitted, rows[len(emitted)])


def relaxed(rows: list[Row], drafts: list[int], rule: Rule) -> Run:
    """As `strict`; while a request is thinking, also accept drafts near the best one."""
    emitted: list[int] = []
    margins: dict[int, float] = {}
    thinking = rule.thinking
    for i, (row, draft) in enumerate(zip(rows, drafts, strict=False)):
        if draft != row.choice:
            if not thinking or not _may_be_near(row, draft, rule):
                break
            best = _probability(row.values, first_choice(row.values))
            distance = _probability(row.values, draft) - (best - rule.delta)
            margins[i] = abs(distance)
            if distance < 0:
                break
        emitted.append(draft)
        thinking = phase_after(thinking, draft, rule)
    ended = _with_bonus(emitted, rows[len(emitted)])
    if ended.fine:
        thinking = phase_after(thinking, ended.tokens[-1], rule)
    return ended._replace(thinking=thinking, margins=margins)


def verified(rows: list[Row], drafts: list[int], rule: Rule | None, count: int) -> Run:
    """A count of 0 and more decides alone, then the rule, if there is one; the phase goes on."""
    if count < 0:
        return strict(rows, drafts) if rule is None else relaxed(rows, drafts, rule)
    run = forced(rows, drafts, count)
    return run if rule is None else run._replace(thinking=phase_after_tokens(run.tokens, rule))


def phase_after_tokens(tokens: list[int], rule: Rule) -> bool:
    """Whether a request thinks after it emitted some tokens."""
    thinking = rule.thinking
    for token in tokens:
        thinking = phase_after(thinking, token, rule)
    return thinking


def phase_after(thinking: bool, token: int, rule: Rule) -> bool:
    """Whether a request thinks after it emitted a token."""
    if token == rule.end:
        return False
    return thinking or token == rule.begin


def _may_be_near(verifier: Row, draft: int, rule: Rule) -> bool:
    """Whether a draft is accepted if it is probable enough."""
    row = verifier.values
    if verifier.choice is None or verifier.only is not None or rule.samples:
        return False
    if draft in (rule.begin, rule.end, *rule.stop_ids) or not 0 <= draft < len(row):
        return False
    ranking = sorted((-_value(row, token), token) for token in range(len(row)))
    among = [token for _, token in ranking[: rule.topk]]
    return draft in among and _value(row, draft) > -math.inf


def _value(row: list[float], token: int) -> float:
    return -math.inf if math.isnan(row[token]) else row[token]


def _probability(row: list[float], token: int) -> float:
    return _probabilities(row)[token]


def _probabilities(row: list[float]) -> list[float]:
    values = [_value(row, token) for token in range(len(row))]
    highest = max(values)
    # +inf is the maximum, not more than it
    weights = [1.0 if value == highest else math.exp(value - highest) for value in values]
    total = sum(weights)
    return [weight / total for weight in weights]
