"""The thinking budget: which token is forced, if any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Thinking(NamedTuple):
    """The token ids of a model's thinking tags."""

    begin: int
    end: tuple[int, ...]
    """The end-of-thinking tag, forced when the budget is spent."""
    end_token: int | None = None
    """A single token that also ends thinking, if ``end`` has more tokens."""


def forced_token(
    thinking: Thinking, budget: int, prompt: Sequence[int], output: Sequence[int]
) -> int | None:
    """Return the token that must follow, or None if any may.

    The budget limits the output tokens after the begin token, which may be in the prompt. When it
    is spent, the end tag is forced, starting after the part of it that was already generated.
    """
    end = tuple(thinking.end)
    spent: int | None = None  # None: not thinking
    written = 0  # number of end-tag tokens at the end of the sequence
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
    """Number of end-tag tokens at the end, given ``written`` of them before ``token``."""
    seen = (*end[:written], token)
    return max(n for n in range(len(seen) + 1) if seen[len(seen) - n :] == end[:n])
