"""Forced acceptance in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.ops.synthetic_acceptance.contract import DRAW_BITS, SyntheticRule
from mtp_plugin.speculative.step import SlotRows

_MASK = 2**32 - 1
# Murmur3's finalizer; as signed numbers, so that no product with 32 bits leaves int64
_FIRST, _SECOND = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_SEED_OFFSET = 0x9E3779B9


def forced_matches(
    last_positions: torch.Tensor,
    rule: SyntheticRule,
    slots: SlotRows | None,
    *,
    draft_len: int,
) -> torch.Tensor:
    """As at the door, from the positions [G] and slots of generations alone."""
    generations, device = last_positions.shape[0], last_positions.device
    numbers = torch.zeros(generations, dtype=torch.int64, device=device)
    if slots is not None:
        numbers = slots.read("number", slice(0, generations)).to(torch.int64)
    offsets = torch.arange(1, draft_len + 1, device=device)
    positions = (last_positions.to(torch.int64).unsqueeze(1) + offsets) & _MASK  # [G, K]
    of_seed = _mix((rule.seed + _SEED_OFFSET) & _MASK)
    of_request = _mix(of_seed ^ (numbers & _MASK)).unsqueeze(1)
    draws = _mix(of_request ^ positions) >> (32 - DRAW_BITS)
    stands = draws < rule.thresholds[:draft_len]
    return stands.to(torch.int32).cumprod(dim=1).sum(dim=1).to(torch.int32)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Every bit of an unsigned 32-bit number, held in int64, spread over all of them."""
    x = ((x ^ (x >> 16)) * _FIRST) & _MASK
    x = ((x ^ (x >> 13)) * _SECOND) & _MASK
    return x ^ (x >> 16)
