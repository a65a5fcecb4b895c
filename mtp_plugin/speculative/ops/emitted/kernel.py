"""Triton kernel of what follows from emitted tokens."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize
from mtp_plugin.requests.columns import request_column
from mtp_plugin.speculative.logit_rows.edits_kernel import (
    MOST_COUNTED,
    WORD_BITS,
    WORD_SHIFT,
    num_words,
)

COUNT_ROW = tl.constexpr(request_column("count_row"))
RECENT = tl.constexpr(request_column("recent"))


@triton.jit
def note_kernel(
    # inputs
    token_ptr,
    count_ptr,
    slot_ptr,
    # read, and moved on
    table_ptr,
    pool_ptr,
    seen_ptr,
    # sizes
    token_stride,
    count_stride,
    slot_stride,
    table_stride,
    pool_vocab,
    # constants
    COLUMNS: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One request: its last tokens, and the counts of what it emitted."""
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
