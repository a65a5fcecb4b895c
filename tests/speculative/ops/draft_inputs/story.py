"""The rows of the first draft pass, told from a request's tokens.

Row p of a draft layer pairs the target's state of position p with the token of position p + 1.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One row; `state` is the position whose state it is, None where that does not matter."""

    token: int
    position: int
    state: int | None


DEAD = Row(token=0, position=0, state=None)
"""Stands before the start of a prompt; nobody looks at it."""


def window(tokens: list[int], size: int) -> list[Row]:
    """The last `size` pairs before the newest token, which no state belongs to yet."""
    newest = len(tokens) - 1
    return [Row(tokens[p + 1], p, p) if p >= 0 else DEAD for p in range(newest - size, newest)]


def chunk(tokens: list[int], start: int, end: int, history: int) -> list[Row]:
    """Prompt rows [start, end), and those of `history` tokens before them once more."""
    return [Row(tokens[p + 1], p, p) for p in range(start - history, end)]


def accepted(run: list[int], width: int, start: int) -> list[Row]:
    """The emitted tokens behind the states of the step's inputs; unread columns repeat the last."""
    padded = run + [run[-1]] * (width - len(run)) if run else [0] * width
    return [Row(token, start + i, start + i) for i, token in enumerate(padded)]
