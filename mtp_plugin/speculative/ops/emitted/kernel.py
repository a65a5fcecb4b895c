"""Triton kernel of what follows from emitted tokens."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize
from mtp_plugin.requests.columns import request_column
from mtp_plugin.speculative.logit_rows.bans_kernel import RECENT, ban_next
from mtp_plugin.speculative.logit_rows.edits_kernel import (
    MOST_COUNTED,
    WORD_BITS,
    WORD_SHIFT,
    num_words,
)

COUNT_ROW = tl.constexpr(request_column("count_row"))


@triton.jit(do_not_specialize=["position_stride"], do_not_specialize_on_alignment=["position_ptr"])
def note_kernel(
    # inputs
    token_ptr,
    count_ptr,
    slot_ptr,
    position_ptr,
    words_ptr,
    # read, and moved on
    table_ptr,
    pool_ptr,
    seen_ptr,
    allowed_ptr,
    hidden_ptr,
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
    HAS_BANS: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One request: its last tokens, the counts of what it emitted, and what its first draft must
    not be."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + request * slot_stride).to(tl.int64)
    num = tl.load(count_ptr + request * count_stride)
    row_ptr = token_ptr + request * token_stride
    slot_row = table_ptr + slot * table_stride

    places = tl.arange(0, LENGTH)
    source = places + num
    kept = tl.load(slot_row + RECENT + source, mask=source < LENGTH, other=0)
    new = tl.load(row_ptr + source - LENGTH, mask=source >= LENGTH, other=0)
    # all are read before one is written
    tl.debug_barrier()
    tl.store(slot_row + RECENT + places, tl.where(source < LENGTH, kept, new))

    if HAS_BANS:
        # the last tokens are read by other threads than wrote them
        tl.debug_barrier()
        index = tl.load(position_ptr + request * position_stride).to(tl.int64) + num + 1
        ban_next(
            slot_row,
            index,
            0,
            allowed_ptr,
            hidden_ptr,
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
        # several of them may stand in one word
        tl.atomic_or(word_ptr, 1 << (tokens & (WORD_BITS - 1)), mask=first)
