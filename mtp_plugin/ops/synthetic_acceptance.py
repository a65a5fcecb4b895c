"""Synthetic acceptance: accept drafts at random at given rates, whatever the target says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import INTEGERS, AtLeast, expect_tensor
from mtp_plugin.ops.step import SlotRows, check_slots

RANDOM_BITS = 30
"""Bits of a random number; the threshold of certain acceptance, 2**30, still fits int32."""
_MASK = 2**32 - 1
# Murmur3's finalizer; signed, so that no product with 32 bits leaves int64
_FIRST, _SECOND = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
_SEED_OFFSET = 0x9E3779B9


@dataclass(frozen=True)
class SyntheticRule:
    """Acceptance thresholds and seed, in fixed device buffers."""

    thresholds: torch.Tensor
    """[>= K] int32: draft i is accepted if its random number is below; 2**30: always. A step with
    fewer drafts reads the first K."""
    seed: torch.Tensor  # [1] int64, 0 to 2**32 - 1


def synthetic_rule(
    shares: Sequence[float], seed: int, device: torch.device | str | None = None
) -> SyntheticRule:
    """Return the rule by which a share ``shares[i]`` of steps accepts the first i+1 drafts.

    With shares 0.8, 0.6, 0.6, three quarters of the steps that accept the first draft accept the
    second, and all of those accept the third.

    Args:
        shares: K numbers from 0 to 1, none larger than the one before.
        seed: 0 to 2**32 - 1.

    Raises:
        ConfigError: other shares, or another seed.
    """
    expect(
        all(0 <= after <= before <= 1 for before, after in pairwise([1.0, *shares])),
        ConfigError,
        f"synthetic acceptance: expected shares from 0 to 1 that do not rise, got {list(shares)}",
    )
    expect(
        0 <= seed < 2**32,
        ConfigError,
        f"synthetic acceptance: expected a seed from 0 to 2**32 - 1, got {seed}",
    )
    thresholds = [
        round(after / before * 2**RANDOM_BITS) if before else 0
        for before, after in pairwise([1.0, *shares])
    ]
    return SyntheticRule(
        torch.tensor(thresholds, dtype=torch.int32, device=device),
        torch.tensor([seed], dtype=torch.int64, device=device),
    )


def synthetic_acceptance(
    last_positions: torch.Tensor,
    draft_len: int,
    rule: SyntheticRule,
    slots: SlotRows | None = None,
    *,
    backend: Backend,
) -> torch.Tensor:
    """Return how many drafts of every request are accepted [G] int32, 0..K.

    The random number of a draft depends on the seed, the request's number and the token's absolute
    position alone, so that no other request, step or rank changes it. If the random numbers accept
    positions 11, 12 and 14, the last position is 10 and K = 4, two drafts are accepted.

    Args:
        last_positions: [G] integer, any stride: of each request's last token, which precedes its
            first draft.
        draft_len: K.
        rule: thresholds of at least K drafts.
        slots: of the requests; reads ``number``. None: 0 for all requests, which then decide alike
            at equal positions.

    Raises:
        TensorContractError: another shape, dtype or device.
    """
    expect_tensor("last_positions", last_positions, dtype=INTEGERS, shape=("G",))
    device = last_positions.device
    expect_tensor(
        "thresholds",
        rule.thresholds,
        dtype=torch.int32,
        shape=(AtLeast(draft_len),),
        device=device,
    )
    expect_tensor("seed", rule.seed, dtype=torch.int64, shape=(1,), device=device)
    if slots is not None:
        check_slots(slots, last_positions.shape[0], device)
    return backend.dispatch(synthetic_acceptance_reference)(last_positions, rule, slots, draft_len)


def synthetic_acceptance_reference(
    last_positions: torch.Tensor, rule: SyntheticRule, slots: SlotRows | None, draft_len: int
) -> torch.Tensor:
    generations, device = last_positions.shape[0], last_positions.device
    numbers = torch.zeros(generations, dtype=torch.int64, device=device)
    if slots is not None:
        numbers = slots.read("number", slice(0, generations)).to(torch.int64)
    offsets = torch.arange(1, draft_len + 1, device=device)
    positions = (last_positions.to(torch.int64).unsqueeze(1) + offsets) & _MASK  # [G, K]
    of_seed = _mix((rule.seed + _SEED_OFFSET) & _MASK)
    of_request = _mix(of_seed ^ (numbers & _MASK)).unsqueeze(1)
    random_numbers = _mix(of_request ^ positions) >> (32 - RANDOM_BITS)
    accepted = random_numbers < rule.thresholds[:draft_len]
    return accepted.to(torch.int32).cumprod(dim=1).sum(dim=1).to(torch.int32)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Hash an unsigned 32-bit number, held in int64, so that every bit changes about half."""
    x = ((x ^ (x >> 16)) * _FIRST) & _MASK
    x = ((x ^ (x >> 13)) * _SECOND) & _MASK
    return x ^ (x >> 16)
