"""The budget of thinking: which id has to follow, if one has to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Thinking(NamedTuple):
    """The ids around a model's thinking."""

    begin: int
    end: tuple[int, ...]
    """What ends it, and is written where the budget is spent."""
    end_token: int | None = None
    """An id that ends it by itself, where ``end`` is more than that."""


def forced_token(
    thinking: Thinking, budget: int, prompt: Sequence[int], output: Sequence[int]
) -> int | None:
    """The id that has to follow these tokens; None: any may.

    A budget counts tokens of the output behind the begin id, wherever that stands. When it is
    spent, the end is written, from where the text has already begun with it.
    """
    end = tuple(thinking.end)
    spent: int | None = None  # None: not thinking
    written = 0  # so many tokens of the end stand last
    is_forced = False
    for place, token in enumerate((*prompt, *output)):
        if is_forced:
            written += 1
            is_forced = written < len(end)
            spent = spent if is_forced else None
        elif spent is None:
            spent, written = (0 if token == thinking.begin else None), 0
        else:
            spent += place >= len(prompt)
            written = _end_written(end, written, token)
            if token == thinking.end_token or written == len(end):
                spent = None
        if spent is not None and place >= len(prompt) - 1:
            is_forced = spent >= budget
    return end[written] if is_forced else None


def _end_written(end: tuple[int, ...], written: int, token: int) -> int:
    """How many tokens of the end stand last, of which ``written`` stood there before ``token``."""
    seen = (*end[:written], token)
    return max(n for n in range(len(seen) + 1) if seen[len(seen) - n :] == end[:n])
