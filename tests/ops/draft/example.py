"""What happens between two draft passes, in plain Python."""

from __future__ import annotations

import math
from typing import TypeVar

Item = TypeVar("Item")


def proposal(row: list[float]) -> int:
    """The lowest id of the highest value; 0 if there is none, since a draft must be a token."""
    values = [-math.inf if math.isnan(value) else value for value in row]
    return values.index(max(values))


def proposal_among(ids: list[int], row: list[float]) -> int:
    """As `proposal` of a row of the whole vocabulary, if only ``ids`` may be drafted."""
    usable = {token: -math.inf if math.isnan(row[token]) else row[token] for token in ids}
    return min(token for token in ids if usable[token] == max(usable.values()))


def shift_windows(sequences: list[list[Item]], new: list[Item]) -> list[list[Item]]:
    """Every sequence loses its first item and gets a new last one."""
    return [[*items[1:], item] for items, item in zip(sequences, new, strict=True)]
