"""Log-probabilities of one row in plain Python, in double precision."""

from __future__ import annotations

import math
from typing import NamedTuple


class Entry(NamedTuple):
    """A token, its rank and log-probability, and the most likely tokens with theirs."""

    token: int
    rank: int
    value: float
    top: list[tuple[int, float]]


def entry_of(row: list[float], token: int, number: int) -> Entry:
    """The entry of a token that was sampled from a row of logits."""
    scores = [-math.inf if math.isnan(value) else value for value in row]
    if math.inf in scores:
        first = scores.index(math.inf)
        scores = [0.0 if column == first else -math.inf for column in range(len(scores))]
    order = sorted(range(len(scores)), key=lambda column: (-scores[column], column))
    highest = max(scores)
    norm = math.nan
    if highest > -math.inf:
        norm = math.log(math.fsum(math.exp(score - highest) for score in scores))

    def logprob(column: int) -> float:
        score = scores[column]
        return -math.inf if score == -math.inf else score - highest - norm

    top = [(column, logprob(column)) for column in order[:number]]
    if token not in order:  # outside the vocabulary
        return Entry(token, len(row) + 1, -math.inf, top)
    return Entry(token, order.index(token) + 1, logprob(token), top)
