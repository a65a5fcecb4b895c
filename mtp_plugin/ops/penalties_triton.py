"""Triton implementation of `penalties`: one launch, a program per row and block (grid [N, blocks]).

1. Find the row's request, its index in the request, and the request's slot. A program of a request
   without counts and without a minimum of tokens ends here.
2. Load the bits of the ids that were seen, and compare the block with the drafts before the row.
   Of these ids alone load the logits, subtract the presence and frequency penalties, scale by the
   repetition penalty, and store them.
3. After a barrier, as a stop id may be one of them, store -inf at the stop ids of the block that
   come before ``min_tokens``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logit_rows.processing_triton import (
    COUNT_ROW,
    MIN_TOKENS,
    Pools,
    early_stops,
    load_processing,
    penalize_in_place,
)
from mtp_plugin.ops.logit_rows.rows_triton import locate_row
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.stopping import MAX_STOP_IDS

BLOCK = 2048


@triton.jit(do_not_specialize=["num_slots"])
def penalize_logits_kernel(
    # updated in place
    logits_ptr,  # [N, vocab] float32
    # inputs
    position_ptr,  # [R] integer: of the first row of each request
    draft_ptr,  # HAS_DRAFTS: [R - C, >= width - 1] integer
    table_ptr,  # [S, W] int32
    slot_ptr,  # [>= R] integer
    count_ptr,  # [P, vocab] int16, unsigned: token counts of the output
    seen_ptr,  # [P, num_words(vocab)] int32: a bit per id
    # sizes
    num_contexts,  # C
    width,  # rows per generation
    row_stride,
    vocab,
    position_stride,
    draft_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    # constants
    STOPS: tl.constexpr,  # most stop ids of a request
    BLOCK: tl.constexpr,  # ids of a program
    HAS_DRAFTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and block: penalize the tokens of the output, mask early stop ids."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    request, offset, slot_row_ptr = locate_row(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride, num_slots
    )
    first = tl.program_id(1) * BLOCK
    row_ptr = logits_ptr + row * row_stride
    if tl.load(slot_row_ptr + COUNT_ROW) >= 0:
        # neither bias nor allowed ids are read
        pools = Pools(count_ptr, seen_ptr, count_ptr, seen_ptr, vocab)
        num_before = offset if HAS_DRAFTS else 0
        request_drafts_ptr = draft_ptr + tl.maximum(request - num_contexts, 0) * draft_stride
        processing = load_processing(slot_row_ptr, pools, request_drafts_ptr, num_before)
        ids = first + tl.arange(0, BLOCK)
        penalize_in_place(row_ptr, ids, ids < vocab, processing)
    if tl.load(slot_row_ptr + MIN_TOKENS) > 0:
        tl.debug_barrier()
        position = tl.load(position_ptr + request * position_stride).to(tl.int64)
        stops, is_early = early_stops(slot_row_ptr, position + 1 + offset, vocab, STOPS)
        is_early = is_early & (stops >= first) & (stops < first + BLOCK)
        tl.store(row_ptr + tl.where(is_early, stops, 0), float("-inf"), mask=is_early)


def penalize_logits_triton(logits: torch.Tensor, rows: LogitRows, slots: SlotRows) -> None:
    """One launch, one program per row and block."""
    pools, drafts = slots.pools, rows.drafts
    if pools is None:
        raise TensorContractError("penalize_logits: expected slots with pools, got None")
    expect_reachable(penalize_logits_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    penalize_logits_kernel[(num_rows, triton.cdiv(vocab, BLOCK))](
        # updated in place
        logits,
        # inputs
        rows.positions,
        slots.slot_ids if drafts is None else drafts,  # never read if it is not there
        slots.table,
        slots.slot_ids,
        pools.counts,
        pools.seen,
        # sizes
        rows.num_contexts,
        rows.width,
        logits.stride(0),
        vocab,
        rows.positions.stride(0),
        0 if drafts is None else drafts.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        slots.table.shape[0],
        # constants
        STOPS=MAX_STOP_IDS,
        BLOCK=BLOCK,
        HAS_DRAFTS=drafts is not None,
        **pdl_options(logits.device),
    )
