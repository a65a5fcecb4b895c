"""Rows of logits on the device: owner, ordering, and chunks as `row_sums.ChunkLayout` has them.

Kernels that scan rows use these parts in this order; none is a launch of its own:

1. `locate_row`: the request of a row, its index there, and the request's row of the slot table.
2. `load_block`, then `thread_maxima` and `sum_chunks`: a block as [wraps, threads, each], the
   values that each thread holds, is reduced per thread and then per chunk.
3. `sum_row`: merge the sums of the chunks of a row.
4. `select_chunks`: list the chunks that must be read again; `tile_columns`: their columns.

Values are compared as integers of the same order where that is faster (`float_to_ordered_int`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.requests import options

GREEDY_BELOW = tl.constexpr(options.GREEDY_BELOW)
NO_COLUMN = tl.constexpr(2147483647)
"""Greater than every column of a row."""
LOG2_E = tl.constexpr(1.4426950408889634)
CACHED = tl.constexpr("")
"""Cache modifier of loads through all caches; ``.cg`` bypasses L1."""


@triton.jit
def load_slot(slot_ptr, slot_stride, request, num_slots, CACHE: tl.constexpr = CACHED):
    """The slot of a request; an id outside the table is the last slot."""
    slot = tl.load(slot_ptr + request.to(tl.int64) * slot_stride, cache_modifier=CACHE)
    slot = slot.to(tl.int64)
    return tl.where((slot >= 0) & (slot < num_slots), slot, num_slots - 1)


@triton.jit
def locate_row(
    row,
    num_contexts,
    width,
    table_ptr,
    table_stride,
    slot_ptr,
    slot_stride,
    num_slots,
    CACHE: tl.constexpr = CACHED,
):
    """The request of a row, the row's index in it, and a pointer to the request's slot."""
    # a division of 64 bits takes ten times as many instructions
    row = row.to(tl.int32)
    generation_row = tl.maximum(row - num_contexts, 0)
    is_context = row < num_contexts
    request = tl.where(is_context, row, num_contexts + generation_row // width).to(tl.int64)
    offset = tl.where(is_context, 0, generation_row % width)
    slot = load_slot(slot_ptr, slot_stride, request, num_slots, CACHE)
    return request, offset, table_ptr + slot * table_stride


@triton.jit
def float_to_ordered_int(x):
    """Map float32 values without NaN to int32 of the same order; both zeros map to one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered_int_to_float(order):
    """Invert `float_to_ordered_int`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def max_no_nan(x):
    """The maximum of values without NaN, compared as integers."""
    return ordered_int_to_float(tl.max(float_to_ordered_int(x), axis=0))


class SelectedChunks(NamedTuple):
    """A list of chunks of a row."""

    ptr: tl.tensor  # [num_chunks] int32: chunk indices, ascending
    num_chunks: tl.tensor  # length of the list


@triton.jit
def load_block(row_ptr, block, vocab, BLOCK: tl.constexpr):
    """Load a block of a row as float32; -inf past the end of the row."""
    first = block * BLOCK
    offsets = tl.arange(0, BLOCK)
    if first + BLOCK <= vocab:
        x = tl.load(row_ptr + first + offsets)
    else:
        x = tl.load(row_ptr + first + offsets, mask=offsets < vocab - first, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def nan_to_neg_inf(x):
    """Replace NaN by -inf."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def neg_inf_to_zero(x):
    """Replace -inf by 0, so that differences to the maximum of a row of -inf are no NaN."""
    return tl.where(x > float("-inf"), x, 0.0)


@triton.jit
def thread_maxima(by_thread):
    """The maximum of the values of each thread [..., threads, each]; NaN counts as -inf."""
    # max drops NaN if there is a number, so only the maxima are replaced
    return nan_to_neg_inf(tl.max(tl.max(by_thread, axis=0), axis=1))


@triton.jit
def sum_chunks(by_thread, thread_max, thread_exponents, scale):
    """The sum of the weights of each chunk, relative to the weight of its maximum; NaN weighs 0.

    Args:
        by_thread: values by thread [..., threads, each].
        thread_max: their maxima.
        thread_exponents: thread maxima minus chunk maximum, in log2 [chunks, threads of a chunk].
    """
    thread_base = neg_inf_to_zero(thread_max)
    weights = tl.exp2((by_thread - thread_base[None, :, None]) * scale)
    weights = tl.where(by_thread == by_thread, weights, 0.0)
    thread_sums = tl.sum(tl.sum(weights, axis=0), axis=1)
    return tl.sum(
        tl.reshape(thread_sums, thread_exponents.shape) * tl.exp2(thread_exponents), axis=1
    )


@triton.jit
def sum_row(chunk_sums, chunk_maxima, row_max, scale):
    """The sum of the weights of a row, relative to the weight of its maximum, from its chunks."""
    weights = tl.exp2((chunk_maxima - row_max) * scale)
    return tl.sum(tl.where(chunk_maxima > float("-inf"), chunk_sums * weights, 0.0), axis=0)


@triton.jit
def chunk_starts(chunks, LAYOUT: tl.constexpr):
    """The first column of each chunk."""
    # an unsigned division by a power of two is a shift
    blocks = (chunks.to(tl.uint32) // LAYOUT.chunks).to(tl.int32)
    return blocks * (LAYOUT.block - LAYOUT.chunks * LAYOUT.segment) + chunks * LAYOUT.segment


@triton.jit
def columns_in_chunk(offsets, LAYOUT: tl.constexpr):
    """The column of each index within a chunk, relative to the chunk's first column."""
    wraps = offsets // LAYOUT.segment
    return wraps * (LAYOUT.threads * LAYOUT.each) + offsets % LAYOUT.segment


@triton.jit
def tile_columns(selected, first, offsets, TILE: tl.constexpr, LAYOUT: tl.constexpr):
    """Columns of ``TILE`` selected chunks [TILE, offsets], and which of these chunks exist."""
    index = first + tl.arange(0, TILE)
    chunks = tl.load(selected.ptr + index, mask=index < selected.num_chunks, other=0)
    starts = chunk_starts(chunks, LAYOUT)
    return starts[:, None] + columns_in_chunk(offsets, LAYOUT)[None, :], index < selected.num_chunks


@triton.jit
def select_chunks(is_selected, selected_ptr):
    """Write the indices of the chunks that are ``is_selected`` in ascending order.

    Each thread compacts four neighbouring chunks.
    """
    GROUPS: tl.constexpr = is_selected.shape[0] // 4
    is_selected02, is_selected13 = tl.split(tl.reshape(is_selected.to(tl.int32), [GROUPS, 2, 2]))
    is_selected0, is_selected2 = tl.split(is_selected02)
    is_selected1, is_selected3 = tl.split(is_selected13)
    num_selected = is_selected0 + is_selected1 + is_selected2 + is_selected3
    index = tl.cumsum(num_selected, axis=0) - num_selected
    chunks = tl.arange(0, GROUPS) * 4
    tl.store(selected_ptr + index, chunks, mask=is_selected0 != 0)
    index += is_selected0
    tl.store(selected_ptr + index, chunks + 1, mask=is_selected1 != 0)
    index += is_selected1
    tl.store(selected_ptr + index, chunks + 2, mask=is_selected2 != 0)
    index += is_selected2
    tl.store(selected_ptr + index, chunks + 3, mask=is_selected3 != 0)
    return SelectedChunks(selected_ptr, tl.sum(num_selected, axis=0))
