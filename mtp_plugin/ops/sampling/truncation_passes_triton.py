"""Passes over the candidates of a truncated row; part of `sample_finish_kernel`.

A pass reads the selected chunks in tiles [TILE chunks, chunk size] and does some of this:

1. List: append the ids in a range of depths to the row's list in memory, as packed values and
   columns (`list_values`, `list_between`, `list_within`).
2. Measure: count the ids up to given depths, or sum their weights (`measure_up_to`,
   `list_between`).
3. Sample: keep the id with the highest noisy score; exact noise is computed only for tiles whose
   bound reaches the best score so far (`list_between`, `sample_chunks`, `sample_list`).

The *key* of an id is its depth as an integer with the same bits: depths are not negative, so keys
have the order of depths. Passes compare differences to the row's maximum with `max_difference` of a
key instead, which saves the division.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.ops.logit_rows.rows_triton import LOG2_E, NO_COLUMN, SelectedChunks, tile_columns
from mtp_plugin.ops.sampling.row_triton import (
    BOUND_SLACK,
    gumbel,
    gumbel_bound,
    load_ids,
    load_values,
    log2_scale,
    philox_of_groups,
    philox_of_ids,
)

LIST_CAPACITY = tl.constexpr(4096)
"""Capacity of the list of candidates."""
THREAD_VALUES = tl.constexpr(32)
"""Largest number of values of a tile per thread."""
LIST_SIZE = tl.constexpr(LIST_CAPACITY + 2 * THREAD_VALUES)
"""Size of a row's list in memory: threads may write past a full list."""


class Candidates(NamedTuple):
    """The ids that truncation may keep: all of the selected chunks, or a list if they are few."""

    selected: SelectedChunks
    pair_ptr: tl.tensor  # [LIST_SIZE] int64, by `pack_pairs`
    num_listed: tl.tensor  # length of the list; more than LIST_CAPACITY: incomplete


