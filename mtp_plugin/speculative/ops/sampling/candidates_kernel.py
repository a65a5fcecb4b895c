"""Candidates of a draw where they are many: columns and values of chunks that were picked, tile by
tile, and a list of some of them.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.speculative.ops.sampling.noise_kernel import (
    ids_of,
    values_of,
    words_of,
    words_of_groups,
)

LISTED = tl.constexpr(4096)
"""Candidates that are listed; rows of the launch's buffers have as many places."""


class Candidates(NamedTuple):
    """The ids that a cut may leave: all of some chunks, and a list of them where it is short."""

    chunk_ptr: tl.tensor
    num_chunks: tl.tensor
    value_ptr: tl.tensor
    column_ptr: tl.tensor
    found: tl.tensor  # of the list; more than LISTED: it is not whole


@triton.jit
def starts_of(
    chunks, PIECE: tl.constexpr, CHUNKS: tl.constexpr, THREADS: tl.constexpr, EACH: tl.constexpr
):
    """The first column of each chunk."""
    return chunks // CHUNKS * PIECE + chunks % CHUNKS * (THREADS // CHUNKS * EACH)


@triton.jit
def spread_of(places, CHUNKS: tl.constexpr, THREADS: tl.constexpr, EACH: tl.constexpr):
    """How far behind a chunk's first column its places are."""
    SEGMENT: tl.constexpr = THREADS // CHUNKS * EACH
    return places // SEGMENT * (THREADS * EACH) + places % SEGMENT


@triton.jit
def columns_of(
    chunk_ptr,
    first,
    num_picked,
    places,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """Columns of places in some picked chunks [TILE, places], and which of the chunks are."""
    at = first + tl.arange(0, TILE)
    chunks = tl.load(chunk_ptr + at, mask=at < num_picked, other=0)
    starts = starts_of(chunks, PIECE, CHUNKS, THREADS, EACH)
    return starts[:, None] + spread_of(places, CHUNKS, THREADS, EACH)[None, :], at < num_picked


@triton.jit
def tile_of(
    row,
    chunk_ptr,
    first,
    num_picked,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """Values and columns of some picked chunks, both [TILE, ids of a chunk]; -inf beyond them."""
    places = tl.arange(0, PIECE // CHUNKS)
    columns, here = columns_of(
        chunk_ptr, first, num_picked, places, TILE, PIECE, CHUNKS, THREADS, EACH
    )
    inside = here[:, None] & (columns < row.vocab)
    return values_of(row, columns, inside, HAS_IDS, HAS_EDITS), columns


@triton.jit
def words_of_tile(
    row,
    chunk_ptr,
    columns,
    first,
    num_picked,
    stream,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """The words of the ids of `tile_of`."""
    SIZE: tl.constexpr = PIECE // CHUNKS
    if HAS_IDS:
        return words_of(ids_of(row, columns, columns < row.vocab, HAS_IDS), stream)
    else:
        places = tl.arange(0, SIZE // 4) * 4
        firsts = columns_of(
            chunk_ptr, first, num_picked, places, TILE, PIECE, CHUNKS, THREADS, EACH
        )[0]
        w0, w1, w2, w3 = words_of_groups(firsts >> 2, stream)
        return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE, SIZE])


@triton.jit
def listed(
    x,
    here,
    chunk_ptr,
    first,
    num_picked,
    found,
    value_ptr,
    column_ptr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """List what is ``here`` of the values of `tile_of`, behind ``found`` others; how many there are
    then.

    By fours of neighbours, which a thread holds, so that values stay where they are.
    """
    TILE: tl.constexpr = x.shape[0]
    FOURS: tl.constexpr = x.shape[1] // 4
    x02, x13 = tl.split(tl.reshape(x, [TILE, FOURS, 2, 2]))
    x0, x2 = tl.split(x02)
    x1, x3 = tl.split(x13)
    here02, here13 = tl.split(tl.reshape(here.to(tl.int32), [TILE, FOURS, 2, 2]))
    here0, here2 = tl.split(here02)
    here1, here3 = tl.split(here13)
    number = here0 + here1 + here2 + here3
    per_chunk = tl.sum(number, axis=1)
    start = found + tl.cumsum(per_chunk, axis=0) - per_chunk
    places = tl.arange(0, FOURS) * 4
    columns = columns_of(chunk_ptr, first, num_picked, places, TILE, PIECE, CHUNKS, THREADS, EACH)[
        0
    ]
    place = start[:, None] + tl.cumsum(number, axis=1) - number
    _list_one(x0, columns, here0, place, value_ptr, column_ptr)
    place += here0
    _list_one(x1, columns + 1, here1, place, value_ptr, column_ptr)
    place += here1
    _list_one(x2, columns + 2, here2, place, value_ptr, column_ptr)
    place += here2
    _list_one(x3, columns + 3, here3, place, value_ptr, column_ptr)
    return found + tl.sum(per_chunk, axis=0)


@triton.jit
def _list_one(x, columns, here, place, value_ptr, column_ptr):
    """List what is ``here`` at a place, if the list has it."""
    listed_here = (here != 0) & (place < LISTED)
    tl.store(value_ptr + place, x, mask=listed_here)
    tl.store(column_ptr + place, columns, mask=listed_here)
