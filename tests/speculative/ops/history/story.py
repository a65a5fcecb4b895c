"""The history of (token, state) pairs, told over lists."""

from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """A token and what the target's state of it is called."""

    token: int
    state: float


def after_prompt(pool: list[Pair], chunk: list[Pair]) -> list[Pair]:
    """A prompt or a piece of one: the last pairs of what was there and what was read."""
    return (pool + chunk)[-len(pool) :]


def after_generation(pool: list[Pair], step: list[Pair], num_accepted: int) -> list[Pair]:
    """K+1 rows were read, n tokens emitted: the pairs of the tokens before the last one."""
    window = pool + step
    return window[num_accepted : num_accepted + len(pool)]
