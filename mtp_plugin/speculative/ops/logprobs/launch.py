"""Log-probabilities on the device: a launch that finishes each token, behind a scan of all rows
where no draw has made one."""

from __future__ import annotations

from typing import Any

import torch
import triton

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.ops.logprobs.contract import LogProbs
from mtp_plugin.speculative.ops.logprobs.kernel import finish_kernel, scan_kernel
from mtp_plugin.speculative.row_sums import ChunkLayout, RowSums
from mtp_plugin.speculative.step import SlotRows, StepLayout

PARTS = 4
"""Pieces that a program of the scan reads where there are many rows: programs that find nothing to
do take time too."""
SOME_ROWS = 64
"""So many rows or fewer leave the device room for a program per piece."""
TILE = 4096
"""Ids that a program of the finish reads at once."""
FINISH_WARPS = 8


def logprobs(
    layout: StepLayout,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    asked: SlotRows | int,
    sums: RowSums | None,
) -> LogProbs:
    """As at the door."""
    expect_reachable(scan_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    device = logits.device
    result = LogProbs.unwritten(layout.num_requests, layout.step_rows, device)
    if num_rows == 0:
        return result
    chunks = ChunkLayout.of(logits)
    num_pieces, num_chunks = chunks.num_pieces(vocab), chunks.num_chunks(vocab)
    num_cells = layout.num_requests * layout.step_rows
    slots = asked if isinstance(asked, SlotRows) else None
    inputs = (
        logits,
        counts,
        counts if slots is None else slots.table,  # what is not there is never read
        counts if slots is None else slots.slot_ids,
    )
    sizes = (
        layout.num_contexts,
        layout.step_rows,
        vocab,
        num_pieces,
        0 if isinstance(asked, SlotRows) else asked,
        logits.stride(0),
        counts.stride(0),
        0 if slots is None else slots.table.stride(0),
        0 if slots is None else slots.slot_ids.stride(0),
    )
    constants: dict[str, Any] = {
        "LAYOUT": chunks,
        "HAS_SLOTS": slots is not None,
        **pdl_options(device),
    }
    if sums is None:
        parts = 1 if num_rows <= SOME_ROWS else PARTS
        tops, masses = torch.empty(2, num_rows, num_chunks, dtype=torch.float32, device=device)
        scan_kernel[(num_rows, -(-num_pieces // parts))](
            *inputs, tops, masses, *sizes, **constants, PARTS=parts, num_warps=chunks.warps
        )
    else:
        tops, masses = sums.tops, sums.masses
    finish_kernel[(num_cells,)](
        *inputs,
        tokens,
        tops,
        masses,
        # outputs
        result.entries,
        # written and read there
        torch.empty(num_cells, num_chunks, dtype=torch.int32, device=device),
        *sizes,
        *tokens.stride(),
        **constants,
        ALL_CHUNKS=triton.next_power_of_2(num_chunks),
        TILE=TILE // chunks.chunk_size,
        HAS_SUMS=sums is not None,
        num_warps=FINISH_WARPS,
    )
    return result
