"""Truncation thresholds by search, for any number of candidates; part of `sample_finish_kernel`.

The *measure* of ids is their number (top-k) or their probability mass (top-p). The threshold is the
least depth up to which the measure reaches the required one.

1. A sample of the row estimates two depths between which the threshold lies (`guess_bounds`).
2. One pass over the candidates measures the ids before these depths, which are certainly kept and
   are sampled from at once, and lists the ids between them (`list_between`). If the threshold is
   not between them, or too many ids are, the next guess is within narrower bounds.
3. The threshold is found in the list, exactly (`_search_list`). Only if the ids between the bounds
   do not fit the list, as with thousands of equal values, passes over the row find it
   (`_search_key`).
4. Of the ids at the threshold the lowest columns are kept: the last one is found the same way.
5. The sample is the best of phase 2 and of the kept ids in the list (`sample_list`).

With top-k and top-p, phases 1 to 3 run twice: by number, then by mass among the top k.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.ops.logit_rows.rows_triton import (
    NO_COLUMN,
    chunk_starts,
    columns_in_chunk,
)
from mtp_plugin.ops.sampling.row_triton import OF_ALL, OF_MIN_P, load_values
from mtp_plugin.ops.sampling.truncation_passes_triton import (
    INF_KEY,
    LIST_CAPACITY,
    MIN_REQUIRED,
    Candidates,
    Sampled,
    compute_depths,
    list_between,
    list_within,
    measure_up_to,
    sample_chunks,
    sample_list,
    unpack_pairs,
)

BISECTIONS = tl.constexpr(10)
"""Bisection steps per guess."""
DEVIATIONS = tl.constexpr(4.0)
"""Standard deviations of the estimate added on both sides of a guess."""
LIST_FILL = tl.constexpr(0.85)
"""Share of the list that a guess fills at most."""
LN_2 = tl.constexpr(0.6931471805599453)
MAX_GUESSES = tl.constexpr(4)
"""Passes that try to list the ids around a threshold."""
MAX_LISTED_TOP_K = tl.constexpr(3000)
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
    required,
    by_mass,
    bounds,
    sample,
    SAMPLE: tl.constexpr,
    LAYOUT: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """Two keys within bounds between which a measure of ``required`` is likely reached.

    ``SAMPLE`` ids of all chunks estimate the measure between the bounds, from both ends, weighted
    by their errors.
    """
    low = bounds.low
    before = bounds.before
    high = bounds.high
    end = bounds.end
    total = bounds.total
    logit_row = sample.logit_row
    SKIP: tl.constexpr = PADDED_CHUNKS // SAMPLE if PADDED_CHUNKS > SAMPLE else 1
    SPARSE: tl.constexpr = LAYOUT.chunk_size * PADDED_CHUNKS // SAMPLE // SKIP
    EVERY: tl.constexpr = SPARSE if SPARSE > 1 else 1
    PER_CHUNK: tl.constexpr = LAYOUT.chunk_size // EVERY
    FACTOR: tl.constexpr = SKIP * EVERY
    each = tl.arange(0, PADDED_CHUNKS // SKIP * PER_CHUNK)
    chunks = each // PER_CHUNK * SKIP
    # at other indices in every chunk, against periodic rows
    offsets = each % PER_CHUNK * EVERY + (chunks * 5 + each % PER_CHUNK * 11) % EVERY
    columns = chunk_starts(chunks, LAYOUT)
    columns += columns_in_chunk(offsets, LAYOUT)
    inside = columns < logit_row.vocab
    x = load_values(logit_row, columns, inside, HAS_IDS, HAS_PROCESSING)
    depths = tl.div_rn(sample.row_max - x, sample.options.temperature)
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
    measure, error = _estimate(deepest, depths, weights, before, total, all_sum, all_square, FACTOR)
    is_met = measure - error >= required
    for _ in range(BISECTIONS):
        middle = (near + near_end) * 0.5
        measure, error = _estimate(
            middle, depths, weights, before, total, all_sum, all_square, FACTOR
        )
        enough = measure + error >= required
        near_end = tl.where(enough, middle, near_end)
        near = tl.where(enough, near, middle)
        middle = (far + far_end) * 0.5
        measure, error = _estimate(
            middle, depths, weights, before, total, all_sum, all_square, FACTOR
        )
        enough = measure - error >= required
        far_end = tl.where(enough, middle, far_end)
        far = tl.where(enough, far, middle)
    num_between = tl.sum(
        (is_between & (depths > near) & (depths <= far_end)).to(tl.float32), axis=0
    )
    share = 1.0 / tl.maximum(num_between * FACTOR / (LIST_CAPACITY * LIST_FILL), 1.0)
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
def _estimate(depth, depths, weights, before, total, all_sum, all_square, FACTOR: tl.constexpr):
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
def _narrow_bounds(
    required,
    by_mass,
    bounds,
    sample,
    candidates,
    TILE: tl.constexpr,
    SAMPLE: tl.constexpr,
    LAYOUT: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """Narrow bounds until the ids between them fit the list.

    Returns:
        The bounds and the measure up to the lower one, which is less than ``required``; the number
        of ids between them, which are listed if not more than LIST_CAPACITY; and the sample from
        the ids up to the lower bound.
    """
    low = bounds.low
    before = bounds.before
    high = bounds.high
    end = bounds.end
    total = bounds.total
    num_listed = tl.full([], LIST_CAPACITY + 1, tl.int32)
    best = float("-inf")
    column = NO_COLUMN
    kept_mass = 0.0
    guesses = 0
    while (num_listed > LIST_CAPACITY) & (high - low > 1) & (guesses < MAX_GUESSES):
        near, far = guess_bounds(
            required,
            by_mass,
            Bounds(low, before, high, end, total),
            sample,
            SAMPLE,
            LAYOUT,
            PADDED_CHUNKS,
            HAS_IDS,
            HAS_PROCESSING,
        )
        passed = list_between(
            near, far, by_mass, sample, candidates, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING
        )
        near_measure = passed.near_measure
        far_measure = passed.far_measure
        best = passed.sampled.score
        column = passed.sampled.column
        kept_mass = passed.sampled.mass
        is_nearer = (near_measure >= required) & (near > low)
        # up to the highest key the measure is reached, also if rounding says otherwise
        is_farther = (far_measure < required) & (far < high)
        num_listed = tl.where(is_nearer | is_farther, num_listed, passed.num_listed)
        end = tl.where(is_nearer, near, tl.where(is_farther, end, far))
        total = tl.where(is_nearer, near_measure, tl.where(is_farther, total, far_measure))
        before = tl.where(is_nearer, before, tl.where(is_farther, far_measure, near_measure))
        low = tl.where(is_nearer, low, tl.where(is_farther, far, near))
        high = tl.where(is_nearer, near, tl.where(is_farther, high, far))
        guesses += 1
    return low, high, before, num_listed, Sampled(best, column, kept_mass)


@triton.jit
def _list_keys(sample, pair_ptr, num_listed):
    """The keys of the list [LIST_CAPACITY], `NO_COLUMN` past its end."""
    offsets = tl.arange(0, LIST_CAPACITY)
    inside = offsets < num_listed
    x = unpack_pairs(tl.load(pair_ptr + offsets, mask=inside, other=0))[0]
    keys = compute_depths(x, inside, sample.row_max, sample.options.temperature).to(
        tl.int32, bitcast=True
    )
    return tl.where(inside, keys, NO_COLUMN)


@triton.jit
def _search_list(required, low, high, keys, by_mass):
    """`_search_key` for the keys of a list."""
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
        low, high, before = _select_quarter(required, low, high, before, k1, k2, k3, m1, m2, m3)
    return low, before


@triton.jit
def _select_quarter(required, low, high, before, k1, k2, k3, m1, m2, m3):
    """The quarter in which the measure ``required`` is reached, and the measure before it."""
    before = tl.where(
        m1 >= required, before, tl.where(m2 >= required, m1, tl.where(m3 >= required, m2, m3))
    )
    low = tl.where(
        m1 >= required, low, tl.where(m2 >= required, k1, tl.where(m3 >= required, k2, k3)) + 1
    )
    high = tl.where(
        m1 >= required, k1, tl.where(m2 >= required, k2, tl.where(m3 >= required, k3, high))
    )
    return low, high, before


@triton.jit
def _search_key(
    required,
    low,
    high,
    before,
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
    """The least key in ``low .. high`` whose measure is ``required``, and the measure before it.

    ``high`` counts as reached; the measure below ``low`` is ``before``.
    """
    while low < high:
        half = (high - low) // 2
        k1 = low + half // 2
        k2 = low + half
        k3 = k2 + half // 2
        m1, m2, m3 = measure_up_to(
            k1,
            k2,
            k3,
            level,
            by_mass,
            sample,
            selected,
            BY_COLUMN,
            TILE,
            LAYOUT,
            HAS_IDS,
            HAS_PROCESSING,
        )
        low, high, before = _select_quarter(required, low, high, before, k1, k2, k3, m1, m2, m3)
    return low, before


@triton.jit
def _key_of_weight(weight):
    """The largest key whose weight is at least ``weight``, which is above 0 and at most 1."""
    key = tl.full([], 0, tl.int32)
    above = tl.full([], INF_KEY, tl.int32)
    while above - key > 1:
        middle = key + (above - key) // 2
        is_within = tl.exp(-middle.to(tl.float32, bitcast=True)) >= weight
        key = tl.where(is_within, middle, key)
        above = tl.where(is_within, above, middle)
    return key


@triton.jit(noinline=True)
def sample_by_search(
    sample,
    candidates,
    far,
    mass,
    LAYOUT: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    WARPS: tl.constexpr,
):
    """`sample_truncated` for any number of candidates.

    The kept tokens are all ids up to a depth, and the lowest columns of those at that depth.
    """
    TILE: tl.constexpr = WARPS * 512 // LAYOUT.chunk_size
    SEARCH_TILE: tl.constexpr = WARPS * 256 // LAYOUT.chunk_size
    SAMPLE: tl.constexpr = WARPS * 1024
    top_k = sample.options.top_k
    top_p = sample.options.top_p
    selected = candidates.selected
    is_listed = candidates.num_listed <= LIST_CAPACITY
    # the depth as a key, and how many of the ids at it are kept
    limit = (far * LN_2).to(tl.int32, bitcast=True)
    num_at_limit = 2147483647.0
    last = sample.logit_row.vocab - 1
    # the row is measured up to here: by count first, then by probability mass
    end = tl.full([], INF_KEY, tl.int32)
    by_mass = top_k == 0
    if (sample.options.top_p_mass == OF_MIN_P) & (sample.options.min_p > 0):
        limit = tl.minimum(limit, _key_of_weight(sample.options.min_p))
        if by_mass:
            end = limit
            mass, _, _ = measure_up_to(
                limit,
                limit,
                limit,
                0,
                True,
                sample,
                selected,
                False,
                SEARCH_TILE,
                LAYOUT,
                HAS_IDS,
                HAS_PROCESSING,
            )
    total = tl.where(by_mass, mass, sample.logit_row.vocab.to(tl.float32))
    num_listed = candidates.num_listed
    # of ids that are certainly kept and not listed
    best = float("-inf")
    column = NO_COLUMN
    kept_mass = 0.0
    no_key = tl.full([], -1, tl.int32)
    lists_top_k = (not is_listed) & (top_k > 0) & (top_k <= MAX_LISTED_TOP_K)
    if lists_top_k:
        deepest = guess_bounds(
            top_k.to(tl.float32),
            by_mass,
            Bounds(no_key, 0.0, limit, end, total),
            sample,
            SAMPLE,
            LAYOUT,
            PADDED_CHUNKS,
            HAS_IDS,
            HAS_PROCESSING,
        )[1]
        num_found = list_within(
            deepest, sample, candidates, 2 * TILE, LAYOUT, HAS_IDS, HAS_PROCESSING, WARPS
        )
        is_listed = (num_found <= LIST_CAPACITY) & ((num_found >= top_k) | (deepest >= limit))
        num_listed = tl.where(is_listed, num_found, num_listed)
    is_truncated = (top_k == 0) & (top_p >= 1)
    while not is_truncated:
        required = tl.where(by_mass, tl.maximum(top_p * mass, MIN_REQUIRED), top_k.to(tl.float32))
        low = no_key
        high = limit
        before = 0.0
        if not is_listed:
            # phases 1 and 2
            low, high, before, num_listed, sampled = _narrow_bounds(
                required,
                by_mass,
                Bounds(low, before, high, end, total),
                sample,
                candidates,
                TILE,
                SAMPLE,
                LAYOUT,
                PADDED_CHUNKS,
                HAS_IDS,
                HAS_PROCESSING,
            )
            best = sampled.score
            column = sampled.column
            kept_mass = sampled.mass
        if num_listed <= LIST_CAPACITY:
            # phase 3
            keys = _list_keys(sample, candidates.pair_ptr, num_listed)
            threshold, inner = _search_list(required - before, low + 1, high, keys, by_mass)
            before += inner
        else:
            threshold, before = _search_key(
                required,
                low + 1,
                high,
                before,
                0,
                by_mass,
                sample,
                selected,
                False,
                SEARCH_TILE,
                LAYOUT,
                HAS_IDS,
                HAS_PROCESSING,
            )
        weight = tl.exp(-threshold.to(tl.float32, bitcast=True))
        # each of the equal ids is kept while the measure before it is less than needed
        num_equal = (required - before) / tl.where(by_mass, weight, 1.0)
        num_equal = tl.maximum(tl.ceil(num_equal), 1.0)
        num_at_limit = tl.where(threshold == limit, tl.minimum(num_at_limit, num_equal), num_equal)
        limit = threshold
        is_truncated = by_mass | (top_p >= 1)
        if not is_truncated:
            if is_listed:
                keys = _list_keys(sample, candidates.pair_ptr, num_listed)
                weights = tl.exp(-keys.to(tl.float32, bitcast=True))
                mass_before = tl.sum(tl.where(keys < limit, weights, 0.0), axis=0)
                mass_within = tl.sum(tl.where(keys <= limit, weights, 0.0), axis=0)
            else:
                mass_before, mass_within, _ = measure_up_to(
                    limit - 1,
                    limit,
                    limit,
                    0,
                    True,
                    sample,
                    selected,
                    False,
                    SEARCH_TILE,
                    LAYOUT,
                    HAS_IDS,
                    HAS_PROCESSING,
                )
            end = limit
            total = tl.minimum(mass_before + num_at_limit * weight, mass_within)
            mass = tl.where(sample.options.top_p_mass == OF_ALL, mass, total)
            is_truncated = top_p * mass > total
        by_mass = True
    # phase 4
    if (top_k > 0) | (top_p < 1):
        if num_listed <= LIST_CAPACITY:
            keys = _list_keys(sample, candidates.pair_ptr, num_listed)
            offsets = tl.arange(0, LIST_CAPACITY)
            pairs = tl.load(candidates.pair_ptr + offsets, mask=offsets < num_listed, other=0)
            columns = unpack_pairs(pairs)[1]
            columns = tl.where(keys == limit, columns, NO_COLUMN)
            if tl.sum((columns < NO_COLUMN).to(tl.float32), axis=0) > num_at_limit:
                last, _ = _search_list(num_at_limit, tl.zeros_like(last), last, columns, False)
        else:
            num_equal, _, _ = measure_up_to(
                last,
                last,
                last,
                limit,
                False,
                sample,
                selected,
                True,
                SEARCH_TILE,
                LAYOUT,
                HAS_IDS,
                HAS_PROCESSING,
            )
            if num_equal > num_at_limit:
                last, _ = _search_key(
                    num_at_limit,
                    tl.zeros_like(last),
                    last,
                    tl.zeros_like(num_at_limit),
                    limit,
                    False,
                    sample,
                    selected,
                    True,
                    SEARCH_TILE,
                    LAYOUT,
                    HAS_IDS,
                    HAS_PROCESSING,
                )
    # phase 5
    if num_listed <= LIST_CAPACITY:
        sampled = sample_list(
            sample,
            Candidates(selected, candidates.pair_ptr, num_listed),
            limit,
            last,
            Sampled(best, column, kept_mass),
            HAS_IDS,
            WARPS * 256,
        )
    else:
        sampled = sample_chunks(
            sample, selected, limit, last, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING
        )
    return sampled.column, limit.to(tl.float32, bitcast=True), last, sampled.mass
