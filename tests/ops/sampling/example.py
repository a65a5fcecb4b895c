"""Sampling in plain Python, over lists of numbers.

Logits, quotients and uniform numbers are rounded to float32, as ties are decided by them; sums and
logarithms are exact to double precision.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from mtp_plugin.requests.columns import TopPMass


class Options(NamedTuple):
    """Sampling options of a request."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    top_p_mass: int = TopPMass.TOP_K


def draw(
    row: list[float], options: Options, index: int, role: int, ids: list[int] | None = None
) -> int:
    """Sample a token from a row of logits; -1 for a row without finite value or +inf."""
    ids = list(range(len(row))) if ids is None else ids
    values = [-math.inf if math.isnan(value) else value for value in row]
    highest = max(values)
    if highest == -math.inf:
        return -1
    if options.temperature < rounded(1e-5) or highest == math.inf:
        return ids[values.index(highest)]
    scores = [rounded(rounded(value - highest) / options.temperature) for value in values]
    noisy = {
        column: scores[column] + gumbel(word(options.seed, ids[column], index, role))
        for column in kept(scores, options)
    }
    best = max(noisy.values())
    return ids[min(column for column, score in noisy.items() if score == best)]


def kept(scores: list[float], options: Options) -> list[int]:
    """Columns that top-k, then top-p, then min-p keep; the highest first."""
    order = sorted(range(len(scores)), key=lambda column: (-scores[column], column))
    everything = math.fsum(map(math.exp, scores))
    if options.top_k > 0:
        order = order[: options.top_k]
    weights = [math.exp(scores[column]) for column in order]
    if options.top_p < 1:
        mass = math.fsum(weights)
        if options.top_p_mass == TopPMass.ALL:
            mass = everything
        elif options.top_p_mass == TopPMass.MIN_P:
            mass = math.fsum(weight for weight in weights if weight >= options.min_p)
        need, ahead, number = options.top_p * mass, 0.0, 0
        while number < len(order) and (number == 0 or ahead < need):
            ahead += weights[number]
            number += 1
        order = order[:number]
    return [
        column for column, weight in zip(order, weights, strict=False) if weight >= options.min_p
    ]


def word(seed: int, token: int, index: int, role: int) -> int:
    """The random word of a token at an index."""
    counter = (token // 4, index % 2**32, role, 0)
    return philox(counter, (seed % 2**32, seed >> 32))[token % 4]


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32-10 as Random123 defines it."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        product, other = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            (other >> 32) ^ b ^ k,
            other % 2**32,
            (product >> 32) ^ d ^ m,
            product % 2**32,
        )
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


def uniform(number: int) -> float:
    """A number in (0, 1) of a word."""
    return min(rounded(rounded(float(number)) + 0.5) * 2.0**-32, 1 - 2.0**-24)


def gumbel(number: int) -> float:
    """The noise of a word."""
    return -math.log(-math.log1p(-uniform(number)))


def rounded(value: float) -> float:
    """To float32."""
    try:
        (single,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(single)
