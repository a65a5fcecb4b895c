"""Truncation thresholds by search, for any number of candidates.

If candidates do not fit the list, a sample of the row estimates between which two depths the
threshold lies. One pass over the candidates measures the ids before these depths, which are
certainly kept and are sampled from at once, and lists the ids between them, where the threshold is
found exactly. Only rows with thousands of equal values take more passes.

If rows are few, several programs share this pass of a row, and the last one to finish continues.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.ops.logit_rows.rows_triton import NO_COLUMN, Picked, spread_of, starts_of
from mtp_plugin.ops.sampling.row_triton import values_of
from mtp_plugin.ops.sampling.truncation_passes_triton import (
    LEAST_NEED,
    LISTED,
    NO_DEPTH,
    PLACES,
    UNSHARED,
    Candidates,
    Sampled,
    chunks_of_share,
    depths_of,
    join_shares,
    list_between,
    list_within,
    measure,
    of_pairs,
    sample_chunks,
    sample_list,
)

HALVINGS = tl.constexpr(10)
"""Bisection steps per guess."""
DEVIATIONS = tl.constexpr(4.0)
"""Standard deviations of the estimate added on both sides of a guess."""
ROOM = tl.constexpr(0.85)
"""Share of the list that a guess fills at most."""
LN_2 = tl.constexpr(0.6931471805599453)
GUESSES = tl.constexpr(4)
"""Passes that try to list the ids around a threshold."""
WHOLE = tl.constexpr(3000)
"""Largest top-k that is listed completely, so that no threshold in it needs another pass."""


class Bounds(NamedTuple):
    """Known bounds of the key at which a measure is reached: above one key, at most another."""

    low: tl.tensor
    before: tl.tensor  # measure of the ids up to it
    high: tl.tensor
    end: tl.tensor  # a key of at least ``high``
    total: tl.tensor  # measure of the ids up to that key


@triton.jit(noinline=True)
def guess_bounds(
    need,
    by_mass,
    bounds,
    sample,
    SAMPLE: tl.constexpr,
    LAYOUT: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """Two keys within bounds between which a measure of ``need`` is likely reached.

    ``SAMPLE`` ids of all chunks estimate the measure between the bounds, from both ends, weighted
    by their errors.
    """
    low = bounds.low
    before = bounds.before
    high = bounds.high
    end = bounds.end
    total = bounds.total
    row = sample.row
    SKIP: tl.constexpr = ALL_CHUNKS // SAMPLE if ALL_CHUNKS > SAMPLE else 1
    SPARSE: tl.constexpr = LAYOUT.chunk_size * ALL_CHUNKS // SAMPLE // SKIP
    EVERY: tl.constexpr = SPARSE if SPARSE > 1 else 1
    PER_CHUNK: tl.constexpr = LAYOUT.chunk_size // EVERY
    FACTOR: tl.constexpr = SKIP * EVERY
    each = tl.arange(0, ALL_CHUNKS // SKIP * PER_CHUNK)
    chunks = each // PER_CHUNK * SKIP
    # at other indices in every chunk, against periodic rows
    places = each % PER_CHUNK * EVERY + (chunks * 5 + each % PER_CHUNK * 11) % EVERY
    columns = starts_of(chunks, LAYOUT)
    columns += spread_of(places, LAYOUT)
    inside = columns < row.vocab
    x = values_of(row, columns, inside, HAS_IDS, HAS_PROCESSING)
    depths = tl.div_rn(sample.top - x, sample.options.temperature)
    lowest = tl.where(low < 0, -1.0, low.to(tl.float32, bitcast=True))
    is_between = inside & (depths > lowest) & (depths <= end.to(tl.float32, bitcast=True))
    weights = tl.where(is_between, tl.where(by_mass, tl.exp(-depths), 1.0), 0.0)
    all_sum = tl.sum(weights, axis=0)
    all_square = tl.sum(weights * weights, axis=0)
    deepest = tl.where(is_between & (depths <= high.to(tl.float32, bitcast=True)), depths, 0.0)
    deepest = tl.max(deepest, axis=0)
    near = lowest
    near_end = deepest
    far = near
    far_end = deepest
    measure, error = _estimated(
        deepest, depths, weights, before, total, all_sum, all_square, FACTOR
    )
    is_met = measure - error >= need
    for _ in range(HALVINGS):
        middle = (near + near_end) * 0.5
        measure, error = _estimated(
            middle, depths, weights, before, total, all_sum, all_square, FACTOR
        )
        enough = measure + error >= need
        near_end = tl.where(enough, middle, near_end)
        near = tl.where(enough, near, middle)
        middle = (far + far_end) * 0.5
        measure, error = _estimated(
            middle, depths, weights, before, total, all_sum, all_square, FACTOR
        )
        enough = measure - error >= need
        far_end = tl.where(enough, middle, far_end)
        far = tl.where(enough, far, middle)
    crowd = tl.sum((is_between & (depths > near) & (depths <= far_end)).to(tl.float32), axis=0)
    share = 1.0 / tl.maximum(crowd * FACTOR / (LISTED * ROOM), 1.0)
    middle = (near + far_end) * 0.5
    far = tl.where(share < 1, middle + (far_end - middle) * share, far_end)
    near = tl.where(share < 1, middle + (near - middle) * share, near)
    # from the first to the last sampled depth between them, exactly; these may be equal
    inner = is_between & (depths > near) & (depths <= far)
    inner_last = tl.max(tl.where(inner, depths, -1.0), axis=0)
    inner_first = tl.min(tl.where(inner, depths, float("inf")), axis=0)
    near = tl.maximum(tl.where(inner_last < 0, near, inner_first), 0.0)
    far = tl.maximum(tl.where(inner_last < 0, far, inner_last), 0.0)
    near_key = near.to(tl.int32, bitcast=True) - 1
    far_key = tl.where(is_met, far.to(tl.int32, bitcast=True), high)
    near_key = tl.maximum(tl.minimum(near_key, high - 1), low)
    far_key = tl.minimum(tl.maximum(far_key, near_key + 1), high)
    return near_key, far_key


@triton.jit
def _estimated(depth, depths, weights, before, total, all_sum, all_square, FACTOR: tl.constexpr):
    """The estimated measure up to a depth, and its error."""
    inner = tl.where(depths <= depth, weights, 0.0)
    inner_sum = tl.sum(inner, axis=0)
    inner_square = tl.sum(inner * weights, axis=0)
    outer_square = tl.maximum(all_square - inner_square, 0.0)
    share = inner_square / tl.maximum(all_square, 1e-30)
    from_low = before + FACTOR * inner_sum
    from_end = total - FACTOR * (all_sum - inner_sum)
    error = DEVIATIONS * FACTOR * tl.sqrt(share * outer_square)
    return from_low + (from_end - from_low) * share, error


@triton.jit
def _narrowed(
    need,
    by_mass,
    bounds,
    sample,
    candidates,
    split,
    is_split,
    TILE: tl.constexpr,
    SAMPLE: tl.constexpr,
    LAYOUT: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Narrow bounds until the ids between them fit the list.

    Returns:
        The bounds and the measure up to the lower one, which is less than ``need``; the number of
        ids between them, which are listed if not more than LISTED; the sample from the ids up to
        the lower bound; and whether this program continues with the row, as one of those that share
        it does.
    """
    low = bounds.low
    before = bounds.before
    high = bounds.high
    end = bounds.end
    total = bounds.total
    number = tl.full([], LISTED + 1, tl.int32)
    best = float("-inf")
    column = NO_COLUMN
    kept_mass = 0.0
    guesses = 0
    is_last = tl.full([], 1, tl.int1)
    picked = candidates.picked
    own = picked
    if SHARES > 1 and is_split:
        own = chunks_of_share(picked, split, ALL_CHUNKS, SHARES)
    while (number > LISTED) & (high - low > 1) & (guesses < GUESSES):
        near, far = guess_bounds(
            need,
            by_mass,
            Bounds(low, before, high, end, total),
            sample,
            SAMPLE,
            LAYOUT,
            ALL_CHUNKS,
            HAS_IDS,
            HAS_PROCESSING,
        )
        searched = candidates
        is_shared = is_split & (guesses == 0)
        if SHARES > 1:
            searched = Candidates(
                Picked(
                    picked.ptr + tl.where(is_shared, split.chunks_at, 0),
                    tl.where(is_shared, own.number, picked.number),
                ),
                candidates.pair_ptr - tl.where(is_shared, (SHARES - split.share) * PLACES, 0),
                candidates.found,
            )
        passed = list_between(
            near, far, by_mass, sample, searched, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING
        )
        nearer = passed.nearer
        within = passed.within
        found = passed.found
        best = passed.sampled.score
        column = passed.sampled.column
        kept_mass = passed.sampled.mass
        if SHARES > 1 and is_shared:
            of_all, is_last = join_shares(
                passed, split, candidates.pair_ptr - SHARES * PLACES, SHARES
            )
            nearer = of_all.nearer
            within = of_all.within
            found = of_all.found
            best = of_all.sampled.score
            column = of_all.sampled.column
            kept_mass = of_all.sampled.mass
        is_nearer = (nearer >= need) & (near > low)
        # up to the highest key the measure is reached, also if rounding says otherwise
        is_farther = (within < need) & (far < high)
        number = tl.where(is_nearer | is_farther, number, found)
        end = tl.where(is_nearer, near, tl.where(is_farther, end, far))
        total = tl.where(is_nearer, nearer, tl.where(is_farther, total, within))
        before = tl.where(is_nearer, before, tl.where(is_farther, within, nearer))
        low = tl.where(is_nearer, low, tl.where(is_farther, far, near))
        high = tl.where(is_nearer, near, tl.where(is_farther, high, far))
        guesses += tl.where(is_last, 1, GUESSES)
    # programs that do not continue have nothing to search
    number = tl.where(is_last, number, 0)
    low = tl.where(is_last, low, high)
    return low, high, before, number, Sampled(best, column, kept_mass), is_last


