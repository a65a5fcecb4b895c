"""Passes over the candidates of a truncated row; part of `sample_finish_kernel`.

A pass reads the selected chunks in tiles [TILE chunks, chunk size] and does some of this:

1. List: append the ids in a range of depths to the row's list in memory, as packed values and
   columns (`list_values`, `list_between`, `list_within`; `list_groups` for few chunks).
2. Measure: count the ids up to given depths, or sum their weights (`measure_up_to`,
   `list_between`).
3. Sample: keep the id with the highest noisy score; exact noise is computed only for tiles whose
   bound reaches the best score so far (`list_between`, `sample_chunks`, `sample_list`).

The *key* of an id is its depth as an integer with the same bits: depths are not negative, so keys
have the order of depths. Passes compare differences to the row's maximum with `max_difference` of a
key instead, which saves the division.

If rows are few, several programs share a pass over one row: each reads every NUM_SHARES-th chunk
and writes its results, and the last one to finish merges them and continues (`join_shares`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.ops.logit_rows.processing_triton import load_allowed_nibbles
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
def list_groups(
    logit_row,
    min_value,
    selected,
    group_ptr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """List the groups of four neighbours with a value of at least ``min_value``; returns how many.

    The selected chunks fit one tile. A group takes a quarter of the stores that its values take.
    Only disallowed tokens are processed: further processing that only lowers values cannot add
    groups.
    """
    GROUPS: tl.constexpr = LAYOUT.chunk_size // 4
    ROWS: tl.constexpr = TILE // WARPS
    x = load_tile(logit_row, selected, 0, TILE, LAYOUT, HAS_IDS, False)[0]
    columns = tile_columns(selected, 0, tl.arange(0, GROUPS) * 4, TILE, LAYOUT)[0]
    x = tl.reshape(x, [TILE, GROUPS, 4])
    if HAS_PROCESSING and not HAS_IDS:  # noqa: SIM102 - known when it is compiled
        if logit_row.processing.allowed_row >= 0:
            bits = load_allowed_nibbles(logit_row.processing, columns, columns < logit_row.vocab)
            bits = (bits[:, :, None] >> tl.arange(0, 4)[None, None, :]) & 1
            x = tl.where(bits != 0, x, float("-inf"))
    is_listed = tl.max(x, axis=2) >= min_value
    num_in_group = tl.reshape(is_listed.to(tl.int32), [ROWS, WARPS, GROUPS])
    num_of_thread = tl.reshape(tl.sum(num_in_group, axis=0), [WARPS * GROUPS])
    start = tl.reshape(tl.cumsum(num_of_thread, axis=0) - num_of_thread, [WARPS, GROUPS])
    index = start[None, :, :] + tl.cumsum(num_in_group, axis=0) - num_in_group
    # as in `list_values`
    index = tl.reshape(index, [TILE * GROUPS])
    columns = tl.reshape(columns, index.shape).to(tl.int64)
    tl.store(group_ptr + index, columns, mask=tl.reshape(is_listed, index.shape))
    return tl.sum(num_of_thread, axis=0)


@triton.jit
def list_from_groups(
    logit_row,
    min_value,
    group_ptr,
    num_groups,
    pair_ptr,
    GROUPS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """List the values of groups that are at least ``min_value``; returns how many."""
    offsets = tl.arange(0, GROUPS)
    firsts = tl.load(group_ptr + offsets, mask=offsets < num_groups, other=logit_row.vocab).to(
        tl.int32
    )
    columns = tl.reshape(firsts[:, None] + tl.arange(0, 4)[None, :], [GROUPS * 4])
    x = load_values(logit_row, columns, columns < logit_row.vocab, HAS_IDS, HAS_PROCESSING)
    is_listed = (x >= min_value).to(tl.int32)
    index = tl.cumsum(is_listed, axis=0) - is_listed
    tl.store(pair_ptr + index, pack_pairs(x, columns), mask=is_listed != 0)
    return tl.sum(is_listed, axis=0)


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


MAX_UNSHARED_CHUNKS = tl.constexpr(64)
"""Up to this number of selected chunks, one program per row reads them alone."""
PARTIALS = tl.constexpr(6)
"""Number of partial results per share of a row."""


class RowShare(NamedTuple):
    """How programs share a row; pointers are those of the row."""

    number: tl.tensor  # index of this program
    arrived_ptr: tl.tensor  # int32: number of programs that have written their results
    partial_ptr: tl.tensor  # [PARTIALS, NUM_SHARES] float32
    chunks_offset: tl.tensor  # offset of the share's chunks after all selected chunks


@triton.jit
def select_share_chunks(selected, row_share, PADDED_CHUNKS: tl.constexpr, NUM_SHARES: tl.constexpr):
    """The selected chunks of a share: every NUM_SHARES-th, written after all selected chunks."""
    offsets = tl.arange(0, PADDED_CHUNKS // NUM_SHARES)
    index = offsets * NUM_SHARES + row_share.number
    inside = index < selected.num_chunks
    chunks = tl.load(selected.ptr + index, mask=inside, other=0)
    tl.store(selected.ptr + row_share.chunks_offset + offsets, chunks, mask=inside)
    num_chunks = (selected.num_chunks + (NUM_SHARES - 1) - row_share.number) // NUM_SHARES
    return SelectedChunks(selected.ptr + row_share.chunks_offset, num_chunks)


@triton.jit
def arrive_and_check_last(row_share, NUM_SHARES: tl.constexpr):
    """Signal that this share has written its results; returns whether it is the last one."""
    # one thread signals for all of them
    tl.debug_barrier()
    return tl.atomic_add(row_share.arrived_ptr, 1, sem="acq_rel") == NUM_SHARES - 1


@triton.jit
def join_shares(passed, row_share, pair_ptr, NUM_SHARES: tl.constexpr):
    """Combine the results of all shares of a row, in the last program to arrive; returns them and
    whether this is that program.

    The list of share s starts at ``pair_ptr + LIST_SIZE * s``; the joint list follows the last one.
    """
    partial_ptr = row_share.partial_ptr + row_share.number
    tl.store(partial_ptr, passed.near_measure)
    tl.store(partial_ptr + NUM_SHARES, passed.far_measure)
    tl.store(partial_ptr + 2 * NUM_SHARES, passed.num_listed.to(tl.float32, bitcast=True))
    tl.store(partial_ptr + 3 * NUM_SHARES, passed.sampled.score)
    tl.store(partial_ptr + 4 * NUM_SHARES, passed.sampled.column.to(tl.float32, bitcast=True))
    tl.store(partial_ptr + 5 * NUM_SHARES, passed.sampled.mass)
    is_last = arrive_and_check_last(row_share, NUM_SHARES)
    near_measure = passed.near_measure
    far_measure = passed.far_measure
    num_listed = tl.full([], 0, tl.int32)
    best = passed.sampled.score
    sampled = passed.sampled.column
    kept_mass = passed.sampled.mass
    if is_last:
        shares = tl.arange(0, NUM_SHARES)
        all_ptr = row_share.partial_ptr + shares
        near_measure = tl.sum(tl.load(all_ptr), axis=0)
        far_measure = tl.sum(tl.load(all_ptr + NUM_SHARES), axis=0)
        share_counts = tl.load(all_ptr + 2 * NUM_SHARES).to(tl.int32, bitcast=True)
        scores = tl.load(all_ptr + 3 * NUM_SHARES)
        columns = tl.load(all_ptr + 4 * NUM_SHARES).to(tl.int32, bitcast=True)
        kept_mass = tl.sum(tl.load(all_ptr + 5 * NUM_SHARES), axis=0)
        best, sampled = merge_best(scores, columns, float("-inf"), NO_COLUMN)
        num_listed = tl.sum(share_counts, axis=0)
        if num_listed <= LIST_CAPACITY:
            PAGE: tl.constexpr = LIST_CAPACITY // NUM_SHARES
            starts = tl.cumsum(share_counts, axis=0) - share_counts
            to_ptr = pair_ptr + NUM_SHARES * LIST_SIZE + starts[:, None]
            from_ptr = pair_ptr + shares[:, None] * LIST_SIZE
            for first in range(0, tl.max(share_counts, axis=0), PAGE):
                offsets = first + tl.arange(0, PAGE)[None, :]
                inside = offsets < share_counts[:, None]
                pairs = tl.load(from_ptr + offsets, mask=inside, other=0)
                tl.store(to_ptr + offsets, pairs, mask=inside)
            tl.debug_barrier()
    return PassResult(
        near_measure, far_measure, num_listed, Sampled(best, sampled, kept_mass)
    ), is_last
