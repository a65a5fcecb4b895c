"""History and the rows of the first draft pass, in plain Python.

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
"""Before the start of a prompt; never read."""


def window(tokens: list[int], size: int) -> list[Row]:
    """The last `size` pairs before the newest token, which no state belongs to yet."""
    newest = len(tokens) - 1
    return [Row(tokens[p + 1], p, p) if p >= 0 else DEAD for p in range(newest - size, newest)]


def chunk(tokens: list[int], start: int, end: int, history: int) -> list[Row]:
    """Prompt rows [start, end), and those of `history` tokens before them once more."""
    return [Row(tokens[p + 1], p, p) for p in range(start - history, end)]


def accepted(run: list[int], width: int, start: int) -> list[Row]:
    """The output tokens after the step's inputs; unread columns repeat the last."""
    padded = run + [run[-1]] * (width - len(run)) if run else [0] * width
    return [Row(token, start + i, start + i) for i, token in enumerate(padded)]


class Pair(NamedTuple):
    """A token and what the target's state of it is called."""

    token: int
    state: float


def after_prompt(pool: list[Pair], chunk: list[Pair]) -> list[Pair]:
    """A prompt or a piece of one: the last pairs of what was there and what was read."""
    return (pool + chunk)[-len(pool) :]


def after_generation(pool: list[Pair], step: list[Pair], num_accepted: int) -> list[Pair]:
    """The step's rows were read, n tokens emitted: the pairs of the tokens before the last one."""
    window = pool + step
    return window[num_accepted : num_accepted + len(pool)]
