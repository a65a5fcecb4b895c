"""Triton implementation of `logit_mask`: one launch masks in place, one restores.

Both run one program of one warp per row of logits (grid [N]) and touch at most SAVED entries of it.

`mask_logits_kernel`, on entry:

1. Find the row's request, its index in the request, and the request's slot.
2. Determine the stop ids that come before ``min_tokens``, and the last tokens of the bad words
   whose other tokens precede the row (recent tokens, then the row's earlier drafts). If masking
   both would leave no allowed id, stop ids are not masked.
3. Load the values of these entries, then, after a barrier, overwrite them with -inf: an id may be
   listed twice, and each of its lanes must read the value from before.
4. Store ids and values in the row's list; lanes that mask nothing hold id -1.

`restore_logits_kernel`, on exit: write the listed values back. An id that is listed twice is
written twice with one value.

Rows are independent and must not overlap (others use the torch reference). An absent draft (-1)
completes no bad word: the tokens of a word are ids >= 0, with -1 only before the first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.logit_mask import mask_disallowed_tokens_reference
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logit_rows.processing_triton import (
    ALLOWED_ROW,
    early_stops,
    leaves_some,
    num_words,
    word_ends,
)
from mtp_plugin.ops.logit_rows.rows_triton import locate_row
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from mtp_plugin.requests.stopping import MAX_STOP_IDS

SAVED = MAX_STOP_IDS + MAX_BAD_WORDS
"""Maximum number of masked entries per row, whose values are saved."""


@triton.jit(do_not_specialize=["num_slots"])
def mask_logits_kernel(
    # updated in place
    logits_ptr,  # [N, vocab] floating
    # inputs
    position_ptr,  # [R] integer: of the first row of each request
    draft_ptr,  # HAS_DRAFTS: [R - C, >= width - 1] integer
    table_ptr,  # [S, W] int32
    slot_ptr,  # [>= R] integer
    allowed_ptr,  # HAS_POOLS: [P, num_words(pool_vocab) + 1] int32: allowed ids, their number
    words_ptr,  # HAS_POOLS: [P, WORDS, LENGTH] int32: bad words, right-aligned, -1 before
    # outputs
    masked_id_ptr,  # [N, STOPS + WORDS] int32: masked ids, -1: none
    masked_value_ptr,  # [N, STOPS + WORDS], as the logits: their values
    # sizes
    num_contexts,  # C
    width,  # rows per generation
    row_stride,
    vocab,
    pool_vocab,
    position_stride,
    draft_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    # constants
    STOPS: tl.constexpr,  # most stop ids of a request
    WORDS: tl.constexpr,  # most bad words of a request
    LENGTH: tl.constexpr,  # longest bad word
    HAS_DRAFTS: tl.constexpr,
    HAS_POOLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row of logits: save and mask early stop ids and the ends of bad words."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    request, offset, slot = locate_row(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride, num_slots
    )
    position = tl.load(position_ptr + request * position_stride).to(tl.int64)
    stop_lanes = tl.arange(0, STOPS)
    stops, is_masked = early_stops(slot, position + 1 + offset, vocab, STOPS)
    first_saved = row * (STOPS + WORDS)
    row_ptr = logits_ptr + row * row_stride

    if HAS_POOLS:
        word_lanes = tl.arange(0, WORDS)
        request_drafts_ptr = draft_ptr + tl.maximum(request - num_contexts, 0) * draft_stride
        ends = word_ends(slot, offset, words_ptr, request_drafts_ptr, WORDS, LENGTH, HAS_DRAFTS)
        allowed_row = tl.load(slot + ALLOWED_ROW).to(tl.int64)
        if allowed_row >= 0:
            # stop ids are masked only if that leaves some allowed id
            row_allowed_ptr = allowed_ptr + allowed_row * (num_words(pool_vocab) + 1)
            is_masked = is_masked & leaves_some(
                row_allowed_ptr, stops, is_masked, ends, pool_vocab, STOPS, WORDS
            )
        is_end = (ends >= 0) & (ends < vocab)
        end_ptrs = row_ptr + tl.where(is_end, ends, 0)
        end_values = tl.load(end_ptrs, mask=is_end, other=0.0)
        tl.store(masked_id_ptr + first_saved + STOPS + word_lanes, tl.where(is_end, ends, -1))
        tl.store(masked_value_ptr + first_saved + STOPS + word_lanes, end_values)
    else:
        word_lanes = tl.arange(0, WORDS)
        tl.store(masked_id_ptr + first_saved + STOPS + word_lanes, tl.full([WORDS], -1, tl.int32))
    stop_ptrs = row_ptr + tl.where(is_masked, stops, 0)
    values = tl.load(stop_ptrs, mask=is_masked, other=0.0)
    # an id may occur twice: all must be read before one is masked
    tl.debug_barrier()
    tl.store(stop_ptrs, float("-inf"), mask=is_masked)
    if HAS_POOLS:
        tl.store(end_ptrs, float("-inf"), mask=is_end)
    tl.store(masked_id_ptr + first_saved + stop_lanes, tl.where(is_masked, stops, -1))
    tl.store(masked_value_ptr + first_saved + stop_lanes, values)


@triton.jit
def restore_logits_kernel(
    # inputs
    masked_id_ptr,  # [N, SAVED] int32: ids, -1: none
    masked_value_ptr,  # [N, SAVED], as the logits: their values
    # updated in place
    logits_ptr,  # [N, vocab] floating
    # sizes
    row_stride,
    # constants
    SAVED: tl.constexpr,
    SIZE: tl.constexpr,  # a power of two >= SAVED
    PDL: tl.constexpr,
):
    """One program per row of logits: write the saved values back."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, SIZE)
    inside = lanes < SAVED
    entries = row * SAVED + lanes
    ids = tl.load(masked_id_ptr + entries, mask=inside, other=-1)
    is_masked = ids >= 0
    values = tl.load(masked_value_ptr + entries, mask=is_masked, other=0.0)
    tl.store(logits_ptr + row * row_stride + tl.where(is_masked, ids, 0), values, mask=is_masked)


