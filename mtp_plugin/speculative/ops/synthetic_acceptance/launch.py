"""Grid of the forced-acceptance kernel: one launch per step."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.ops.synthetic_acceptance.contract import DRAW_BITS, SyntheticRule
from mtp_plugin.speculative.ops.synthetic_acceptance.kernel import draw_kernel

BLOCK = 32


def forced_matches(
    last_positions: torch.Tensor,
    rule: SyntheticRule,
    request_numbers: torch.Tensor | None,
    *,
    draft_len: int,
) -> torch.Tensor:
    """As at the door, from the positions and numbers of generations alone, both [G]."""
    expect_reachable(draw_kernel, "positions", last_positions)
    generations = last_positions.shape[0]
    numbers = last_positions if request_numbers is None else request_numbers
    forced = torch.empty(generations, dtype=torch.int32, device=last_positions.device)
    if generations == 0:
        return forced
    draw_kernel[(triton.cdiv(generations, BLOCK),)](
        # inputs
        last_positions,
        numbers,
        rule.thresholds.contiguous(),
        rule.seed,
        # outputs
        forced,
        # sizes
        generations,
        last_positions.stride(0),
        numbers.stride(0),
        # constants
        K=draft_len,
        COLUMNS=triton.next_power_of_2(max(draft_len, 1)),
        BLOCK=BLOCK,
        SHIFT=32 - DRAW_BITS,
        HAS_NUMBERS=request_numbers is not None,
        num_warps=1,
        **pdl_options(last_positions.device),
    )
    return forced
