"""Cuts that are searched for: draws among any number of candidates.

Where they are too many to be listed a sample of the row tells between which two depths a cut lies.
One pass over the candidates measures what is nearer, which is sure to stay and is drawn from at
once, and lists what lies between, where the cut is found exactly. Only ids that are equal by
thousands take more passes.

Where rows are few several programs share that pass of a row, and the last of them goes on.
"""

import triton
import triton.language as tl

from mtp_plugin.speculative.logit_rows.rows_triton import NO_COLUMN, Picked
from mtp_plugin.speculative.ops.sampling.cuts.candidates_kernel import (
    LISTED,
    PLACES,
    Candidates,
    depths_of,
    of_pairs,
)
from mtp_plugin.speculative.ops.sampling.cuts.guess_kernel import Bounds, guessed
from mtp_plugin.speculative.ops.sampling.cuts.passes_kernel import (
    LEAST_NEED,
    NO_DEPTH,
    Drawn,
    between,
    drawn_of_chunks,
    drawn_of_list,
    listed_within,
    measured,
)
from mtp_plugin.speculative.ops.sampling.cuts.shares_kernel import UNSHARED, dealt, joined

LN_2 = tl.constexpr(0.6931471805599453)
GUESSES = tl.constexpr(4)
"""Passes that try to list what lies around a cut."""
WHOLE = tl.constexpr(3000)
"""Ids of top-k that are listed as a whole, so that no cut among them needs another pass."""


