"""Likelihood of counts, and a second implementation of probabilities, in plain Python."""

from __future__ import annotations

import math

import torch

LEAST_EXPECTED = 8
"""Cells of which fewer are expected are counted together."""


def tail(counts: list[int], expected: list[float]) -> float:
    """Pearson's chi-square: how often counts lie as far from ``expected`` or farther; 0 where what
    cannot be was counted."""
    if any(count and not share for count, share in zip(counts, expected, strict=True)):
        return 0.0
    pairs = [pair for pair in zip(counts, expected, strict=True) if pair[1] > 0]
    cells = [pair for pair in pairs if pair[1] >= LEAST_EXPECTED]
    rare = [pair for pair in pairs if pair[1] < LEAST_EXPECTED]
    if rare:
        cells.append((sum(count for count, _ in rare), sum(share for _, share in rare)))
    if len(cells) < 2:
        return 1.0
    square = sum((count - share) ** 2 / share for count, share in cells)
    half = torch.tensor([(len(cells) - 1) / 2, square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def probabilities(
    row: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Probability of every id of a row after temperature, top-k, top-p and min-p, in that order."""
    highest = max(row)
    weights = [math.exp((x - highest) / temperature) for x in row]
    order = sorted(range(len(row)), key=lambda token: (-weights[token], token))
    order = order[: top_k or len(row)]
    mass = sum(weights[token] for token in order)
    kept: list[int] = []
    for token in order:
        if kept and sum(weights[before] for before in kept) >= top_p * mass:
            break
        kept.append(token)
    kept = [token for token in kept if weights[token] >= min_p]
    mass = sum(weights[token] for token in kept)
    return [weights[token] / mass if token in kept else 0.0 for token in range(len(row))]
