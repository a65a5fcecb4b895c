"""Forced acceptance in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.ops.synthetic_acceptance.contract import (
    DRAW_BITS,
    SyntheticRule,
    check_draws,
)

_MASK = 2**32 - 1
# Murmur3's finalizer; as signed numbers, so that no product with 32 bits leaves int64
_FIRST, _SECOND = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_SEED_OFFSET = 0x9E3779B9


def forced_matches(
    last_positions: torch.Tensor,
    rule: SyntheticRule,
    request_numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    """How many drafts of every generation the draws accept [G] int32, 0..K.

    One draw per request and absolute token position, from the seed, the request's number and the
    position alone: no other request, step or rank moves it, and a position that a run did not reach
    keeps its draw for the next step. With draws that accept positions 11, 12 and 14: last position
    10 and K = 4 give 2.

    Args:
        last_positions: [G] integer, any stride: position of each request's last emitted token, the
            one in front of its first draft. rule: the thresholds of the K drafts and the seed.
        request_numbers: [G] integer, any stride: tells requests apart. None: 0 for all, which then
            decide alike at equal positions.

    Raises:
        TensorContractError: positions or numbers that are no vector of integers, or not as many.
    """
    generations = check_draws(last_positions, request_numbers)
    device = last_positions.device
    if request_numbers is None:
        request_numbers = torch.zeros(generations, dtype=torch.int64, device=device)
    max_draft_len = rule.thresholds.shape[0]
    offsets = torch.arange(1, max_draft_len + 1, device=device)
    positions = (last_positions.to(torch.int64).unsqueeze(1) + offsets) & _MASK  # [G, K]
    of_seed = _mix((rule.seed + _SEED_OFFSET) & _MASK)
    of_request = _mix(of_seed ^ (request_numbers.to(torch.int64) & _MASK)).unsqueeze(1)
    draws = _mix(of_request ^ positions) >> (32 - DRAW_BITS)
    stands = draws < rule.thresholds
    return stands.to(torch.int32).cumprod(dim=1).sum(dim=1).to(torch.int32)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Every bit of an unsigned 32-bit number, held in int64, spread over all of them."""
    x = ((x ^ (x >> 16)) * _FIRST) & _MASK
    x = ((x ^ (x >> 13)) * _SECOND) & _MASK
    return x ^ (x >> 16)
