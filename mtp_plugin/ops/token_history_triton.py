"""Triton implementation of `token_history`: one launch, one program per request (grid [R]).

1. Shift the request's accepted tokens into its ``recent`` column: LENGTH tokens, of which the
   oldest are dropped. Every load precedes every store, as the column is shifted in place.
2. With a draft mask, after a barrier (other threads load the recent tokens than stored them), mask
   the tokens that the next step's first draft must not be.
3. If the request counts its tokens, add the accepted ones to its row of counts, which saturate, and
   set their bits in its row of seen ids. Equal tokens of a step are counted once, by the column of
   their first occurrence, so no two lanes update one count; words of bits are shared by several
   tokens and are updated atomically.

Columns from the accepted count on are neither shifted in nor counted; with 0 accepted tokens the
recent ones are rewritten unchanged. A padding request has no row of counts (-1); it writes to the
recent tokens of its own slot alone. Requests that count do not share a row.
"""

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
from mtp_plugin.ops.logit_rows.rows_triton import load_slot
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.step import Accepted, SlotRows
from mtp_plugin.requests.columns import request_column
from mtp_plugin.requests.options import MAX_BAD_WORDS
from mtp_plugin.requests.stopping import MAX_STOP_IDS

COUNT_ROW = tl.constexpr(request_column("count_row"))


@triton.jit(
    do_not_specialize=["position_stride", "num_slots"],
    do_not_specialize_on_alignment=["position_ptr"],
)
def token_history_kernel(
    # inputs
    token_ptr,  # [R, K+1] int32: accepted tokens
    count_ptr,  # [R] integer: how many of each row count
    slot_ptr,  # [>= R] integer
    position_ptr,  # HAS_DRAFT_MASK: [R] integer: of the token that precedes the accepted ones
    words_ptr,  # [P, WORDS, LENGTH] int32: bad words, right-aligned, -1 before
    # updated in place
    table_ptr,  # [S, W] int32
    pool_ptr,  # [P, pool_vocab] int16, unsigned: token counts
    seen_ptr,  # [P, num_words(pool_vocab)] int32: a bit per id
    allowed_ptr,  # HAS_DRAFT_MASK: [P, num_words(pool_vocab) + 1] int32: ids of drafts
    masked_ids_ptr,  # HAS_DRAFT_MASK: [P + 1, STOPS + WORDS] int32: ids removed from them
    # sizes
    token_stride,
    count_stride,
    slot_stride,
    num_slots,  # S
    table_stride,
    position_stride,
    pool_vocab,  # vocabulary size
    # constants
    COLUMNS: tl.constexpr,  # a power of two >= K+1
    STOPS: tl.constexpr,  # most stop ids of a request
    WORDS: tl.constexpr,  # most bad words of a request
    HAS_DRAFT_MASK: tl.constexpr,
    LENGTH: tl.constexpr,  # recent tokens, and the longest bad word
    PDL: tl.constexpr,
):
    """One program per request: its recent tokens, token counts, and the mask of its first draft."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = load_slot(slot_ptr, slot_stride, request, num_slots)
    num_tokens = tl.load(count_ptr + request * count_stride)
    row_ptr = token_ptr + request * token_stride
    slot_row_ptr = table_ptr + slot * table_stride

    offsets = tl.arange(0, LENGTH)
    source = offsets + num_tokens
    kept = tl.load(slot_row_ptr + RECENT + source, mask=source < LENGTH, other=0)
    new = tl.load(row_ptr + source - LENGTH, mask=source >= LENGTH, other=0)
    # every load precedes every store
    tl.debug_barrier()
    tl.store(slot_row_ptr + RECENT + offsets, tl.where(source < LENGTH, kept, new))

    if HAS_DRAFT_MASK:
        # other threads than those that stored the recent tokens load them
        tl.debug_barrier()
        index = tl.load(position_ptr + request * position_stride).to(tl.int64) + num_tokens + 1
        update_draft_mask(
            slot_row_ptr,
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

    count_row = tl.load(slot_row_ptr + COUNT_ROW).to(tl.int64)
    if count_row >= 0:
        columns = tl.arange(0, COLUMNS)
        tokens = tl.load(row_ptr + columns, mask=columns < num_tokens, other=-1)
        is_counted = (tokens >= 0) & (tokens < pool_vocab)
        same = (tokens[:, None] == tokens[None, :]) & is_counted[None, :]
        times = tl.sum(same.to(tl.int32), axis=1)
        earlier = same & (columns[None, :] < columns[:, None])
        first = is_counted & (tl.max(earlier.to(tl.int32), axis=1) == 0)
        entry_ptr = pool_ptr + count_row * pool_vocab + tokens
        old = tl.load(entry_ptr, mask=first, other=0).to(tl.int32) & MOST_COUNTED
        tl.store(entry_ptr, tl.minimum(old + times, MOST_COUNTED).to(tl.int16), mask=first)
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
        slots.table.shape[0],
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