@triton.jit
def _list_keys(sample, pair_ptr, number):
    """The keys of the list [LISTED], `NO_COLUMN` past its end."""
    places = tl.arange(0, LISTED)
    here = places < number
    x = of_pairs(tl.load(pair_ptr + places, mask=here, other=0))[0]
    keys = depths_of(x, here, sample.top, sample.options.temperature).to(tl.int32, bitcast=True)
    return tl.where(here, keys, NO_COLUMN)


@triton.jit
def _least_of_list(need, low, high, keys, by_mass):
    """`_least` for the keys of a list."""
    before = 0.0
    while low < high:
        half = (high - low) // 2
        k1 = low + half // 2
        k2 = low + half
        k3 = k2 + half // 2
        weights = tl.where(by_mass, tl.exp(-keys.to(tl.float32, bitcast=True)), 1.0)
        m1 = tl.sum(tl.where(keys <= k1, weights, 0.0), axis=0)
        m2 = tl.sum(tl.where(keys <= k2, weights, 0.0), axis=0)
        m3 = tl.sum(tl.where(keys <= k3, weights, 0.0), axis=0)
        low, high, before = _quarter(need, low, high, before, k1, k2, k3, m1, m2, m3)
    return low, before


@triton.jit
def _quarter(need, low, high, before, k1, k2, k3, m1, m2, m3):
    """The quarter in which the measure ``need`` is reached, and the measure before it."""
    before = tl.where(m1 >= need, before, tl.where(m2 >= need, m1, tl.where(m3 >= need, m2, m3)))
    low = tl.where(m1 >= need, low, tl.where(m2 >= need, k1, tl.where(m3 >= need, k2, k3)) + 1)
    high = tl.where(m1 >= need, k1, tl.where(m2 >= need, k2, tl.where(m3 >= need, k3, high)))
    return low, high, before