def mask_disallowed_tokens_triton(
    logits: torch.Tensor, rows: LogitRows, slots: SlotRows
) -> AbstractContextManager[torch.Tensor]:
    """Mask in place, since a copy costs more than all of acceptance."""
    expect_reachable(mask_logits_kernel, "logits", logits)
    if logits.stride(1) != 1 or (logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]):
        # rows that share memory cannot be masked one by one
        return mask_disallowed_tokens_reference(logits, rows, slots)
    return _masked_in_place(logits, rows, slots)


@contextmanager
def _masked_in_place(
    logits: torch.Tensor, rows: LogitRows, slots: SlotRows
) -> Iterator[torch.Tensor]:
    num_rows, vocab = logits.shape
    pools, drafts = slots.pools, rows.drafts
    ids = torch.empty(num_rows, SAVED, dtype=torch.int32, device=logits.device)
    values = torch.empty(num_rows, SAVED, dtype=logits.dtype, device=logits.device)
    mask_logits_kernel[(num_rows,)](
        # updated in place
        logits,
        # inputs
        rows.positions,
        ids if drafts is None else drafts,  # never read if it is not there
        slots.table,
        slots.slot_ids,
        ids if pools is None else pools.allowed,
        ids if pools is None else pools.words,
        # outputs
        ids,
        values,
        # sizes
        rows.num_contexts,
        rows.width,
        logits.stride(0),
        vocab,
        0 if pools is None else pools.vocab_size,
        rows.positions.stride(0),
        0 if drafts is None else drafts.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        slots.table.shape[0],
        # constants
        STOPS=MAX_STOP_IDS,
        WORDS=MAX_BAD_WORDS,
        LENGTH=MAX_BAD_WORD_LEN,
        HAS_DRAFTS=drafts is not None,
        HAS_POOLS=pools is not None,
        num_warps=1,
        **pdl_options(logits.device),
    )
    try:
        yield logits
    finally:
        restore_logits_kernel[(num_rows,)](
            # inputs
            ids,
            values,
            # updated in place
            logits,
            # sizes
            logits.stride(0),
            # constants
            SAVED=SAVED,
            SIZE=triton.next_power_of_2(SAVED),
            num_warps=1,
            **pdl_options(logits.device),
        )
