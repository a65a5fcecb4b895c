"""Log-probabilities on the device: a scan of all rows, and a launch that finishes each token."""

from __future__ import annotations

from typing import Any

import torch
import triton

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.ops.logprobs.contract import LogProbs
from mtp_plugin.speculative.ops.logprobs.kernel import finish_kernel, scan_kernel
from mtp_plugin.speculative.step import SlotRows, StepLayout

CHUNK = 64
"""Ids of a chunk."""
CHUNKS = 64
"""Chunks that a program of the scan reads at once."""
STEPS = 4
"""So many times, where there are many rows: programs that find nothing to do take time too."""
SOME_ROWS = 64
"""So many rows or fewer leave the device room for a program per piece."""
SCAN_WARPS = 4
FINISH_WARPS = 8


def logprobs(
    layout: StepLayout,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    asked: SlotRows | int,
) -> LogProbs:
    """As at the door."""
    expect_reachable(scan_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    device = logits.device
    result = LogProbs.unwritten(layout.num_requests, layout.step_rows, device)
    if num_rows == 0:
        return result
    steps = 1 if num_rows <= SOME_ROWS else STEPS
    num_pieces = -(-vocab // (CHUNK * CHUNKS * steps))
    num_chunks = num_pieces * steps * CHUNKS
    tops, masses = torch.empty(2, num_rows, num_chunks, dtype=torch.float32, device=device)
    ahead = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    slots = asked if isinstance(asked, SlotRows) else None
    inputs = (
        logits,
        tokens,
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
        *tokens.stride(),
        counts.stride(0),
        0 if slots is None else slots.table.stride(0),
        0 if slots is None else slots.slot_ids.stride(0),
    )
    constants: dict[str, Any] = {
        "CHUNK": CHUNK,
        "CHUNKS": CHUNKS,
        "STEPS": steps,
        "HAS_SLOTS": slots is not None,
        **pdl_options(device),
    }
    scan_kernel[(num_rows * num_pieces,)](
        *inputs, tops, masses, ahead, *sizes, **constants, num_warps=SCAN_WARPS
    )
    finish_kernel[(layout.num_requests * layout.step_rows,)](
        *inputs,
        tops,
        masses,
        ahead,
        # outputs
        result.entries,
        *sizes,
        **constants,
        ALL_CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=FINISH_WARPS,
    )
    return result
