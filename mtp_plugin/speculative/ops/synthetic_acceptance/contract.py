"""What forced acceptance takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from mtp_plugin.errors import ConfigError, expect

DRAW_BITS = 30
"""A draw is an integer of so many bits; thresholds of certain acceptance still fit int32."""


@dataclass(frozen=True)
class SyntheticRule:
    """How often drafts stand, in fixed device buffers."""

    thresholds: torch.Tensor
    """[>= K] int32: draft i stands while its draw is below; 2**30: always. A step with fewer drafts
    reads the first K of them."""
    seed: torch.Tensor  # [1] int64, 0 to 2**32 - 1


def synthetic_rule(
    shares: Sequence[float], seed: int, device: torch.device | str | None = None
) -> SyntheticRule:
    """The rule under which a share ``shares[i]`` of steps accepts the first i+1 drafts.

    Shares 0.8, 0.6, 0.6: of steps whose first draft stands three quarters accept the second, and
    those the third too.

    Args:
        shares: K numbers from 0 to 1 that do not rise. seed: 0 to 2**32 - 1.

    Raises:
        ConfigError: shares that rise or are none; a seed of more than 32 bits.
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
        round(after / before * 2**DRAW_BITS) if before else 0
        for before, after in pairwise([1.0, *shares])
    ]
    return SyntheticRule(
        torch.tensor(thresholds, dtype=torch.int32, device=device),
        torch.tensor([seed], dtype=torch.int64, device=device),
    )
