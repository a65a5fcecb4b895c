"""Grid of the forced-acceptance kernel: one launch per step."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.kernels.programmatic_launch import early_launch, expect_reachable
from mtp_plugin.speculative.ops.synthetic_acceptance.contract import (
    COIN_BITS,
    SyntheticRule,
    check_positions,
)
from mtp_plugin.speculative.ops.synthetic_acceptance.kernel import coin_kernel

BLOCK = 32


def forced_matches(last_positions: torch.Tensor, rule: SyntheticRule) -> torch.Tensor:
    """As the reference."""
    generations = check_positions(last_positions)
    k = int(rule.thresholds.shape[0])
    forced = torch.empty(generations, dtype=torch.int32, device=last_positions.device)
    expect_reachable(coin_kernel, "last_positions", last_positions)
    if generations == 0:
        return forced
    coin_kernel[(triton.cdiv(generations, BLOCK),)](
        # inputs
        last_positions,
        rule.thresholds,
        rule.seed,
        # outputs
        forced,
        # sizes
        generations,
        last_positions.stride(0),
        # constants
        K=k,
        COLUMNS=triton.next_power_of_2(max(k, 1)),
        BLOCK=BLOCK,
        SHIFT=32 - COIN_BITS,
        num_warps=1,
        **early_launch(last_positions.device),
    )
    return forced
