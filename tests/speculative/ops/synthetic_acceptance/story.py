"""Draws that accept drafts, told over numbers."""

from __future__ import annotations

from collections.abc import Sequence


def forced(last_position: int, thresholds: Sequence[int], seed: int, number: int = 0) -> int:
    """Drafts stand behind the last position until one's draw is not below its threshold."""
    for i, threshold in enumerate(thresholds):
        if draw(seed, last_position + 1 + i, number) >= threshold:
            return i
    return len(thresholds)


def draw(seed: int, position: int, number: int = 0) -> int:
    """30 bits that belong to a seed, a request's number and a position."""
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
