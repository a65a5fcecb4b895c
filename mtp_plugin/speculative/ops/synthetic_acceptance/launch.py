"""Grid of the forced-acceptance kernel: one launch per step."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.ops.synthetic_acceptance.contract import DRAW_BITS, SyntheticRule
from mtp_plugin.speculative.ops.synthetic_acceptance.kernel import draw_kernel
from mtp_plugin.speculative.step import SlotRows

BLOCK = 32


def forced_matches(
    last_positions: torch.Tensor,
    rule: SyntheticRule,
    slots: SlotRows | None,
    *,
    draft_len: int,
) -> torch.Tensor:
    """As at the door, from the positions [G] and slots of generations alone."""
    expect_reachable(draw_kernel, "positions", last_positions)
    generations = last_positions.shape[0]
    unused = last_positions  # a pointer that the kernel never reads
    table, slot_ids = (unused, unused) if slots is None else (slots.table, slots.slot_ids)
    forced = torch.empty(generations, dtype=torch.int32, device=last_positions.device)
    if generations == 0:
        return forced
    draw_kernel[(triton.cdiv(generations, BLOCK),)](
        # inputs
        last_positions,
        table,
        slot_ids,
        rule.thresholds.contiguous(),
        rule.seed,
        # outputs
        forced,
        # sizes
        generations,
        last_positions.stride(0),
        table.stride(0),
        slot_ids.stride(0),
        # constants
        K=draft_len,
        COLUMNS=triton.next_power_of_2(max(draft_len, 1)),
        BLOCK=BLOCK,
        SHIFT=32 - DRAW_BITS,
        HAS_NUMBERS=slots is not None,
        num_warps=1,
        **pdl_options(last_positions.device),
    )
    return forced
