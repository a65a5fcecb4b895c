"""Grids of the masking kernels: two launches around what reads the logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.ops.logits import reference
from mtp_plugin.speculative.ops.logits.kernel import hide_kernel, restore_kernel
from mtp_plugin.speculative.step import SlotRows, StepLayout


@contextmanager
def early_stops_masked(
    layout: StepLayout,
    logits: torch.Tensor,
    slots: SlotRows,
) -> Iterator[torch.Tensor]:
    """As at the door, in place: a copy would cost more than all of acceptance.

    The few masked entries are kept aside and put back on exit, bit for bit.
    """
    expect_reachable(hide_kernel, "logits", logits)
    rows, vocab = logits.shape
    if logits.stride(1) != 1 or (rows > 1 and logits.stride(0) < vocab):
        # rows that share memory cannot be masked each for itself
        with reference.early_stops_masked(layout, logits, slots) as masked:
            yield masked
        return
    ids = torch.empty(rows, MAX_STOP_IDS, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, MAX_STOP_IDS, dtype=logits.dtype, device=logits.device)
    _hide(layout, logits, slots, ids, values)
    try:
        yield logits
    finally:
        restore_kernel[(rows,)](
            # inputs
            ids,
            values,
            # outputs
            logits,
            # sizes
            logits.stride(0),
            # constants
            STOPS=MAX_STOP_IDS,
            num_warps=1,
            **pdl_options(logits.device),
        )


def _hide(
    layout: StepLayout,
    logits: torch.Tensor,
    slots: SlotRows,
    ids: torch.Tensor,
    values: torch.Tensor,
) -> None:
    positions = layout.expect_positions("min_tokens").contiguous()
    hide_kernel[(logits.shape[0],)](
        # inputs
        logits,
        positions,
        layout.context_lens.contiguous() if layout.num_contexts else positions,
        slots.table,
        slots.slot_ids,
        # outputs, beside the logits
        ids,
        values,
        # sizes
        layout.num_contexts,
        layout.num_ctx_tokens,
        logits.stride(0),
        logits.shape[1],
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        # constants
        WIDTH=layout.step_rows,
        CONTEXTS=triton.next_power_of_2(max(layout.num_contexts, 1)),
        STOPS=MAX_STOP_IDS,
        num_warps=1,
        **pdl_options(logits.device),
    )
