"""Synthetic acceptance of one request, in plain Python."""

from __future__ import annotations

from collections.abc import Sequence


def accepted(last_position: int, thresholds: Sequence[int], seed: int, number: int = 0) -> int:
    """The number of drafts before the first whose random number is not below its threshold."""
    for i, threshold in enumerate(thresholds):
        if random_number(seed, last_position + 1 + i, number) >= threshold:
            return i
    return len(thresholds)


def random_number(seed: int, position: int, number: int = 0) -> int:
    """The 30-bit random number of a seed, a request's number and a position."""
    of_seed = mixed((seed + 0x9E3779B9) % 2**32)
    of_request = mixed(of_seed ^ (number % 2**32))
    return mixed(of_request ^ (position % 2**32)) // 4


def mixed(number: int) -> int:
    """Murmur3's finalizer."""
    number ^= number >> 16
    number = number * 0x85EBCA6B % 2**32
    number ^= number >> 13
    number = number * 0xC2B2AE35 % 2**32
    return number ^ (number >> 16)
