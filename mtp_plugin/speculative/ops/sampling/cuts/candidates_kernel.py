"""Candidates of a draw where they are many: columns and values of chunks that were picked, tile by
tile, and a list of some of them.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.speculative.logit_rows.processing_triton import allowed_fours
from mtp_plugin.speculative.logit_rows.rows_triton import Picked, columns_of
from mtp_plugin.speculative.ops.sampling.noise_kernel import (
    ids_of,
    values_of,
    words_of,
    words_of_groups,
)

LISTED = tl.constexpr(4096)
"""Candidates that are listed."""
OF_THREAD = tl.constexpr(32)
"""Values of a tile that a thread holds at most."""
PLACES = tl.constexpr(LISTED + 2 * OF_THREAD)
"""Of a row in the launch's buffer: behind a whole list a thread may write what is never read."""


class Candidates(NamedTuple):
    """The ids that a cut may leave: all of some chunks, and a list of them where it is short."""

    picked: Picked
    pair_ptr: tl.tensor  # as `pairs_of`
    found: tl.tensor  # of the list; more than LISTED: it is not whole


@triton.jit
def tile_of(
    row,
    picked,
    first,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """Values and columns of some picked chunks, both [TILE, ids of a chunk]; -inf beyond them."""
    columns, here = columns_of(picked, first, tl.arange(0, LAYOUT.chunk_size), TILE, LAYOUT)
    inside = here[:, None] & (columns < row.vocab)
    return values_of(row, columns, inside, HAS_IDS, HAS_EDITS), columns


@triton.jit
def words_of_tile(
    row,
    picked,
    columns,
    first,
    stream,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """The words of the ids of `tile_of`."""
    SIZE: tl.constexpr = LAYOUT.chunk_size
    if HAS_IDS:
        return words_of(ids_of(row, columns, columns < row.vocab, HAS_IDS), stream)
    else:
        places = tl.arange(0, SIZE // 4) * 4
        firsts = columns_of(picked, first, places, TILE, LAYOUT)[0]
        w0, w1, w2, w3 = words_of_groups(firsts >> 2, stream)
        return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE, SIZE])


@triton.jit
def pairs_of(x, columns):
    """Values and their columns as one word of 64 bits each."""
    # without a sign a column fills its half of the word as it is
    return (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | columns.to(tl.uint32).to(tl.int64)


@triton.jit
def of_pairs(pairs):
    """Values and columns of `pairs_of`."""
    return (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True), pairs.to(tl.int32)


@triton.jit
def depths_of(x, here, top, temperature):
    """How deep values lie, (top - x) / T; infinitely deep what is not ``here``.

    An operand of 0 or infinity takes a division the slow way, with all threads beside it.
    """
    differences = top - x
    usual = here & (differences > 0)
    depths = tl.div_rn(tl.where(usual, differences, temperature), temperature)
    return tl.where(usual, depths, tl.where(here, 0.0, float("inf")))


@triton.jit
def listed(x, here, picked, first, found, pair_ptr, LAYOUT: tl.constexpr, WARPS: tl.constexpr):
    """List what is ``here`` of the values of `tile_of`, behind ``found`` others; how many there are
    then.

    A thread holds fours of neighbours, of every so many chunks: it lists all of its own at
    consecutive places, so that only numbers go from thread to thread, one of each.
    """
    TILE: tl.constexpr = x.shape[0]
    FOURS: tl.constexpr = x.shape[1] // 4
    ROWS: tl.constexpr = TILE // WARPS
    x02, x13 = tl.split(tl.reshape(x, [TILE, FOURS, 2, 2]))
    x0, x2 = tl.split(x02)
    x1, x3 = tl.split(x13)
    here02, here13 = tl.split(tl.reshape(here.to(tl.int32), [TILE, FOURS, 2, 2]))
    here0, here2 = tl.split(here02)
    here1, here3 = tl.split(here13)
    number = tl.reshape(here0 + here1 + here2 + here3, [ROWS, WARPS, FOURS])
    of_thread = tl.reshape(tl.sum(number, axis=0), [WARPS * FOURS])
    start = found + tl.cumsum(of_thread, axis=0) - of_thread
    start = tl.reshape(tl.minimum(start, LISTED), [WARPS, FOURS])
    place = start[None, :, :] + tl.cumsum(number, axis=0) - number
    # along one side, or the compiler has what it stores change threads before
    place = tl.reshape(place, [TILE * FOURS])
    places = tl.arange(0, FOURS) * 4
    columns = columns_of(picked, first, places, TILE, LAYOUT)[0]
    columns = tl.reshape(columns, [TILE * FOURS])
    place = _one_listed(x0, columns, here0, place, pair_ptr)
    place = _one_listed(x1, columns + 1, here1, place, pair_ptr)
    place = _one_listed(x2, columns + 2, here2, place, pair_ptr)
    _one_listed(x3, columns + 3, here3, place, pair_ptr)
    return found + tl.sum(of_thread, axis=0)


@triton.jit
def listed_fours(
    row,
    least,
    picked,
    four_ptr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """List the first columns of fours of neighbours with a value of ``least`` or more, of picked
    chunks that fill one tile at most; how many there are.

    To write a few such numbers takes a quarter of the stores that single values take. Values are
    not edited but for what is not allowed: with edits that only lower some the list is no shorter.
    """
    FOURS: tl.constexpr = LAYOUT.chunk_size // 4
    ROWS: tl.constexpr = TILE // WARPS
    x = tile_of(row, picked, 0, TILE, LAYOUT, HAS_IDS, False)[0]
    columns = columns_of(picked, 0, tl.arange(0, FOURS) * 4, TILE, LAYOUT)[0]
    x = tl.reshape(x, [TILE, FOURS, 4])
    if HAS_EDITS and not HAS_IDS:  # noqa: SIM102 - known when it is compiled
        if row.edits.allowed_row >= 0:
            bits = allowed_fours(row.edits, columns, columns < row.vocab)
            bits = (bits[:, :, None] >> tl.arange(0, 4)[None, None, :]) & 1
            x = tl.where(bits != 0, x, float("-inf"))
    here = tl.max(x, axis=2) >= least
    number = tl.reshape(here.to(tl.int32), [ROWS, WARPS, FOURS])
    of_thread = tl.reshape(tl.sum(number, axis=0), [WARPS * FOURS])
    start = tl.reshape(tl.cumsum(of_thread, axis=0) - of_thread, [WARPS, FOURS])
    place = start[None, :, :] + tl.cumsum(number, axis=0) - number
    # as in `listed`
    place = tl.reshape(place, [TILE * FOURS])
    columns = tl.reshape(columns, place.shape).to(tl.int64)
    tl.store(four_ptr + place, columns, mask=tl.reshape(here, place.shape))
    return tl.sum(of_thread, axis=0)


@triton.jit
def listed_of_fours(
    row,
    least,
    four_ptr,
    num_fours,
    pair_ptr,
    FOURS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """List what of the fours is ``least`` or more; how many there are."""
    places = tl.arange(0, FOURS)
    firsts = tl.load(four_ptr + places, mask=places < num_fours, other=row.vocab).to(tl.int32)
    columns = tl.reshape(firsts[:, None] + tl.arange(0, 4)[None, :], [FOURS * 4])
    x = values_of(row, columns, columns < row.vocab, HAS_IDS, HAS_EDITS)
    here = (x >= least).to(tl.int32)
    place = tl.cumsum(here, axis=0) - here
    tl.store(pair_ptr + place, pairs_of(x, columns), mask=here != 0)
    return tl.sum(here, axis=0)


@triton.jit
def _one_listed(x, columns, here, place, pair_ptr):
    """List what is ``here`` of a tile at places of one side; which come next."""
    here = tl.reshape(here, place.shape)
    pairs = pairs_of(tl.reshape(x, place.shape), columns)
    tl.store(pair_ptr + place, pairs, mask=here != 0)
    return place + here
