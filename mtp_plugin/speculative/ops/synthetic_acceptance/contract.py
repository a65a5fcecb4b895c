"""What forced acceptance takes, and the checks at its door."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from mtp_plugin.errors import ConfigError, TensorContractError, expect

DRAW_BITS = 30
"""A draw is an integer of so many bits; thresholds of certain acceptance still fit int32."""


@dataclass(frozen=True)
class SyntheticRule:
    """How often drafts stand, in fixed device buffers."""

    thresholds: torch.Tensor  # [K] int32: draft i stands while its draw is below; 2**30: always
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


def check_draws(last_positions: torch.Tensor, request_numbers: torch.Tensor | None) -> int:
    """Check the tensors of a call and return G.

    Raises:
        TensorContractError: naming the tensor, the expected shape and the one that came.
    """
    _expect_integers("last_positions", last_positions, "[G]")
    size = int(last_positions.shape[0])
    if request_numbers is not None:
        _expect_integers("request_numbers", request_numbers, f"[{size}]")
        expect(
            request_numbers.shape[0] == size,
            TensorContractError,
            f"request_numbers: expected integers [{size}], got {list(request_numbers.shape)}",
        )
    return size


def _expect_integers(name: str, tensor: torch.Tensor, shape: str) -> None:
    integral = not tensor.is_floating_point() and tensor.dtype != torch.bool
    expect(
        tensor.dim() == 1 and integral,
        TensorContractError,
        f"{name}: expected integers {shape}, got {tensor.dtype} {list(tensor.shape)}",
    )
