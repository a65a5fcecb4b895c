"""Passes over many candidates: what they measure up to some keys, and what is drawn of them.

Key is the depth of an id, bit for bit: none is negative, so its bits are in its order.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.speculative.logit_rows.rows_triton import LOG2_E, NO_COLUMN, columns_of
from mtp_plugin.speculative.ops.sampling.cuts.candidates_kernel import (
    LISTED,
    depths_of,
    listed,
    of_pairs,
    tile_of,
    words_of_tile,
)
from mtp_plugin.speculative.ops.sampling.noise_kernel import (
    BOUND_SLACK,
    gumbel,
    gumbel_bound,
    ids_of,
    scale_of,
    words_of,
)

LEAST_NEED = tl.constexpr(1e-30)
NO_DEPTH = tl.constexpr(2139095040)
"""The key of an infinite depth."""
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
HALF_STEP = tl.constexpr(5.960464477539063e-08)
"""Of float32 below that, in shares of it."""


class Drawn(NamedTuple):
    """What is drawn of some ids, and what is left of them."""

    score: tl.tensor  # the highest with noise; -inf: of none
    column: tl.tensor  # the lowest that has it
    mass: tl.tensor


class Passed(NamedTuple):
    """What a pass over picked chunks found."""

    nearer: tl.tensor  # the measure up to its first key
    within: tl.tensor  # and up to its second
    found: tl.tensor  # ids between them
    drawn: Drawn  # of those up to the first


@triton.jit
def reach_of(key, temperature):
    """The largest difference of values whose depth has at most this key; of a key below 0 -1.

    It is next to their product, but for rounding: of depths next to 0 half a step is all there is.
    """
    half_step = (temperature * SMALLEST_NORMAL) * HALF_STEP
    about = key.to(tl.float32, bitcast=True) * temperature + half_step
    about = about.to(tl.int32, bitcast=True)
    about = tl.maximum(about - 16 + tl.arange(0, 32), 0)
    differences = about.to(tl.float32, bitcast=True)
    keys = tl.div_rn(differences, temperature).to(tl.int32, bitcast=True)
    within = (keys <= key) & (about < NO_DEPTH)
    return tl.max(tl.where(within, differences, -1.0), axis=0)


@triton.jit
def summed(x, EACH: tl.constexpr):
    """Of a tile by as many neighbours as a thread holds."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // EACH, EACH]), axis=2)


