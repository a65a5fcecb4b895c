"""What happens between two draft passes, in plain Python."""

from __future__ import annotations

import math


def proposal(row: list[float]) -> int:
    """The lowest id of the highest value; 0 if there is none, since a draft must be a token."""
    values = [-math.inf if math.isnan(value) else value for value in row]
    return values.index(max(values))


def proposal_among(ids: list[int], row: list[float]) -> int:
    """As `proposal` of a row of the whole vocabulary, if only ``ids`` may be drafted."""
    usable = {token: -math.inf if math.isnan(row[token]) else row[token] for token in ids}
    return min(token for token in ids if usable[token] == max(usable.values()))
