"""Counter-based random numbers: a function of seed, token id, position and role."""

from __future__ import annotations

from enum import IntEnum

import torch

_WORD = 2**32 - 1
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Role(IntEnum):
    """What random numbers are for; different uses have independent numbers."""

    TARGET = 0  # also coupled drafts
    DRAFT = 1
    ACCEPTANCE = 2  # the number of token id 0
    RESIDUAL = 3  # also bonus tokens after the drafts


def gumbel(seed: tuple[int, int], index: int, vocab_size: int, role: Role) -> torch.Tensor:
    """Gumbel noise [V] float64 of every token id.

    Args:
        seed: low and high word.
        index: absolute position of the sampled token; P for the first after P prompt tokens.
    """
    return -torch.log(-torch.log1p(-uniform(seed, index, vocab_size, role).double()))


def uniform(seed: tuple[int, int], index: int, vocab_size: int, role: Role) -> torch.Tensor:
    """Numbers [V] float32 in (0, 1) of every token id; arguments as `gumbel`."""
    groups = torch.arange((vocab_size + 3) // 4)
    same = torch.ones_like(groups)
    counter = (groups, same * (index & _WORD), same * int(role), torch.zeros_like(groups))
    words = torch.stack(philox(counter, seed), dim=1).flatten()[:vocab_size]
    return ((words.to(torch.float32) + 0.5) * 2**-32).clamp_max(1 - 2**-24)


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox-4x32-10 of many counters: four unsigned 32-bit words each, in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = (word & _WORD for word in key)
    for _ in range(_ROUNDS):
        # int64 holds the product modulo 2**64, and both its words are right whatever its sign
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            second >> 32 & _WORD ^ c1 ^ k0,
            second & _WORD,
            first >> 32 & _WORD ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3