@triton.jit(noinline=True)
def between(
    near,
    far,
    by_mass,
    draw,
    candidates,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """List the ids between two keys, in one pass over all picked chunks."""
    SUMS: tl.constexpr = LAYOUT.chunk_size // LAYOUT.each
    row = draw.row
    picked = candidates.picked
    scale = scale_of(draw.options.temperature)
    near_reach = reach_of(near, draw.options.temperature)
    far_reach = reach_of(far, draw.options.temperature)
    nearer = tl.zeros([TILE, SUMS], tl.float32)
    within = tl.zeros([TILE, SUMS], tl.float32)
    left = tl.zeros([TILE, SUMS], tl.float32)
    found = 0
    best = float("-inf")
    drawn = NO_COLUMN
    places = tl.arange(0, LAYOUT.chunk_size)
    # what was listed before everybody has read
    tl.debug_barrier()
    x = tile_of(row, picked, 0, TILE, LAYOUT, HAS_IDS, HAS_EDITS)[0]
    for first in range(0, picked.number, TILE):
        # of the next tile, while this one is measured
        next_x = tile_of(row, picked, first + TILE, TILE, LAYOUT, HAS_IDS, HAS_EDITS)[0]
        differences = draw.top - x
        exponents = differences * scale
        weights = tl.exp2(-exponents)
        measures = tl.where(by_mass, weights, 1.0)
        is_nearer = differences <= near_reach
        is_within = differences <= far_reach
        nearer += summed(tl.where(is_nearer, measures, 0.0), LAYOUT.each)
        within += summed(tl.where(is_within, measures, 0.0), LAYOUT.each)
        is_left = is_nearer & (weights >= draw.options.min_p)
        left += summed(tl.where(is_left, weights, 0.0), LAYOUT.each)
        found = listed(
            x,
            is_within & (differences > near_reach),
            picked,
            first,
            found,
            candidates.pair_ptr,
            LAYOUT,
            TILE * LAYOUT.chunk_size // 512,
        )
        columns = columns_of(picked, first, places, TILE, LAYOUT)[0]
        words = words_of_tile(row, picked, columns, first, draw.stream, TILE, LAYOUT, HAS_IDS)
        best, drawn = _best_of_tile(
            differences, exponents, weights, is_nearer, words, columns, draw.options, best, drawn
        )
        x = next_x
    tl.debug_barrier()
    return Passed(
        tl.sum(tl.sum(nearer, axis=1), axis=0),
        tl.sum(tl.sum(within, axis=1), axis=0),
        found,
        Drawn(best, drawn, tl.sum(tl.sum(left, axis=1), axis=0)),
    )


@triton.jit(noinline=True)
def listed_within(
    key,
    draw,
    candidates,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """List the ids of the picked chunks up to a key; how many they are, or more than LISTED."""
    picked = candidates.picked
    reach = reach_of(key, draw.options.temperature)
    found = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    while (first < picked.number) & (found <= LISTED):
        x = tile_of(draw.row, picked, first, TILE, LAYOUT, HAS_IDS, HAS_EDITS)[0]
        is_within = draw.top - x <= reach
        found = listed(x, is_within, picked, first, found, candidates.pair_ptr, LAYOUT, WARPS)
        first += TILE
    tl.debug_barrier()
    return found


@triton.jit(noinline=True)
def measured(
    k1,
    k2,
    k3,
    level,
    by_mass,
    draw,
    picked,
    BY_COLUMN: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """The measure of the ids whose key is at most k1, k2, k3; one pass over the picked chunks.

    The measure is the number of ids, or their mass. By column only ids of depth ``level`` count,
    their key is the column.
    """
    SIZE: tl.constexpr = LAYOUT.chunk_size
    m1 = tl.zeros([TILE, SIZE], tl.float32)
    m2 = tl.zeros([TILE, SIZE], tl.float32)
    m3 = tl.zeros([TILE, SIZE], tl.float32)
    for first in range(0, picked.number, TILE):
        x, columns = tile_of(draw.row, picked, first, TILE, LAYOUT, HAS_IDS, HAS_EDITS)
        depths = tl.div_rn(draw.top - x, draw.options.temperature)
        keys = depths.to(tl.int32, bitcast=True)
        if BY_COLUMN:
            keys = tl.where(keys == level, columns, NO_COLUMN)
        weights = tl.where(by_mass, tl.exp(-depths), 1.0)
        m1 += tl.where(keys <= k1, weights, 0.0)
        m2 += tl.where(keys <= k2, weights, 0.0)
        m3 += tl.where(keys <= k3, weights, 0.0)
    return (
        tl.sum(tl.sum(m1, axis=1), axis=0),
        tl.sum(tl.sum(m2, axis=1), axis=0),
        tl.sum(tl.sum(m3, axis=1), axis=0),
    )


@triton.jit
def drawn_of_list(draw, candidates, limit, last, others, HAS_IDS: tl.constexpr, PAGE: tl.constexpr):
    """What is drawn of a list, up to a key and a column at it, and of others."""
    best = others.score
    drawn = others.column
    left = others.mass
    for first in range(0, candidates.found, PAGE):
        places = first + tl.arange(0, PAGE)
        here = places < candidates.found
        x, columns = of_pairs(tl.load(candidates.pair_ptr + places, mask=here, other=0))
        depths = depths_of(x, here, draw.top, draw.options.temperature)
        keys = depths.to(tl.int32, bitcast=True)
        weights = tl.exp(-depths)
        kept = (keys < limit) | ((keys == limit) & (columns <= last))
        kept = here & kept & (weights >= draw.options.min_p)
        left += tl.sum(tl.where(kept, weights, 0.0), axis=0)
        ids = ids_of(draw.row, columns, kept, HAS_IDS)
        noisy = tl.where(kept, gumbel(words_of(ids, draw.stream)) - depths, float("-inf"))
        best, drawn = better(noisy, columns, best, drawn)
    return Drawn(best, drawn, left)


@triton.jit(noinline=True)
def drawn_of_chunks(
    draw,
    picked,
    limit,
    last,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """As `drawn_of_list`, of all ids of the picked chunks."""
    SUMS: tl.constexpr = LAYOUT.chunk_size // LAYOUT.each
    row = draw.row
    options = draw.options
    scale = scale_of(options.temperature)
    before_reach = reach_of(limit - 1, options.temperature)
    limit_reach = reach_of(limit, options.temperature)
    best = float("-inf")
    drawn = NO_COLUMN
    left = tl.zeros([TILE, SUMS], tl.float32)
    places = tl.arange(0, LAYOUT.chunk_size)
    x = tile_of(row, picked, 0, TILE, LAYOUT, HAS_IDS, HAS_EDITS)[0]
    for first in range(0, picked.number, TILE):
        next_x = tile_of(row, picked, first + TILE, TILE, LAYOUT, HAS_IDS, HAS_EDITS)[0]
        columns = columns_of(picked, first, places, TILE, LAYOUT)[0]
        differences = draw.top - x
        exponents = differences * scale
        weights = tl.exp2(-exponents)
        kept = (differences <= before_reach) | ((differences <= limit_reach) & (columns <= last))
        left += summed(tl.where(kept & (weights >= options.min_p), weights, 0.0), LAYOUT.each)
        words = words_of_tile(row, picked, columns, first, draw.stream, TILE, LAYOUT, HAS_IDS)
        best, drawn = _best_of_tile(
            differences, exponents, weights, kept, words, columns, options, best, drawn
        )
        x = next_x
    return Drawn(best, drawn, tl.sum(tl.sum(left, axis=1), axis=0))


@triton.jit
def _best_of_tile(differences, exponents, weights, kept, words, columns, options, best, drawn):
    """The highest noisy score of what is kept of a tile and of ``best``, and its lowest column.

    Exact scores have only tiles one of whose bounds reaches the best so far: few of them.
    """
    # by a little more than rounding min-p may keep some here
    kept = kept & (weights * 1.0001 >= options.min_p)
    bound = tl.max(tl.where(kept, gumbel_bound(words) - exponents, float("-inf")))
    if (bound > float("-inf")) & (bound + BOUND_SLACK >= best * LOG2_E):
        depths = tl.div_rn(differences, options.temperature)
        kept = kept & (tl.exp(-depths) >= options.min_p)
        noisy = tl.where(kept, gumbel(words) - depths, float("-inf"))
        best, drawn = better(noisy, columns, best, drawn)
    return best, drawn


@triton.jit
def better(noisy, columns, best, drawn):
    """The highest of noisy scores and of ``best``, and its lowest column."""
    highest = tl.max(noisy)
    at = tl.min(tl.where((noisy == highest) & (noisy > float("-inf")), columns, NO_COLUMN))
    at = tl.where(highest == best, tl.minimum(at, drawn), at)
    return tl.maximum(best, highest), tl.where(highest >= best, at, drawn)
