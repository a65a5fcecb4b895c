"""Computes the seed of a request."""

from __future__ import annotations

_MASK = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
ENGINE_SEED = 0


def seed_words(seed: int | None, number: int, engine_seed: int = ENGINE_SEED) -> tuple[int, int]:
    """Return the low and the high 32 bits of a request's 64-bit seed, as int32.

    Args:
        seed: reduced modulo 2**64; None: derive a seed from ``engine_seed`` and ``number`` with
            Philox, so that it does not depend on the batch or the rank.
        number: index of the request, in order of submission.
    """
    if seed is None:
        low, high, _, _ = philox(
            (number, 0, 0, 0), (engine_seed & _MASK, engine_seed >> 32 & _MASK)
        )
    else:
        low, high = seed & _MASK, seed >> 32 & _MASK
    return _signed(low), _signed(high)


def sample_seed(seed: int | None, sample_index: int) -> int | None:
    """Return the seed of one of the ``n`` sequences of a prompt; the first has the seed itself.

    Args:
        seed: seed of the request; None: every sequence has that of its own number.
    """
    if seed is None or sample_index == 0:
        return seed
    low, high, _, _ = philox((0, 0, sample_index << 8, 0), (seed & _MASK, seed >> 32 & _MASK))
    return low | high << 32


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Compute Philox-4x32-10: four unsigned 32-bit words from a counter and a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            second >> 32 ^ c1 ^ k0,
            second & _MASK,
            first >> 32 ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word