@triton.jit
def _least(
    need,
    low,
    high,
    before,
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
    """The least key in ``low .. high`` whose measure reaches ``need``, and the measure before it.

    ``high`` counts as reached; the measure below ``low`` is ``before``.
    """
    while low < high:
        half = (high - low) // 2
        k1 = low + half // 2
        k2 = low + half
        k3 = k2 + half // 2
        m1, m2, m3 = measure(
            k1,
            k2,
            k3,
            level,
            by_mass,
            sample,
            picked,
            BY_COLUMN,
            TILE,
            LAYOUT,
            HAS_IDS,
            HAS_PROCESSING,
        )
        low, high, before = _quarter(need, low, high, before, k1, k2, k3, m1, m2, m3)
    return low, before


@triton.jit(noinline=True)
def sample_many(
    sample,
    candidates,
    split,
    far,
    mass,
    LAYOUT: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    WARPS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """`sample_truncated` for any number of candidates.

    The kept tokens are all ids up to a depth, and the lowest columns of those at that depth.
    """
    TILE: tl.constexpr = WARPS * 512 // LAYOUT.chunk_size
    SEARCHED: tl.constexpr = WARPS * 256 // LAYOUT.chunk_size
    SAMPLE: tl.constexpr = WARPS * 1024
    top_k = sample.options.top_k
    top_p = sample.options.top_p
    picked = candidates.picked
    is_listed = candidates.found <= LISTED
    is_split = (SHARES > 1) & (not is_listed) & (picked.number > UNSHARED)
    is_split = is_split & (top_k == 0) & (top_p < 1)
    is_last = (SHARES == 1) | is_split | (split.share == 0)
    pair_ptr = candidates.pair_ptr
    if SHARES > 1:
        pair_ptr += tl.where(is_split, (SHARES - split.share) * PLACES, 0)
    candidates = Candidates(picked, pair_ptr, candidates.found)
    # the depth as a key, and how many of the ids at it are kept
    limit = (far * LN_2).to(tl.int32, bitcast=True)
    stay = 2147483647.0
    last = sample.row.vocab - 1
    # the row is measured up to here: by count first, then by probability mass
    end = tl.full([], NO_DEPTH, tl.int32)
    by_mass = top_k == 0
    total = tl.where(by_mass, mass, sample.row.vocab.to(tl.float32))
    number = candidates.found
    # of ids that are certainly kept and not listed
    best = float("-inf")
    column = NO_COLUMN
    kept_mass = 0.0
    nothing = tl.full([], -1, tl.int32)
    is_whole = (not is_listed) & (top_k > 0) & (top_k <= WHOLE)
    if is_whole:
        deepest = guess_bounds(
            top_k.to(tl.float32),
            by_mass,
            Bounds(nothing, 0.0, limit, end, total),
            sample,
            SAMPLE,
            LAYOUT,
            ALL_CHUNKS,
            HAS_IDS,
            HAS_PROCESSING,
        )[1]
        found = list_within(
            deepest, sample, candidates, 2 * TILE, LAYOUT, HAS_IDS, HAS_PROCESSING, WARPS
        )
        is_listed = (found <= LISTED) & ((found >= top_k) | (deepest >= limit))
        number = tl.where(is_listed, found, number)
    is_truncated = (top_k == 0) & (top_p >= 1)
    while not is_truncated:
        need = tl.where(by_mass, tl.maximum(top_p * mass, LEAST_NEED), top_k.to(tl.float32))
        low = nothing
        high = limit
        before = 0.0
        if not is_listed:
            low, high, before, number, sampled, is_last = _narrowed(
                need,
                by_mass,
                Bounds(low, before, high, end, total),
                sample,
                candidates,
                split,
                is_split,
                TILE,
                SAMPLE,
                LAYOUT,
                ALL_CHUNKS,
                HAS_IDS,
                HAS_PROCESSING,
                SHARES,
            )
            best = sampled.score
            column = sampled.column
            kept_mass = sampled.mass
        if number <= LISTED:
            keys = _list_keys(sample, candidates.pair_ptr, number)
            threshold, inner = _least_of_list(need - before, low + 1, high, keys, by_mass)
            before += inner
        else:
            threshold, before = _least(
                need,
                low + 1,
                high,
                before,
                0,
                by_mass,
                sample,
                picked,
                False,
                SEARCHED,
                LAYOUT,
                HAS_IDS,
                HAS_PROCESSING,
            )
        weight = tl.exp(-threshold.to(tl.float32, bitcast=True))
        # each of the equal ids is kept while the measure before it is less than needed
        equals = (need - before) / tl.where(by_mass, weight, 1.0)
        equals = tl.maximum(tl.ceil(equals), 1.0)
        stay = tl.where(threshold == limit, tl.minimum(stay, equals), equals)
        limit = threshold
        is_truncated = by_mass | (top_p >= 1)
        if not is_truncated:
            if is_listed:
                keys = _list_keys(sample, candidates.pair_ptr, number)
                weights = tl.exp(-keys.to(tl.float32, bitcast=True))
                nearer = tl.sum(tl.where(keys < limit, weights, 0.0), axis=0)
                within = tl.sum(tl.where(keys <= limit, weights, 0.0), axis=0)
            else:
                nearer, within, _ = measure(
                    limit - 1,
                    limit,
                    limit,
                    0,
                    True,
                    sample,
                    picked,
                    False,
                    SEARCHED,
                    LAYOUT,
                    HAS_IDS,
                    HAS_PROCESSING,
                )
            mass = tl.minimum(nearer + stay * weight, within)
            end = limit
            total = mass
        by_mass = True
    if (top_k > 0) | (top_p < 1):
        if number <= LISTED:
            keys = _list_keys(sample, candidates.pair_ptr, number)
            places = tl.arange(0, LISTED)
            pairs = tl.load(candidates.pair_ptr + places, mask=places < number, other=0)
            columns = of_pairs(pairs)[1]
            columns = tl.where(keys == limit, columns, NO_COLUMN)
            if tl.sum((columns < NO_COLUMN).to(tl.float32), axis=0) > stay:
                last, _ = _least_of_list(stay, tl.zeros_like(last), last, columns, False)
        else:
            equals, _, _ = measure(
                last,
                last,
                last,
                limit,
                False,
                sample,
                picked,
                True,
                SEARCHED,
                LAYOUT,
                HAS_IDS,
                HAS_PROCESSING,
            )
            if equals > stay:
                last, _ = _least(
                    stay,
                    tl.zeros_like(last),
                    last,
                    tl.zeros_like(stay),
                    limit,
                    False,
                    sample,
                    picked,
                    True,
                    SEARCHED,
                    LAYOUT,
                    HAS_IDS,
                    HAS_PROCESSING,
                )
    if number <= LISTED:
        sampled = sample_list(
            sample,
            Candidates(picked, candidates.pair_ptr, number),
            limit,
            last,
            Sampled(best, column, kept_mass),
            HAS_IDS,
            WARPS * 256,
        )
    else:
        sampled = sample_chunks(sample, picked, limit, last, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING)
    return sampled.column, limit.to(tl.float32, bitcast=True), last, sampled.mass, is_last
