"""Passes over the candidates of a truncated row: list, measure and sample them.

The key of an id is its depth as an integer with the same bits: depths are not negative, so keys
have the order of depths. If rows are few, several programs share a pass over one row, and the last
one to finish continues with the row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.ops.logit_rows.processing_triton import allowed_fours
from mtp_plugin.ops.logit_rows.rows_triton import LOG2_E, NO_COLUMN, Picked, columns_of
from mtp_plugin.ops.sampling.row_triton import (
    BOUND_SLACK,
    gumbel,
    gumbel_bound,
    ids_of,
    scale_of,
    values_of,
    words_of,
    words_of_groups,
)

LISTED = tl.constexpr(4096)
"""Capacity of the list of candidates."""
OF_THREAD = tl.constexpr(32)
"""Largest number of values of a tile per thread."""
PLACES = tl.constexpr(LISTED + 2 * OF_THREAD)
"""Size of a row's list in memory: threads may write past a full list."""


class Candidates(NamedTuple):
    """The ids that truncation may keep: all of the picked chunks, or a list if they are few."""

    picked: Picked
    pair_ptr: tl.tensor  # of `pairs_of`
    found: tl.tensor  # length of the list; more than LISTED: incomplete


@triton.jit
def tile_of(
    row,
    picked,
    first,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """Load values and columns of picked chunks, both [TILE, chunk size]; -inf outside."""
    columns, here = columns_of(picked, first, tl.arange(0, LAYOUT.chunk_size), TILE, LAYOUT)
    inside = here[:, None] & (columns < row.vocab)
    return values_of(row, columns, inside, HAS_IDS, HAS_PROCESSING), columns


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
    """The random words of the ids of `tile_of`."""
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
    """Pack values and columns into 64 bits each."""
    # unsigned, so that the column is not sign-extended
    return (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | columns.to(tl.uint32).to(tl.int64)


@triton.jit
def of_pairs(pairs):
    """Unpack values and columns of `pairs_of`."""
    return (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True), pairs.to(tl.int32)


@triton.jit
def depths_of(x, here, top, temperature):
    """The depths of values, (top - x) / T; infinite where not ``here``.

    Operands of 0 or infinity are replaced, since they send the whole warp through the slow path of
    the division.
    """
    differences = top - x
    usual = here & (differences > 0)
    depths = tl.div_rn(tl.where(usual, differences, temperature), temperature)
    return tl.where(usual, depths, tl.where(here, 0.0, float("inf")))


@triton.jit
def list_values(x, here, picked, first, found, pair_ptr, LAYOUT: tl.constexpr, WARPS: tl.constexpr):
    """Append the values of `tile_of` that are ``here`` to a list of ``found``; returns its length.

    A thread holds groups of four neighbours and appends all of its values at consecutive indices,
    so that threads exchange only one count each.
    """
    TILE: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1] // 4
    ROWS: tl.constexpr = TILE // WARPS
    x02, x13 = tl.split(tl.reshape(x, [TILE, GROUPS, 2, 2]))
    x0, x2 = tl.split(x02)
    x1, x3 = tl.split(x13)
    here02, here13 = tl.split(tl.reshape(here.to(tl.int32), [TILE, GROUPS, 2, 2]))
    here0, here2 = tl.split(here02)
    here1, here3 = tl.split(here13)
    number = tl.reshape(here0 + here1 + here2 + here3, [ROWS, WARPS, GROUPS])
    of_thread = tl.reshape(tl.sum(number, axis=0), [WARPS * GROUPS])
    start = found + tl.cumsum(of_thread, axis=0) - of_thread
    start = tl.reshape(tl.minimum(start, LISTED), [WARPS, GROUPS])
    place = start[None, :, :] + tl.cumsum(number, axis=0) - number
    # one-dimensional, or the compiler exchanges the stored values between threads
    place = tl.reshape(place, [TILE * GROUPS])
    places = tl.arange(0, GROUPS) * 4
    columns = columns_of(picked, first, places, TILE, LAYOUT)[0]
    columns = tl.reshape(columns, [TILE * GROUPS])
    place = _store_pairs(x0, columns, here0, place, pair_ptr)
    place = _store_pairs(x1, columns + 1, here1, place, pair_ptr)
    place = _store_pairs(x2, columns + 2, here2, place, pair_ptr)
    _store_pairs(x3, columns + 3, here3, place, pair_ptr)
    return found + tl.sum(of_thread, axis=0)


@triton.jit
def list_groups(
    row,
    least,
    picked,
    group_ptr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """List the groups of four neighbours with a value of at least ``least``; returns how many.

    The picked chunks fit one tile. A group takes a quarter of the stores that its values take. Only
    disallowed tokens are processed: further processing that only lowers values cannot add groups.
    """
    GROUPS: tl.constexpr = LAYOUT.chunk_size // 4
    ROWS: tl.constexpr = TILE // WARPS
    x = tile_of(row, picked, 0, TILE, LAYOUT, HAS_IDS, False)[0]
    columns = columns_of(picked, 0, tl.arange(0, GROUPS) * 4, TILE, LAYOUT)[0]
    x = tl.reshape(x, [TILE, GROUPS, 4])
    if HAS_PROCESSING and not HAS_IDS:  # noqa: SIM102 - known when it is compiled
        if row.processing.allowed_row >= 0:
            bits = allowed_fours(row.processing, columns, columns < row.vocab)
            bits = (bits[:, :, None] >> tl.arange(0, 4)[None, None, :]) & 1
            x = tl.where(bits != 0, x, float("-inf"))
    here = tl.max(x, axis=2) >= least
    number = tl.reshape(here.to(tl.int32), [ROWS, WARPS, GROUPS])
    of_thread = tl.reshape(tl.sum(number, axis=0), [WARPS * GROUPS])
    start = tl.reshape(tl.cumsum(of_thread, axis=0) - of_thread, [WARPS, GROUPS])
    place = start[None, :, :] + tl.cumsum(number, axis=0) - number
    # as in `list_values`
    place = tl.reshape(place, [TILE * GROUPS])
    columns = tl.reshape(columns, place.shape).to(tl.int64)
    tl.store(group_ptr + place, columns, mask=tl.reshape(here, place.shape))
    return tl.sum(of_thread, axis=0)


@triton.jit
def list_from_groups(
    row,
    least,
    group_ptr,
    num_groups,
    pair_ptr,
    GROUPS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """List the values of groups that are at least ``least``; returns how many."""
    places = tl.arange(0, GROUPS)
    firsts = tl.load(group_ptr + places, mask=places < num_groups, other=row.vocab).to(tl.int32)
    columns = tl.reshape(firsts[:, None] + tl.arange(0, 4)[None, :], [GROUPS * 4])
    x = values_of(row, columns, columns < row.vocab, HAS_IDS, HAS_PROCESSING)
    here = (x >= least).to(tl.int32)
    place = tl.cumsum(here, axis=0) - here
    tl.store(pair_ptr + place, pairs_of(x, columns), mask=here != 0)
    return tl.sum(here, axis=0)


@triton.jit
def _store_pairs(x, columns, here, place, pair_ptr):
    """Store the values that are ``here`` at ``place``; returns the next indices."""
    here = tl.reshape(here, place.shape)
    pairs = pairs_of(tl.reshape(x, place.shape), columns)
    tl.store(pair_ptr + place, pairs, mask=here != 0)
    return place + here


LEAST_NEED = tl.constexpr(1e-30)
NO_DEPTH = tl.constexpr(2139095040)
"""Key of an infinite depth."""
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)
HALF_STEP = tl.constexpr(5.960464477539063e-08)
"""Half the spacing of smaller numbers, relative to it."""


class Sampled(NamedTuple):
    """The token sampled from some ids, and their probability mass."""

    score: tl.tensor  # the highest noisy score; -inf: no id
    column: tl.tensor  # the lowest column with this score
    mass: tl.tensor


class Passed(NamedTuple):
    """Results of a pass over picked chunks."""

    nearer: tl.tensor  # measure up to the first key
    within: tl.tensor  # measure up to the second key
    found: tl.tensor  # number of ids between them
    sampled: Sampled  # from the ids up to the first key


@triton.jit
def reach_of(key, temperature):
    """The largest difference of values whose depth has at most this key; -1 for a key below 0.

    It differs from depth times temperature by rounding only.
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
    SUMS: tl.constexpr = LAYOUT.chunk_size // LAYOUT.each
    row = sample.row
    picked = candidates.picked
    scale = scale_of(sample.options.temperature)
    near_reach = reach_of(near, sample.options.temperature)
    far_reach = reach_of(far, sample.options.temperature)
    nearer = tl.zeros([TILE, SUMS], tl.float32)
    within = tl.zeros([TILE, SUMS], tl.float32)
    kept_mass = tl.zeros([TILE, SUMS], tl.float32)
    found = 0
    best = float("-inf")
    sampled = NO_COLUMN
    places = tl.arange(0, LAYOUT.chunk_size)
    # all threads have read the previous list
    tl.debug_barrier()
    x = tile_of(row, picked, 0, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING)[0]
    for first in range(0, picked.number, TILE):
        # load the next tile while this one is measured
        next_x = tile_of(row, picked, first + TILE, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING)[0]
        differences = sample.top - x
        exponents = differences * scale
        weights = tl.exp2(-exponents)
        measures = tl.where(by_mass, weights, 1.0)
        is_nearer = differences <= near_reach
        is_within = differences <= far_reach
        nearer += summed(tl.where(is_nearer, measures, 0.0), LAYOUT.each)
        within += summed(tl.where(is_within, measures, 0.0), LAYOUT.each)
        is_kept = is_nearer & (weights >= sample.options.min_p)
        kept_mass += summed(tl.where(is_kept, weights, 0.0), LAYOUT.each)
        found = list_values(
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
        words = words_of_tile(row, picked, columns, first, sample.stream, TILE, LAYOUT, HAS_IDS)
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
    return Passed(
        tl.sum(tl.sum(nearer, axis=1), axis=0),
        tl.sum(tl.sum(within, axis=1), axis=0),
        found,
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
    """List the ids of the picked chunks up to a key; returns how many, or more than LISTED."""
    picked = candidates.picked
    reach = reach_of(key, sample.options.temperature)
    found = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    while (first < picked.number) & (found <= LISTED):
        x = tile_of(sample.row, picked, first, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING)[0]
        is_within = sample.top - x <= reach
        found = list_values(x, is_within, picked, first, found, candidates.pair_ptr, LAYOUT, WARPS)
        first += TILE
    tl.debug_barrier()
    return found


@triton.jit(noinline=True)
def measure(
    k1,
    k2,
    k3,
    level,
    by_mass,
    sample,
    picked,
    BY_COLUMN: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """The measures of the ids with a key of at most k1, k2 and k3, in one pass over picked chunks.

    The measure is the number of ids or their probability mass. With BY_COLUMN only ids with the
    depth ``level`` count, and the key is the column.
    """
    SIZE: tl.constexpr = LAYOUT.chunk_size
    m1 = tl.zeros([TILE, SIZE], tl.float32)
    m2 = tl.zeros([TILE, SIZE], tl.float32)
    m3 = tl.zeros([TILE, SIZE], tl.float32)
    for first in range(0, picked.number, TILE):
        x, columns = tile_of(sample.row, picked, first, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING)
        depths = tl.div_rn(sample.top - x, sample.options.temperature)
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
    for first in range(0, candidates.found, PAGE):
        places = first + tl.arange(0, PAGE)
        here = places < candidates.found
        x, columns = of_pairs(tl.load(candidates.pair_ptr + places, mask=here, other=0))
        depths = depths_of(x, here, sample.top, sample.options.temperature)
        keys = depths.to(tl.int32, bitcast=True)
        weights = tl.exp(-depths)
        kept = (keys < limit) | ((keys == limit) & (columns <= last))
        kept = here & kept & (weights >= sample.options.min_p)
        kept_mass += tl.sum(tl.where(kept, weights, 0.0), axis=0)
        ids = ids_of(sample.row, columns, kept, HAS_IDS)
        noisy = tl.where(kept, gumbel(words_of(ids, sample.stream)) - depths, float("-inf"))
        best, sampled = better(noisy, columns, best, sampled)
    return Sampled(best, sampled, kept_mass)


@triton.jit(noinline=True)
def sample_chunks(
    sample,
    picked,
    limit,
    last,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """`sample_list` for all ids of the picked chunks."""
    SUMS: tl.constexpr = LAYOUT.chunk_size // LAYOUT.each
    row = sample.row
    options = sample.options
    scale = scale_of(options.temperature)
    before_reach = reach_of(limit - 1, options.temperature)
    limit_reach = reach_of(limit, options.temperature)
    best = float("-inf")
    sampled = NO_COLUMN
    kept_mass = tl.zeros([TILE, SUMS], tl.float32)
    places = tl.arange(0, LAYOUT.chunk_size)
    x = tile_of(row, picked, 0, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING)[0]
    for first in range(0, picked.number, TILE):
        next_x = tile_of(row, picked, first + TILE, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING)[0]
        columns = columns_of(picked, first, places, TILE, LAYOUT)[0]
        differences = sample.top - x
        exponents = differences * scale
        weights = tl.exp2(-exponents)
        kept = (differences <= before_reach) | ((differences <= limit_reach) & (columns <= last))
        kept_mass += summed(tl.where(kept & (weights >= options.min_p), weights, 0.0), LAYOUT.each)
        words = words_of_tile(row, picked, columns, first, sample.stream, TILE, LAYOUT, HAS_IDS)
        best, sampled = _best_of_tile(
            differences, exponents, weights, kept, words, columns, options, best, sampled
        )
        x = next_x
    return Sampled(best, sampled, tl.sum(tl.sum(kept_mass, axis=1), axis=0))


@triton.jit
def _best_of_tile(differences, exponents, weights, kept, words, columns, options, best, sampled):
    """The highest noisy score of the kept ids of a tile and ``best``, and its lowest column.

    Exact scores are computed only for the few tiles with a bound that reaches the best so far.
    """
    # with a tolerance: weights are rounded differently here
    kept = kept & (weights * 1.0001 >= options.min_p)
    bound = tl.max(tl.where(kept, gumbel_bound(words) - exponents, float("-inf")))
    if (bound > float("-inf")) & (bound + BOUND_SLACK >= best * LOG2_E):
        depths = tl.div_rn(differences, options.temperature)
        kept = kept & (tl.exp(-depths) >= options.min_p)
        noisy = tl.where(kept, gumbel(words) - depths, float("-inf"))
        best, sampled = better(noisy, columns, best, sampled)
    return best, sampled


@triton.jit
def better(noisy, columns, best, sampled):
    """The highest of noisy scores and ``best``, and its lowest column."""
    highest = tl.max(noisy)
    at = tl.min(tl.where((noisy == highest) & (noisy > float("-inf")), columns, NO_COLUMN))
    at = tl.where(highest == best, tl.minimum(at, sampled), at)
    return tl.maximum(best, highest), tl.where(highest >= best, at, sampled)


UNSHARED = tl.constexpr(64)
"""Up to this number of picked chunks, one program per row reads them alone."""
PARTIALS = tl.constexpr(6)
"""Number of partial results per share of a row."""


class Split(NamedTuple):
    """How programs share a row; pointers are those of the row."""

    share: tl.tensor  # index of this program
    arrived_ptr: tl.tensor  # number of programs that have written their results
    partial_ptr: tl.tensor  # [PARTIALS, SHARES]
    chunks_at: tl.tensor  # offset of the share's chunks after all picked chunks


@triton.jit
def chunks_of_share(picked, split, ALL_CHUNKS: tl.constexpr, SHARES: tl.constexpr):
    """The picked chunks of a share: every SHARES-th, written after all picked chunks."""
    places = tl.arange(0, ALL_CHUNKS // SHARES)
    at = places * SHARES + split.share
    here = at < picked.number
    chunks = tl.load(picked.ptr + at, mask=here, other=0)
    tl.store(picked.ptr + split.chunks_at + places, chunks, mask=here)
    number = (picked.number + (SHARES - 1) - split.share) // SHARES
    return Picked(picked.ptr + split.chunks_at, number)


@triton.jit
def is_last_of(split, SHARES: tl.constexpr):
    """Signal that this share has written its results; returns whether it is the last one."""
    # one thread signals for all of them
    tl.debug_barrier()
    return tl.atomic_add(split.arrived_ptr, 1, sem="acq_rel") == SHARES - 1


@triton.jit
def join_shares(passed, split, pair_ptr, SHARES: tl.constexpr):
    """Combine the results of all shares of a row, in the last program to arrive; returns them and
    whether this is that program.

    The list of share s starts at ``pair_ptr + PLACES * s``; the joint list follows the last one.
    """
    partial_ptr = split.partial_ptr + split.share
    tl.store(partial_ptr, passed.nearer)
    tl.store(partial_ptr + SHARES, passed.within)
    tl.store(partial_ptr + 2 * SHARES, passed.found.to(tl.float32, bitcast=True))
    tl.store(partial_ptr + 3 * SHARES, passed.sampled.score)
    tl.store(partial_ptr + 4 * SHARES, passed.sampled.column.to(tl.float32, bitcast=True))
    tl.store(partial_ptr + 5 * SHARES, passed.sampled.mass)
    is_last = is_last_of(split, SHARES)
    nearer = passed.nearer
    within = passed.within
    found = tl.full([], 0, tl.int32)
    best = passed.sampled.score
    sampled = passed.sampled.column
    kept_mass = passed.sampled.mass
    if is_last:
        shares = tl.arange(0, SHARES)
        all_ptr = split.partial_ptr + shares
        nearer = tl.sum(tl.load(all_ptr), axis=0)
        within = tl.sum(tl.load(all_ptr + SHARES), axis=0)
        numbers = tl.load(all_ptr + 2 * SHARES).to(tl.int32, bitcast=True)
        scores = tl.load(all_ptr + 3 * SHARES)
        columns = tl.load(all_ptr + 4 * SHARES).to(tl.int32, bitcast=True)
        kept_mass = tl.sum(tl.load(all_ptr + 5 * SHARES), axis=0)
        best, sampled = better(scores, columns, float("-inf"), NO_COLUMN)
        found = tl.sum(numbers, axis=0)
        if found <= LISTED:
            PAGE: tl.constexpr = LISTED // SHARES
            starts = tl.cumsum(numbers, axis=0) - numbers
            to_ptr = pair_ptr + SHARES * PLACES + starts[:, None]
            from_ptr = pair_ptr + shares[:, None] * PLACES
            for first in range(0, tl.max(numbers, axis=0), PAGE):
                places = first + tl.arange(0, PAGE)[None, :]
                here = places < numbers[:, None]
                pairs = tl.load(from_ptr + places, mask=here, other=0)
                tl.store(to_ptr + places, pairs, mask=here)
            tl.debug_barrier()
    return Passed(nearer, within, found, Sampled(best, sampled, kept_mass)), is_last