@triton.jit
def load_tile(
    logit_row,
    selected,
    first,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """Load values and columns of selected chunks, both [TILE, chunk size]; -inf outside."""
    columns, is_chunk = tile_columns(selected, first, tl.arange(0, LAYOUT.chunk_size), TILE, LAYOUT)
    inside = is_chunk[:, None] & (columns < logit_row.vocab)
    return load_values(logit_row, columns, inside, HAS_IDS, HAS_PROCESSING), columns


@triton.jit
def philox_of_tile(
    logit_row,
    selected,
    columns,
    first,
    stream,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """The random words of the ids of `load_tile`."""
    SIZE: tl.constexpr = LAYOUT.chunk_size
    if HAS_IDS:
        return philox_of_ids(
            load_ids(logit_row, columns, columns < logit_row.vocab, HAS_IDS), stream
        )
    else:
        offsets = tl.arange(0, SIZE // 4) * 4
        firsts = tile_columns(selected, first, offsets, TILE, LAYOUT)[0]
        w0, w1, w2, w3 = philox_of_groups(firsts >> 2, stream)
        return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [TILE, SIZE])


@triton.jit
def pack_pairs(x, columns):
    """Pack values and columns into 64 bits each."""
    # unsigned, so that the column is not sign-extended
    return (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | columns.to(tl.uint32).to(tl.int64)


@triton.jit
def unpack_pairs(pairs):
    """Unpack values and columns of `pack_pairs`."""
    return (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True), pairs.to(tl.int32)


@triton.jit
def compute_depths(x, inside, row_max, temperature):
    """The depths of values, (row_max - x) / T; infinite where not ``inside``.

    Operands of 0 or infinity are replaced, since they send the whole warp through the slow path of
    the division.
    """
    differences = row_max - x
    is_positive = inside & (differences > 0)
    depths = tl.div_rn(tl.where(is_positive, differences, temperature), temperature)
    return tl.where(is_positive, depths, tl.where(inside, 0.0, float("inf")))


@triton.jit
def list_values(
    x, is_listed, selected, first, num_listed, pair_ptr, LAYOUT: tl.constexpr, WARPS: tl.constexpr
):
    """Append the values of a tile that are ``is_listed`` to a list; returns the list's new length.

    A thread holds groups of four neighbours and appends all of its values at consecutive indices,
    so that threads exchange only one count each.
    """
    TILE: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1] // 4
    ROWS: tl.constexpr = TILE // WARPS
    x02, x13 = tl.split(tl.reshape(x, [TILE, GROUPS, 2, 2]))
    x0, x2 = tl.split(x02)
    x1, x3 = tl.split(x13)
    is_listed02, is_listed13 = tl.split(tl.reshape(is_listed.to(tl.int32), [TILE, GROUPS, 2, 2]))
    is_listed0, is_listed2 = tl.split(is_listed02)
    is_listed1, is_listed3 = tl.split(is_listed13)
    num_in_group = tl.reshape(
        is_listed0 + is_listed1 + is_listed2 + is_listed3, [ROWS, WARPS, GROUPS]
    )
    num_of_thread = tl.reshape(tl.sum(num_in_group, axis=0), [WARPS * GROUPS])
    start = num_listed + tl.cumsum(num_of_thread, axis=0) - num_of_thread
    start = tl.reshape(tl.minimum(start, LIST_CAPACITY), [WARPS, GROUPS])
    index = start[None, :, :] + tl.cumsum(num_in_group, axis=0) - num_in_group
    # one-dimensional, or the compiler exchanges the stored values between threads
    index = tl.reshape(index, [TILE * GROUPS])
    offsets = tl.arange(0, GROUPS) * 4
    columns = tile_columns(selected, first, offsets, TILE, LAYOUT)[0]
    columns = tl.reshape(columns, [TILE * GROUPS])
    index = _store_pairs(x0, columns, is_listed0, index, pair_ptr)
    index = _store_pairs(x1, columns + 1, is_listed1, index, pair_ptr)
    index = _store_pairs(x2, columns + 2, is_listed2, index, pair_ptr)
    _store_pairs(x3, columns + 3, is_listed3, index, pair_ptr)
    return num_listed + tl.sum(num_of_thread, axis=0)


@triton.jit
def _store_pairs(x, columns, is_listed, index, pair_ptr):
    """Store the values that are ``is_listed`` at ``index``; returns the next indices."""
    is_listed = tl.reshape(is_listed, index.shape)
    pairs = pack_pairs(tl.reshape(x, index.shape), columns)
    tl.store(pair_ptr + index, pairs, mask=is_listed != 0)
    return index + is_listed


MIN_REQUIRED = tl.constexpr(1e-30)
INF_KEY = tl.constexpr(2139095040)
"""Key of an infinite depth."""
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
HALF_STEP = tl.constexpr(5.960464477539063e-08)
"""Half the spacing of smaller numbers, relative to it."""


class Sampled(NamedTuple):
    """The token sampled from some ids, and their probability mass."""

    score: tl.tensor  # the highest noisy score; -inf: no id
    column: tl.tensor  # the lowest column with this score
    mass: tl.tensor


class PassResult(NamedTuple):
    """Results of a pass over selected chunks."""

    near_measure: tl.tensor  # measure up to the first key
    far_measure: tl.tensor  # measure up to the second key
    num_listed: tl.tensor  # number of ids between them
    sampled: Sampled  # from the ids up to the first key


@triton.jit
def max_difference(key, temperature):
    """The largest difference of values whose depth has at most this key; -1 for a key below 0.

    It differs from depth times temperature by rounding only.
    """
    half_step = (temperature * SMALLEST_NORMAL) * HALF_STEP
    estimates = key.to(tl.float32, bitcast=True) * temperature + half_step
    estimates = estimates.to(tl.int32, bitcast=True)
    estimates = tl.maximum(estimates - 16 + tl.arange(0, 32), 0)
    differences = estimates.to(tl.float32, bitcast=True)
    keys = tl.div_rn(differences, temperature).to(tl.int32, bitcast=True)
    within = (keys <= key) & (estimates < INF_KEY)
    return tl.max(tl.where(within, differences, -1.0), axis=0)


@triton.jit
def sum_neighbours(x, EACH: tl.constexpr):
    """Sum a tile over the ``EACH`` neighbours that a thread holds."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // EACH, EACH]), axis=2)


@triton.jit(noinline=True)
def list_between(
    near,
    far,
    by_mass,
    sample,
    candidates,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """List the ids between two keys and sample from those before, in one pass over all chunks."""
    NUM_SUMS: tl.constexpr = LAYOUT.chunk_size // LAYOUT.each
    logit_row = sample.logit_row
    selected = candidates.selected
    scale = log2_scale(sample.options.temperature)
    near_difference = max_difference(near, sample.options.temperature)
    far_difference = max_difference(far, sample.options.temperature)
    near_measure = tl.zeros([TILE, NUM_SUMS], tl.float32)
    far_measure = tl.zeros([TILE, NUM_SUMS], tl.float32)
    kept_mass = tl.zeros([TILE, NUM_SUMS], tl.float32)
    num_listed = 0
    best = float("-inf")
    sampled = NO_COLUMN
    offsets = tl.arange(0, LAYOUT.chunk_size)
    # all threads have read the previous list
    tl.debug_barrier()
    x = load_tile(logit_row, selected, 0, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING)[0]
    for first in range(0, selected.num_chunks, TILE):
        # load the next tile while this one is measured
        next_x = load_tile(
            logit_row, selected, first + TILE, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING
        )[0]
        differences = sample.row_max - x
        exponents = differences * scale
        weights = tl.exp2(-exponents)
        measures = tl.where(by_mass, weights, 1.0)
        is_nearer = differences <= near_difference
        is_within = differences <= far_difference
        near_measure += sum_neighbours(tl.where(is_nearer, measures, 0.0), LAYOUT.each)
        far_measure += sum_neighbours(tl.where(is_within, measures, 0.0), LAYOUT.each)
        is_kept = is_nearer & (weights >= sample.options.min_p)
        kept_mass += sum_neighbours(tl.where(is_kept, weights, 0.0), LAYOUT.each)
        num_listed = list_values(
            x,
            is_within & (differences > near_difference),
            selected,
            first,
            num_listed,
            candidates.pair_ptr,
            LAYOUT,
            TILE * LAYOUT.chunk_size // 512,
        )
        columns = tile_columns(selected, first, offsets, TILE, LAYOUT)[0]
        words = philox_of_tile(
            logit_row, selected, columns, first, sample.stream, TILE, LAYOUT, HAS_IDS
        )
        best, sampled = _best_of_tile(
            differences,
            exponents,
            weights,
            is_nearer,
            words,
            columns,
            sample.options,
            best,
            sampled,
        )
        x = next_x
    tl.debug_barrier()
    return PassResult(
        tl.sum(tl.sum(near_measure, axis=1), axis=0),
        tl.sum(tl.sum(far_measure, axis=1), axis=0),
        num_listed,
        Sampled(best, sampled, tl.sum(tl.sum(kept_mass, axis=1), axis=0)),
    )


@triton.jit(noinline=True)
def list_within(
    key,
    sample,
    candidates,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    WARPS: tl.constexpr,
):
    """List the ids up to a key; returns how many, or more than LIST_CAPACITY."""
    selected = candidates.selected
    key_difference = max_difference(key, sample.options.temperature)
    num_listed = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    while (first < selected.num_chunks) & (num_listed <= LIST_CAPACITY):
        x = load_tile(sample.logit_row, selected, first, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING)[0]
        is_within = sample.row_max - x <= key_difference
        num_listed = list_values(
            x, is_within, selected, first, num_listed, candidates.pair_ptr, LAYOUT, WARPS
        )
        first += TILE
    tl.debug_barrier()
    return num_listed


@triton.jit(noinline=True)
def measure_up_to(
    k1,
    k2,
    k3,
    level,
    by_mass,
    sample,
    selected,
    BY_COLUMN: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """The measures of the ids with a key of at most k1, k2 and k3, in one pass over the chunks.

    The measure is the number of ids or their probability mass. With BY_COLUMN only ids with the
    depth ``level`` count, and the key is the column.
    """
    SIZE: tl.constexpr = LAYOUT.chunk_size
    m1 = tl.zeros([TILE, SIZE], tl.float32)
    m2 = tl.zeros([TILE, SIZE], tl.float32)
    m3 = tl.zeros([TILE, SIZE], tl.float32)
    for first in range(0, selected.num_chunks, TILE):
        x, columns = load_tile(
            sample.logit_row, selected, first, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING
        )
        depths = tl.div_rn(sample.row_max - x, sample.options.temperature)
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
def sample_list(sample, candidates, limit, last, others, HAS_IDS: tl.constexpr, PAGE: tl.constexpr):
    """Sample from a list up to a key and a column at that key, and from ``others``."""
    best = others.score
    sampled = others.column
    kept_mass = others.mass
    for first in range(0, candidates.num_listed, PAGE):
        offsets = first + tl.arange(0, PAGE)
        inside = offsets < candidates.num_listed
        x, columns = unpack_pairs(tl.load(candidates.pair_ptr + offsets, mask=inside, other=0))
        depths = compute_depths(x, inside, sample.row_max, sample.options.temperature)
        keys = depths.to(tl.int32, bitcast=True)
        weights = tl.exp(-depths)
        is_kept = (keys < limit) | ((keys == limit) & (columns <= last))
        is_kept = inside & is_kept & (weights >= sample.options.min_p)
        kept_mass += tl.sum(tl.where(is_kept, weights, 0.0), axis=0)
        ids = load_ids(sample.logit_row, columns, is_kept, HAS_IDS)
        noisy = tl.where(is_kept, gumbel(philox_of_ids(ids, sample.stream)) - depths, float("-inf"))
        best, sampled = merge_best(noisy, columns, best, sampled)
    return Sampled(best, sampled, kept_mass)


@triton.jit(noinline=True)
def sample_chunks(
    sample,
    selected,
    limit,
    last,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """`sample_list` for all ids of the selected chunks."""
    NUM_SUMS: tl.constexpr = LAYOUT.chunk_size // LAYOUT.each
    logit_row = sample.logit_row
    options = sample.options
    scale = log2_scale(options.temperature)
    before_difference = max_difference(limit - 1, options.temperature)
    limit_difference = max_difference(limit, options.temperature)
    best = float("-inf")
    sampled = NO_COLUMN
    kept_mass = tl.zeros([TILE, NUM_SUMS], tl.float32)
    offsets = tl.arange(0, LAYOUT.chunk_size)
    x = load_tile(logit_row, selected, 0, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING)[0]
    for first in range(0, selected.num_chunks, TILE):
        next_x = load_tile(
            logit_row, selected, first + TILE, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING
        )[0]
        columns = tile_columns(selected, first, offsets, TILE, LAYOUT)[0]
        differences = sample.row_max - x
        exponents = differences * scale
        weights = tl.exp2(-exponents)
        is_kept = (differences <= before_difference) | (
            (differences <= limit_difference) & (columns <= last)
        )
        kept_mass += sum_neighbours(
            tl.where(is_kept & (weights >= options.min_p), weights, 0.0), LAYOUT.each
        )
        words = philox_of_tile(
            logit_row, selected, columns, first, sample.stream, TILE, LAYOUT, HAS_IDS
        )
        best, sampled = _best_of_tile(
            differences, exponents, weights, is_kept, words, columns, options, best, sampled
        )
        x = next_x
    return Sampled(best, sampled, tl.sum(tl.sum(kept_mass, axis=1), axis=0))


@triton.jit
def _best_of_tile(differences, exponents, weights, is_kept, words, columns, options, best, sampled):
    """The highest noisy score of the kept ids of a tile and ``best``, and its lowest column.

    Exact scores are computed only for the few tiles with a bound that reaches the best so far.
    """
    # with a tolerance: weights are rounded differently here
    is_kept = is_kept & (weights * 1.0001 >= options.min_p)
    bound = tl.max(tl.where(is_kept, gumbel_bound(words) - exponents, float("-inf")))
    if (bound > float("-inf")) & (bound + BOUND_SLACK >= best * LOG2_E):
        depths = tl.div_rn(differences, options.temperature)
        is_kept = is_kept & (tl.exp(-depths) >= options.min_p)
        noisy = tl.where(is_kept, gumbel(words) - depths, float("-inf"))
        best, sampled = merge_best(noisy, columns, best, sampled)
    return best, sampled


@triton.jit
def merge_best(noisy, columns, best, sampled):
    """The highest of noisy scores and ``best``, and its lowest column."""
    highest = tl.max(noisy)
    column = tl.min(tl.where((noisy == highest) & (noisy > float("-inf")), columns, NO_COLUMN))
    column = tl.where(highest == best, tl.minimum(column, sampled), column)
    return tl.maximum(best, highest), tl.where(highest >= best, column, sampled)
