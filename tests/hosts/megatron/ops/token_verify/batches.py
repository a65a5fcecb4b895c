"""Random batches of decode and prefill requests."""

from __future__ import annotations

import random

import torch

from tests.hosts.megatron.ops.token_verify.story import Decode
from tests.speculative.ops.on_device import vector


def random_decodes(dice: random.Random, count: int, num_drafts: int) -> list[Decode]:
    """Few different tokens, so that drafts repeat and stand often; some drafts are missing (-1)."""

    def decode() -> Decode:
        emitted = [dice.randrange(3) for _ in range(num_drafts + 1)]
        read = [dice.randrange(3)]
        for token in emitted[:-1]:
            read.append(dice.choice([token, token, token, dice.randrange(3), -1]))
        return Decode(read, emitted)

    return [decode() for _ in range(count)]


def flat_tokens(
    decodes: list[Decode],
    prefills: list[int],
    padding: list[int],
    dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [T] and the outputs behind them, which are one more than each prefill token."""
    read = [token for request in decodes for token in request.read]
    emitted = [token for request in decodes for token in request.emitted]
    return (
        vector(read + prefills + padding, dtype),
        vector(emitted + [token + 1 for token in prefills], dtype),
    )