@triton.jit
def _narrowed(
    need,
    by_mass,
    bounds,
    draw,
    candidates,
    split,
    is_split,
    TILE: tl.constexpr,
    SAMPLE: tl.constexpr,
    LAYOUT: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Bounds such that ids up to the lower measure less than ``need`` and up to the higher not.

    And how many are between: they are listed, if not more than LISTED, and then what is drawn of
    those up to the lower. And whether this program goes on with the row: of those that share it one
    does, the others know no more than that.
    """
    low = bounds.low
    before = bounds.before
    high = bounds.high
    end = bounds.end
    total = bounds.total
    number = tl.full([], LISTED + 1, tl.int32)
    best = float("-inf")
    column = NO_COLUMN
    left = 0.0
    guesses = 0
    is_last = tl.full([], 1, tl.int1)
    picked = candidates.picked
    own = picked
    if SHARES > 1 and is_split:
        own = dealt(picked, split, ALL_CHUNKS, SHARES)
    while (number > LISTED) & (high - low > 1) & (guesses < GUESSES):
        near, far = guessed(
            need,
            by_mass,
            Bounds(low, before, high, end, total),
            draw,
            SAMPLE,
            LAYOUT,
            ALL_CHUNKS,
            HAS_IDS,
            HAS_EDITS,
        )
        looked_at = candidates
        is_shared = is_split & (guesses == 0)
        if SHARES > 1:
            looked_at = Candidates(
                Picked(
                    picked.ptr + tl.where(is_shared, split.chunks_at, 0),
                    tl.where(is_shared, own.number, picked.number),
                ),
                candidates.pair_ptr - tl.where(is_shared, (SHARES - split.share) * PLACES, 0),
                candidates.found,
            )
        passed = between(near, far, by_mass, draw, looked_at, TILE, LAYOUT, HAS_IDS, HAS_EDITS)
        nearer = passed.nearer
        within = passed.within
        found = passed.found
        best = passed.drawn.score
        column = passed.drawn.column
        left = passed.drawn.mass
        if SHARES > 1 and is_shared:
            of_all, is_last = joined(passed, split, candidates.pair_ptr - SHARES * PLACES, SHARES)
            nearer = of_all.nearer
            within = of_all.within
            found = of_all.found
            best = of_all.drawn.score
            column = of_all.drawn.column
            left = of_all.drawn.mass
        is_nearer = (nearer >= need) & (near > low)
        # the highest key is enough, whatever rounding says
        is_farther = (within < need) & (far < high)
        number = tl.where(is_nearer | is_farther, number, found)
        end = tl.where(is_nearer, near, tl.where(is_farther, end, far))
        total = tl.where(is_nearer, nearer, tl.where(is_farther, total, within))
        before = tl.where(is_nearer, before, tl.where(is_farther, within, nearer))
        low = tl.where(is_nearer, low, tl.where(is_farther, far, near))
        high = tl.where(is_nearer, near, tl.where(is_farther, high, far))
        guesses += tl.where(is_last, 1, GUESSES)
    # who does not go on searches and draws nothing
    number = tl.where(is_last, number, 0)
    low = tl.where(is_last, low, high)
    return low, high, before, number, Drawn(best, column, left), is_last


@triton.jit
def _listed_keys(draw, pair_ptr, number):
    """The keys of what is listed [LISTED], `NO_COLUMN` beyond them."""
    places = tl.arange(0, LISTED)
    here = places < number
    x = of_pairs(tl.load(pair_ptr + places, mask=here, other=0))[0]
    keys = depths_of(x, here, draw.top, draw.options.temperature).to(tl.int32, bitcast=True)
    return tl.where(here, keys, NO_COLUMN)


@triton.jit
def _least_listed(need, low, high, keys, by_mass):
    """As `_least`, among listed keys."""
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
    """In which quarter the measure ``need`` is reached, and what lies before it measures."""
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
    draw,
    picked,
    BY_COLUMN: tl.constexpr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """The least key from ``low`` on up to which ids measure ``need``, and the measure of those
    below it.

    ``high`` counts as enough; what lies below ``low`` measures ``before``.
    """
    while low < high:
        half = (high - low) // 2
        k1 = low + half // 2
        k2 = low + half
        k3 = k2 + half // 2
        m1, m2, m3 = measured(
            k1,
            k2,
            k3,
            level,
            by_mass,
            draw,
            picked,
            BY_COLUMN,
            TILE,
            LAYOUT,
            HAS_IDS,
            HAS_EDITS,
        )
        low, high, before = _quarter(need, low, high, before, k1, k2, k3, m1, m2, m3)
    return low, before


@triton.jit(noinline=True)
def drawn_of_many(
    draw,
    candidates,
    split,
    far,
    mass,
    LAYOUT: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    WARPS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """As `drawn_of_cut`, of any number of candidates: all ids up to a depth, and of those that lie
    at it the first columns."""
    TILE: tl.constexpr = WARPS * 512 // LAYOUT.chunk_size
    SEARCHED: tl.constexpr = WARPS * 256 // LAYOUT.chunk_size
    SAMPLE: tl.constexpr = WARPS * 1024
    top_k = draw.options.top_k
    top_p = draw.options.top_p
    picked = candidates.picked
    is_listed = candidates.found <= LISTED
    is_split = (SHARES > 1) & (not is_listed) & (picked.number > UNSHARED)
    is_split = is_split & (top_k == 0) & (top_p < 1)
    is_last = (SHARES == 1) | is_split | (split.share == 0)
    pair_ptr = candidates.pair_ptr
    if SHARES > 1:
        pair_ptr += tl.where(is_split, (SHARES - split.share) * PLACES, 0)
    candidates = Candidates(picked, pair_ptr, candidates.found)
    # the depth as a key, and how many stay of the ids that lie there
    limit = (far * LN_2).to(tl.int32, bitcast=True)
    stay = 2147483647.0
    last = draw.row.vocab - 1
    # up to where the row is measured: by count first, then by mass
    end = tl.full([], NO_DEPTH, tl.int32)
    by_mass = top_k == 0
    total = tl.where(by_mass, mass, draw.row.vocab.to(tl.float32))
    number = candidates.found
    # of ids that are sure to stay and are not listed
    best = float("-inf")
    column = NO_COLUMN
    left = 0.0
    nothing = tl.full([], -1, tl.int32)
    is_whole = (not is_listed) & (top_k > 0) & (top_k <= WHOLE)
    if is_whole:
        deepest = guessed(
            top_k.to(tl.float32),
            by_mass,
            Bounds(nothing, 0.0, limit, end, total),
            draw,
            SAMPLE,
            LAYOUT,
            ALL_CHUNKS,
            HAS_IDS,
            HAS_EDITS,
        )[1]
        found = listed_within(
            deepest, draw, candidates, 2 * TILE, LAYOUT, HAS_IDS, HAS_EDITS, WARPS
        )
        is_listed = (found <= LISTED) & ((found >= top_k) | (deepest >= limit))
        number = tl.where(is_listed, found, number)
    is_cut = (top_k == 0) & (top_p >= 1)
    while not is_cut:
        need = tl.where(by_mass, tl.maximum(top_p * mass, LEAST_NEED), top_k.to(tl.float32))
        low = nothing
        high = limit
        before = 0.0
        if not is_listed:
            low, high, before, number, drawn, is_last = _narrowed(
                need,
                by_mass,
                Bounds(low, before, high, end, total),
                draw,
                candidates,
                split,
                is_split,
                TILE,
                SAMPLE,
                LAYOUT,
                ALL_CHUNKS,
                HAS_IDS,
                HAS_EDITS,
                SHARES,
            )
            best = drawn.score
            column = drawn.column
            left = drawn.mass
        if number <= LISTED:
            keys = _listed_keys(draw, candidates.pair_ptr, number)
            cut, inner = _least_listed(need - before, low + 1, high, keys, by_mass)
            before += inner
        else:
            cut, before = _least(
                need,
                low + 1,
                high,
                before,
                0,
                by_mass,
                draw,
                picked,
                False,
                SEARCHED,
                LAYOUT,
                HAS_IDS,
                HAS_EDITS,
            )
        weight = tl.exp(-cut.to(tl.float32, bitcast=True))
        # each of the equals stays while the measure in front of it is less than needed
        equals = (need - before) / tl.where(by_mass, weight, 1.0)
        equals = tl.maximum(tl.ceil(equals), 1.0)
        stay = tl.where(cut == limit, tl.minimum(stay, equals), equals)
        limit = cut
        is_cut = by_mass | (top_p >= 1)
        if not is_cut:
            if is_listed:
                keys = _listed_keys(draw, candidates.pair_ptr, number)
                weights = tl.exp(-keys.to(tl.float32, bitcast=True))
                nearer = tl.sum(tl.where(keys < limit, weights, 0.0), axis=0)
                within = tl.sum(tl.where(keys <= limit, weights, 0.0), axis=0)
            else:
                nearer, within, _ = measured(
                    limit - 1,
                    limit,
                    limit,
                    0,
                    True,
                    draw,
                    picked,
                    False,
                    SEARCHED,
                    LAYOUT,
                    HAS_IDS,
                    HAS_EDITS,
                )
            mass = tl.minimum(nearer + stay * weight, within)
            end = limit
            total = mass
        by_mass = True
    if (top_k > 0) | (top_p < 1):
        if number <= LISTED:
            keys = _listed_keys(draw, candidates.pair_ptr, number)
            places = tl.arange(0, LISTED)
            pairs = tl.load(candidates.pair_ptr + places, mask=places < number, other=0)
            columns = of_pairs(pairs)[1]
            columns = tl.where(keys == limit, columns, NO_COLUMN)
            if tl.sum((columns < NO_COLUMN).to(tl.float32), axis=0) > stay:
                last, _ = _least_listed(stay, tl.zeros_like(last), last, columns, False)
        else:
            equals, _, _ = measured(
                last,
                last,
                last,
                limit,
                False,
                draw,
                picked,
                True,
                SEARCHED,
                LAYOUT,
                HAS_IDS,
                HAS_EDITS,
            )
            if equals > stay:
                last, _ = _least(
                    stay,
                    tl.zeros_like(last),
                    last,
                    tl.zeros_like(stay),
                    limit,
                    False,
                    draw,
                    picked,
                    True,
                    SEARCHED,
                    LAYOUT,
                    HAS_IDS,
                    HAS_EDITS,
                )
    if number <= LISTED:
        drawn = drawn_of_list(
            draw,
            Candidates(picked, candidates.pair_ptr, number),
            limit,
            last,
            Drawn(best, column, left),
            HAS_IDS,
            WARPS * 256,
        )
    else:
        drawn = drawn_of_chunks(draw, picked, limit, last, TILE, LAYOUT, HAS_IDS, HAS_EDITS)
    return drawn.column, limit.to(tl.float32, bitcast=True), last, drawn.mass, is_last
