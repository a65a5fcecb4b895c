"""Cuts that are searched for: draws among any number of candidates, by passes over their chunks."""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.speculative.ops.sampling.noise_kernel import gumbel, ids_of, values_of, words_of

LN_2 = tl.constexpr(0.6931471805599453)
NO_COLUMN = tl.constexpr(2147483647)
LISTED = tl.constexpr(4096)
"""Candidates that are listed; rows of the launch's buffers have as many places."""
BY_COUNT = tl.constexpr(0)
BY_MASS = tl.constexpr(1)
BY_COLUMN = tl.constexpr(2)


class Candidates(NamedTuple):
    """The ids that a cut may leave: all of some chunks, and a list of them where it is short."""

    chunk_ptr: tl.tensor
    num_chunks: tl.tensor
    value_ptr: tl.tensor
    column_ptr: tl.tensor
    found: tl.tensor  # of the list; more than LISTED: it is not whole


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
    SEGMENT: tl.constexpr = THREADS // CHUNKS * EACH
    at = first + tl.arange(0, TILE)
    chunk = tl.load(chunk_ptr + at, mask=at < num_picked, other=0)
    places = tl.arange(0, PIECE // CHUNKS)
    places = places // SEGMENT * (THREADS * EACH) + places % SEGMENT
    starts = chunk // CHUNKS * PIECE + chunk % CHUNKS * SEGMENT
    columns = starts[:, None] + places[None, :]
    inside = (at < num_picked)[:, None] & (columns < row.vocab)
    return values_of(row, columns, inside, HAS_IDS, HAS_EDITS), columns


@triton.jit
def _size(candidates, SIZE: tl.constexpr):
    """Places that hold all candidates: of their list, or of the picked chunks."""
    return tl.where(candidates.found <= LISTED, candidates.found, candidates.num_chunks * SIZE)


@triton.jit
def _page(
    row,
    candidates,
    first,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    SEARCHED: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """Values and columns of the candidates from place ``first`` on, both [SEARCHED, ids of a
    chunk]; -inf beyond them."""
    SIZE: tl.constexpr = PIECE // CHUNKS
    if candidates.found <= LISTED:
        places = tl.arange(0, SEARCHED)[:, None] * SIZE + tl.arange(0, SIZE)[None, :] + first
        inside = places < candidates.found
        x = tl.load(candidates.value_ptr + places, mask=inside, other=float("-inf"))
        columns = tl.load(candidates.column_ptr + places, mask=inside, other=NO_COLUMN)
    else:
        x, columns = tile_of(
            row,
            candidates.chunk_ptr,
            first // SIZE,
            candidates.num_chunks,
            SEARCHED,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            HAS_IDS,
            HAS_EDITS,
        )
    return x, columns


@triton.jit
def _measured(
    k1,
    k2,
    k3,
    level,
    row,
    candidates,
    top,
    temperature,
    BY: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    SEARCHED: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """The measure of the ids whose key is at most k1, k2, k3; one pass over the candidates.

    Key is the depth, bit for bit: none is negative, so its bits are in its order. The measure is
    the number of ids, or their mass. By column only ids of depth ``level`` count.
    """
    SIZE: tl.constexpr = PIECE // CHUNKS
    m1 = tl.zeros([SEARCHED, SIZE], tl.float32)
    m2 = tl.zeros([SEARCHED, SIZE], tl.float32)
    m3 = tl.zeros([SEARCHED, SIZE], tl.float32)
    for first in range(0, _size(candidates, SIZE), SEARCHED * SIZE):
        x, columns = _page(
            row,
            candidates,
            first,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            SEARCHED,
            HAS_IDS,
            HAS_EDITS,
        )
        depths = tl.div_rn(top - x, temperature)
        keys = depths.to(tl.int32, bitcast=True)
        weights = 1.0
        if BY == BY_MASS:
            weights = tl.exp(-depths)
        if BY == BY_COLUMN:
            keys = tl.where(keys == level, columns, NO_COLUMN)
        m1 += tl.where(keys <= k1, weights, 0.0)
        m2 += tl.where(keys <= k2, weights, 0.0)
        m3 += tl.where(keys <= k3, weights, 0.0)
    return (
        tl.sum(tl.sum(m1, axis=1), axis=0),
        tl.sum(tl.sum(m2, axis=1), axis=0),
        tl.sum(tl.sum(m3, axis=1), axis=0),
    )


@triton.jit
def _least(
    need,
    high,
    level,
    row,
    candidates,
    top,
    temperature,
    BY: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    SEARCHED: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """The least key up to which ids measure ``need``, and the measure of those below it.

    ``high`` counts as enough.
    """
    low = tl.zeros_like(high)
    before = 0.0
    while low < high:
        half = (high - low) // 2
        k1 = low + half // 2
        k2 = low + half
        k3 = k2 + half // 2
        m1, m2, m3 = _measured(
            k1,
            k2,
            k3,
            level,
            row,
            candidates,
            top,
            temperature,
            BY,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            SEARCHED,
            HAS_IDS,
            HAS_EDITS,
        )
        if m1 >= need:
            high = k1
        elif m2 >= need:
            before = m1
            low = k1 + 1
            high = k2
        elif m3 >= need:
            before = m2
            low = k2 + 1
            high = k3
        else:
            before = m3
            low = k3 + 1
    return low, before


@triton.jit
def drawn_of_many(
    row,
    candidates,
    options,
    stream,
    far,
    top,
    mass,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    SEARCHED: tl.constexpr,
):
    """As `drawn_of_cut`, of any number of candidates: all ids up to a depth, and of those that lie
    at it the first columns."""
    SIZE: tl.constexpr = PIECE // CHUNKS
    temperature = options.temperature
    top_k = options.top_k
    top_p = options.top_p
    # the depth as a key, and how many stay of the ids that lie there
    limit = (far * LN_2).to(tl.int32, bitcast=True)
    stay = 2147483647.0
    if top_k > 0:
        limit, before = _least(
            top_k.to(tl.float32),
            limit,
            0,
            row,
            candidates,
            top,
            temperature,
            BY_COUNT,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            SEARCHED,
            HAS_IDS,
            HAS_EDITS,
        )
        stay = top_k.to(tl.float32) - before
        if top_p < 1:
            nearer, within, _ = _measured(
                limit - 1,
                limit,
                limit,
                0,
                row,
                candidates,
                top,
                temperature,
                BY_MASS,
                PIECE,
                CHUNKS,
                THREADS,
                EACH,
                SEARCHED,
                HAS_IDS,
                HAS_EDITS,
            )
            weight = tl.exp(-limit.to(tl.float32, bitcast=True))
            mass = tl.minimum(nearer + stay * weight, within)
    if top_p < 1:
        need = top_p * mass
        cut, before = _least(
            need,
            limit,
            0,
            row,
            candidates,
            top,
            temperature,
            BY_MASS,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            SEARCHED,
            HAS_IDS,
            HAS_EDITS,
        )
        weight = tl.exp(-cut.to(tl.float32, bitcast=True))
        # each of the equals stays while the mass in front of it is less than needed
        equals = tl.maximum(tl.ceil((need - before) / weight), 1.0)
        stay = tl.where(cut == limit, tl.minimum(stay, equals), equals)
        limit = cut
    last = row.vocab - 1
    if (top_k > 0) | (top_p < 1):
        equals, _, _ = _measured(
            last,
            last,
            last,
            limit,
            row,
            candidates,
            top,
            temperature,
            BY_COLUMN,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            SEARCHED,
            HAS_IDS,
            HAS_EDITS,
        )
        if equals > stay:
            last, _ = _least(
                stay,
                last,
                limit,
                row,
                candidates,
                top,
                temperature,
                BY_COLUMN,
                PIECE,
                CHUNKS,
                THREADS,
                EACH,
                SEARCHED,
                HAS_IDS,
                HAS_EDITS,
            )
    best = float("-inf")
    drawn = NO_COLUMN
    left = 0.0
    for first in range(0, _size(candidates, SIZE), SEARCHED * SIZE):
        x, columns = _page(
            row,
            candidates,
            first,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            SEARCHED,
            HAS_IDS,
            HAS_EDITS,
        )
        depths = tl.div_rn(top - x, temperature)
        keys = depths.to(tl.int32, bitcast=True)
        kept = (keys < limit) | ((keys == limit) & (columns <= last))
        weights = tl.exp(-depths)
        kept = kept & (weights >= options.min_p)
        left += tl.sum(tl.sum(tl.where(kept, weights, 0.0), axis=1), axis=0)
        ids = ids_of(row, columns, kept, HAS_IDS)
        noisy = gumbel(words_of(ids, stream)) - depths
        noisy = tl.where(kept, noisy, float("-inf"))
        tile_best = tl.max(tl.max(noisy, axis=1), axis=0)
        at = tl.where(kept & (noisy == tile_best), columns, NO_COLUMN)
        at = tl.min(tl.min(at, axis=1), axis=0)
        at = tl.where(tile_best == best, tl.minimum(at, drawn), at)
        drawn = tl.where(tile_best >= best, at, drawn)
        best = tl.maximum(best, tile_best)
    return drawn, limit.to(tl.float32, bitcast=True), last, left
