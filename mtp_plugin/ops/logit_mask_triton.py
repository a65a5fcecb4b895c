"""Triton implementation of `logit_mask`: one launch masks, one restores."""

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


@triton.jit
def mask_logits_kernel(
    # inputs
    logits_ptr,
    position_ptr,
    draft_ptr,
    table_ptr,
    slot_ptr,
    allowed_ptr,
    words_ptr,
    # outputs, in addition to the logits
    hidden_id_ptr,
    hidden_value_ptr,
    # sizes
    num_contexts,
    width,
    row_stride,
    vocab,
    pool_vocab,
    position_stride,
    draft_stride,
    table_stride,
    slot_stride,
    # constants
    STOPS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_POOLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row of logits: save and mask early stop ids and the ends of bad words."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    request, offset, slot = locate_row(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride
    )
    position = tl.load(position_ptr + request * position_stride).to(tl.int64)
    columns = tl.arange(0, STOPS)
    stops, hidden = early_stops(slot, position + 1 + offset, vocab, STOPS)
    kept = row * (STOPS + WORDS)
    row_ptr = logits_ptr + row * row_stride

    if HAS_POOLS:
        lanes = tl.arange(0, WORDS)
        drafts = draft_ptr + tl.maximum(request - num_contexts, 0) * draft_stride
        ends = word_ends(slot, offset, words_ptr, drafts, WORDS, LENGTH, HAS_DRAFTS)
        allowed_row = tl.load(slot + ALLOWED_ROW).to(tl.int64)
        if allowed_row >= 0:
            # stop ids are masked only if that leaves some allowed id
            row_allowed = allowed_ptr + allowed_row * (num_words(pool_vocab) + 1)
            hidden = hidden & leaves_some(
                row_allowed, stops, hidden, ends, pool_vocab, STOPS, WORDS
            )
        is_end = (ends >= 0) & (ends < vocab)
        end_entries = row_ptr + tl.where(is_end, ends, 0)
        end_values = tl.load(end_entries, mask=is_end, other=0.0)
        tl.store(hidden_id_ptr + kept + STOPS + lanes, tl.where(is_end, ends, -1))
        tl.store(hidden_value_ptr + kept + STOPS + lanes, end_values)
    else:
        lanes = tl.arange(0, WORDS)
        tl.store(hidden_id_ptr + kept + STOPS + lanes, tl.full([WORDS], -1, tl.int32))
    entries = row_ptr + tl.where(hidden, stops, 0)
    values = tl.load(entries, mask=hidden, other=0.0)
    # an id may occur twice: all must be read before one is masked
    tl.debug_barrier()
    tl.store(entries, float("-inf"), mask=hidden)
    if HAS_POOLS:
        tl.store(end_entries, float("-inf"), mask=is_end)
    tl.store(hidden_id_ptr + kept + columns, tl.where(hidden, stops, -1))
    tl.store(hidden_value_ptr + kept + columns, values)


@triton.jit
def restore_logits_kernel(
    # inputs
    hidden_id_ptr,
    hidden_value_ptr,
    # outputs
    logits_ptr,
    # sizes
    row_stride,
    # constants
    SAVED: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row of logits: write the saved values back."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    inside = columns < SAVED
    kept = row * SAVED + columns
    ids = tl.load(hidden_id_ptr + kept, mask=inside, other=-1)
    hidden = ids >= 0
    values = tl.load(hidden_value_ptr + kept, mask=hidden, other=0.0)
    tl.store(logits_ptr + row * row_stride + tl.where(hidden, ids, 0), values, mask=hidden)


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
        # inputs
        logits,
        rows.positions,
        ids if drafts is None else drafts,  # never read if it is not there
        slots.table,
        slots.slot_ids,
        ids if pools is None else pools.allowed,
        ids if pools is None else pools.words,
        # outputs, in addition to the logits
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
            # outputs
            logits,
            # sizes
            logits.stride(0),
            # constants
            SAVED=SAVED,
            SIZE=triton.next_power_of_2(SAVED),
            num_warps=1,
            **pdl_options(logits.device),
        )
