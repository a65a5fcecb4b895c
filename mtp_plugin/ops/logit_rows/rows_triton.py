"""Rows of logits on the device: owner, ordering, and chunks as `row_sums.ChunkLayout` has them."""

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
def locate_row(
    row,
    num_contexts,
    width,
    table_ptr,
    table_stride,
    slot_ptr,
    slot_stride,
    CACHE: tl.constexpr = CACHED,
):
    """The request of a row, the row's index in it, and a pointer to the request's slot."""
    # a division of 64 bits takes ten times as many instructions
    row = row.to(tl.int32)
    generation_row = tl.maximum(row - num_contexts, 0)
    is_context = row < num_contexts
    request = tl.where(is_context, row, num_contexts + generation_row // width).to(tl.int64)
    offset = tl.where(is_context, 0, generation_row % width)
    slot = tl.load(slot_ptr + request * slot_stride, cache_modifier=CACHE).to(tl.int64)
    return request, offset, table_ptr + slot * table_stride


@triton.jit
def order_of(x):
    """Map float32 values without NaN to int32 of the same order; both zeros map to one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """Invert `order_of`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def highest_of(x):
    """The maximum of values without NaN, compared as integers."""
    return value_of(tl.max(order_of(x), axis=0))


class Picked(NamedTuple):
    """A list of chunks of a row."""

    ptr: tl.tensor  # chunk indices
    number: tl.tensor  # length of the list


@triton.jit
def load_block(row_ptr, block, vocab, BLOCK: tl.constexpr):
    """Load a block of a row as float32; -inf past the end of the row."""
    first = block * BLOCK
    places = tl.arange(0, BLOCK)
    if first + BLOCK <= vocab:
        x = tl.load(row_ptr + first + places)
    else:
        x = tl.load(row_ptr + first + places, mask=places < vocab - first, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def number_of(x):
    """Replace NaN by -inf."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def number_or_zero(x):
    """Replace -inf by 0, so that differences to the maximum of a row of -inf are no NaN."""
    return tl.where(x > float("-inf"), x, 0.0)


@triton.jit
def thread_tops(held):
    """The maximum of the values of each thread [..., threads, each]; NaN counts as -inf."""
    # max drops NaN if there is a number, so only the maxima are replaced
    return number_of(tl.max(tl.max(held, axis=0), axis=1))


@triton.jit
def masses_of(held, thread_top, below, scale):
    """The sum of the weights of each chunk, relative to the weight of its maximum; NaN weighs 0.

    Args:
        held: values by thread [..., threads, each].
        thread_top: their maxima.
        below: thread maxima minus chunk maximum, in log2 [chunks, threads of a chunk].
    """
    base = number_or_zero(thread_top)
    weights = tl.exp2((held - base[None, :, None]) * scale)
    weights = tl.where(held == held, weights, 0.0)
    mass = tl.sum(tl.sum(weights, axis=0), axis=1)
    return tl.sum(tl.reshape(mass, below.shape) * tl.exp2(below), axis=1)


@triton.jit
def row_mass_of(masses, tops, top, scale):
    """The sum of the weights of a row, relative to the weight of its maximum, from its chunks."""
    weights = tl.exp2((tops - top) * scale)
    return tl.sum(tl.where(tops > float("-inf"), masses * weights, 0.0), axis=0)


@triton.jit
def starts_of(chunks, LAYOUT: tl.constexpr):
    """The first column of each chunk."""
    # an unsigned division by a power of two is a shift
    blocks = (chunks.to(tl.uint32) // LAYOUT.chunks).to(tl.int32)
    return blocks * (LAYOUT.block - LAYOUT.chunks * LAYOUT.segment) + chunks * LAYOUT.segment


@triton.jit
def spread_of(places, LAYOUT: tl.constexpr):
    """The column of each index within a chunk, relative to the chunk's first column."""
    wraps = places // LAYOUT.segment
    return wraps * (LAYOUT.threads * LAYOUT.each) + places % LAYOUT.segment


@triton.jit
def columns_of(picked, first, places, TILE: tl.constexpr, LAYOUT: tl.constexpr):
    """Columns of ``TILE`` picked chunks [TILE, places], and which of these chunks exist."""
    at = first + tl.arange(0, TILE)
    chunks = tl.load(picked.ptr + at, mask=at < picked.number, other=0)
    starts = starts_of(chunks, LAYOUT)
    return starts[:, None] + spread_of(places, LAYOUT)[None, :], at < picked.number


@triton.jit
def picked_of(here, picked_ptr):
    """Write the indices of the chunks that are ``here`` in ascending order.

    Each thread compacts four neighbouring chunks.
    """
    FOURS: tl.constexpr = here.shape[0] // 4
    here02, here13 = tl.split(tl.reshape(here.to(tl.int32), [FOURS, 2, 2]))
    here0, here2 = tl.split(here02)
    here1, here3 = tl.split(here13)
    number = here0 + here1 + here2 + here3
    place = tl.cumsum(number, axis=0) - number
    chunks = tl.arange(0, FOURS) * 4
    tl.store(picked_ptr + place, chunks, mask=here0 != 0)
    place += here0
    tl.store(picked_ptr + place, chunks + 1, mask=here1 != 0)
    place += here1
    tl.store(picked_ptr + place, chunks + 2, mask=here2 != 0)
    place += here2
    tl.store(picked_ptr + place, chunks + 3, mask=here3 != 0)
    return Picked(picked_ptr, tl.sum(number, axis=0))
