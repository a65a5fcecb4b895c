"""Triton implementation of `token_history`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logit_rows.processing_triton import (
    MOST_COUNTED,
    RECENT,
    WORD_BITS,
    WORD_SHIFT,
    num_words,
    update_draft_mask,
)
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.step import Accepted, SlotRows
from mtp_plugin.requests.columns import request_column
from mtp_plugin.requests.options import MAX_BAD_WORDS
from mtp_plugin.requests.stopping import MAX_STOP_IDS

COUNT_ROW = tl.constexpr(request_column("count_row"))


@triton.jit(do_not_specialize=["position_stride"], do_not_specialize_on_alignment=["position_ptr"])
def token_history_kernel(
    # inputs
    token_ptr,
    count_ptr,
    slot_ptr,
    position_ptr,
    words_ptr,
    # updated in place
    table_ptr,
    pool_ptr,
    seen_ptr,
    allowed_ptr,
    masked_ids_ptr,
    # sizes
    token_stride,
    count_stride,
    slot_stride,
    table_stride,
    position_stride,
    pool_vocab,
    # constants
    COLUMNS: tl.constexpr,
    STOPS: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_DRAFT_MASK: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per request: its recent tokens, token counts, and the mask of its first draft."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + request * slot_stride).to(tl.int64)
    num = tl.load(count_ptr + request * count_stride)
    row_ptr = token_ptr + request * token_stride
    slot_row = table_ptr + slot * table_stride

    offsets = tl.arange(0, LENGTH)
    source = offsets + num
    kept = tl.load(slot_row + RECENT + source, mask=source < LENGTH, other=0)
    new = tl.load(row_ptr + source - LENGTH, mask=source >= LENGTH, other=0)
    # every load precedes every store
    tl.debug_barrier()
    tl.store(slot_row + RECENT + offsets, tl.where(source < LENGTH, kept, new))

    if HAS_DRAFT_MASK:
        # other threads than those that stored the recent tokens load them
        tl.debug_barrier()
        index = tl.load(position_ptr + request * position_stride).to(tl.int64) + num + 1
        update_draft_mask(
            slot_row,
            index,
            0,
            allowed_ptr,
            masked_ids_ptr,
            words_ptr,
            token_ptr,
            pool_vocab,
            STOPS,
            WORDS,
            LENGTH,
            False,
        )

    count_row = tl.load(slot_row + COUNT_ROW).to(tl.int64)
    if count_row >= 0:
        columns = tl.arange(0, COLUMNS)
        tokens = tl.load(row_ptr + columns, mask=columns < num, other=-1)
        counts = (tokens >= 0) & (tokens < pool_vocab)
        same = (tokens[:, None] == tokens[None, :]) & counts[None, :]
        times = tl.sum(same.to(tl.int32), axis=1)
        earlier = same & (columns[None, :] < columns[:, None])
        first = counts & (tl.max(earlier.to(tl.int32), axis=1) == 0)
        entry = pool_ptr + count_row * pool_vocab + tokens
        old = tl.load(entry, mask=first, other=0).to(tl.int32) & MOST_COUNTED
        tl.store(entry, tl.minimum(old + times, MOST_COUNTED).to(tl.int16), mask=first)
        word_ptr = seen_ptr + count_row * num_words(pool_vocab) + (tokens >> WORD_SHIFT)
        # several tokens may share a word
        tl.atomic_or(word_ptr, 1 << (tokens & (WORD_BITS - 1)), mask=first)


def update_token_history_triton(
    accepted: Accepted, slots: SlotRows, rows: LogitRows | None
) -> None:
    """One launch, one program per request."""
    tokens, pools, draft_mask = accepted.tokens, slots.pools, slots.draft_mask
    positions = None if rows is None or draft_mask is None else rows.positions
    if pools is None:
        raise TensorContractError("update_token_history: expected slots with pools, got None")
    expect_reachable(token_history_kernel, "tokens", tokens)
    requests, width = tokens.shape
    token_history_kernel[(requests,)](
        # inputs
        tokens,
        accepted.num_accepted,
        slots.slot_ids,
        tokens if positions is None else positions,  # never read if it is not there
        pools.words,
        # updated in place
        slots.table,
        pools.counts,
        pools.seen,
        tokens if draft_mask is None else draft_mask.allowed,
        tokens if draft_mask is None else draft_mask.masked_ids,
        # sizes
        tokens.stride(0),
        accepted.num_accepted.stride(0),
        slots.slot_ids.stride(0),
        slots.table.stride(0),
        0 if positions is None else positions.stride(0),
        pools.vocab_size,
        # constants
        COLUMNS=triton.next_power_of_2(width),
        STOPS=MAX_STOP_IDS,
        WORDS=MAX_BAD_WORDS,
        HAS_DRAFT_MASK=positions is not None,
        LENGTH=slots.columns["recent"].width,
        num_warps=1,
        **pdl_options(tokens.device),
    )
