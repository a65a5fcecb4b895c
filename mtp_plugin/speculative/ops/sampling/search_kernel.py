"""Cuts that are searched for: draws among any number of candidates.

Where they are too many to be listed a sample of the row tells between which two depths a cut lies.
One pass over the candidates measures what is nearer, which is sure to stay and is drawn from at
once, and lists what lies between, where the cut is found exactly. Only ids that are equal by
thousands take more passes.

Where rows are few several programs share that pass of a row, and the last of them goes on.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.speculative.logit_rows.chunks_kernel import (
    LOG2_E,
    columns_of,
    spread_of,
    starts_of,
)
from mtp_plugin.speculative.ops.sampling.candidates_kernel import (
    LISTED,
    PLACES,
    Candidates,
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
    values_of,
    words_of,
)

LN_2 = tl.constexpr(0.6931471805599453)
NO_COLUMN = tl.constexpr(2147483647)
NO_DEPTH = tl.constexpr(2139095040)
"""The key of an infinite depth."""
GUESSES = tl.constexpr(4)
"""Passes that try to list what lies around a cut."""
HALVINGS = tl.constexpr(10)
"""Of the depths among which a guess is made."""
DEVIATIONS = tl.constexpr(4.0)
"""Of what a sample tells, on both sides of a guess."""
ROOM = tl.constexpr(0.85)
"""Of the list, what a guess should fill at most."""
WHOLE = tl.constexpr(3000)
"""Ids of top-k that are listed as a whole, so that no cut among them needs another pass."""
LEAST_NEED = tl.constexpr(1e-30)
UNSHARED = tl.constexpr(64)
"""Picked chunks that one program looks at alone, however many programs a row has."""
TOLD = tl.constexpr(6)
"""Numbers that a program tells of its share of a row."""


class Drawn(NamedTuple):
    """What is drawn of some ids, and what is left of them."""

    score: tl.tensor  # the highest with noise; -inf: of none
    column: tl.tensor  # the lowest that has it
    mass: tl.tensor


class Split(NamedTuple):
    """How programs share a row; pointers stand at the row's own."""

    share: tl.tensor  # this program's
    arrived_ptr: tl.tensor  # how many have told what they found
    told_ptr: tl.tensor  # [TOLD, SHARES]
    chunks_at: tl.tensor  # so far behind all picked chunks those of the share are written


class Passed(NamedTuple):
    """What a pass over picked chunks found."""

    nearer: tl.tensor  # the measure up to its first key
    within: tl.tensor  # and up to its second
    found: tl.tensor  # ids between them
    drawn: Drawn  # of those up to the first


@triton.jit
def _reach(key, temperature):
    """The largest difference of values whose depth has at most this key; of a key below 0 -1.

    It is next to their product, but for rounding.
    """
    about = (key.to(tl.float32, bitcast=True) * temperature).to(tl.int32, bitcast=True)
    about = tl.maximum(about - 16 + tl.arange(0, 32), 0)
    differences = about.to(tl.float32, bitcast=True)
    keys = tl.div_rn(differences, temperature).to(tl.int32, bitcast=True)
    within = (keys <= key) & (about < NO_DEPTH)
    return tl.max(tl.where(within, differences, -1.0), axis=0)


@triton.jit
def _guessed(
    need,
    by_mass,
    low,
    before,
    high,
    end,
    total,
    row,
    top,
    temperature,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Two keys from ``low`` to ``high`` between which a measure of ``need`` is likely reached.

    Up to ``low`` ids measure ``before``, up to ``end`` they measure ``total``. What lies between is
    told by some ids of every chunk, from both ends, each as far as it can be trusted.
    """
    SIZE: tl.constexpr = PIECE // CHUNKS
    SKIP: tl.constexpr = ALL_CHUNKS // SAMPLE if ALL_CHUNKS > SAMPLE else 1
    SPARSE: tl.constexpr = SIZE * ALL_CHUNKS // SAMPLE // SKIP
    EVERY: tl.constexpr = SPARSE if SPARSE > 1 else 1
    PER_CHUNK: tl.constexpr = SIZE // EVERY
    FACTOR: tl.constexpr = SKIP * EVERY
    each = tl.arange(0, ALL_CHUNKS // SKIP * PER_CHUNK)
    chunks = each // PER_CHUNK * SKIP
    # in every chunk others, so that no period of a row is met
    places = each % PER_CHUNK * EVERY + (chunks * 5 + each % PER_CHUNK * 11) % EVERY
    columns = starts_of(chunks, PIECE, CHUNKS, THREADS, EACH)
    columns += spread_of(places, CHUNKS, THREADS, EACH)
    inside = columns < row.vocab
    x = values_of(row, columns, inside, HAS_IDS, HAS_EDITS)
    depths = tl.div_rn(top - x, temperature)
    lowest = tl.where(low < 0, -1.0, low.to(tl.float32, bitcast=True))
    between = inside & (depths > lowest) & (depths <= end.to(tl.float32, bitcast=True))
    weights = tl.where(between, tl.where(by_mass, tl.exp(-depths), 1.0), 0.0)
    all_sum = tl.sum(weights, axis=0)
    all_square = tl.sum(weights * weights, axis=0)
    deepest = tl.where(between & (depths <= high.to(tl.float32, bitcast=True)), depths, 0.0)
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
    crowd = tl.sum((between & (depths > near) & (depths <= far_end)).to(tl.float32), axis=0)
    share = 1.0 / tl.maximum(crowd * FACTOR / (LISTED * ROOM), 1.0)
    middle = (near + far_end) * 0.5
    far = tl.where(share < 1, middle + (far_end - middle) * share, far_end)
    near = tl.where(share < 1, middle + (near - middle) * share, near)
    # from the first to the last of the sample between them, bit for bit: these may be the same
    inner = between & (depths > near) & (depths <= far)
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
    """The measure up to a depth as a sample tells it, and how far it may be off."""
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
def _sums(x, EACH: tl.constexpr):
    """Of a tile by as many neighbours as a thread holds."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // EACH, EACH]), axis=2)


@triton.jit
def _between(
    near,
    far,
    by_mass,
    row,
    candidates,
    options,
    stream,
    top,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """List the ids between two keys, in one pass over all picked chunks."""
    SIZE: tl.constexpr = PIECE // CHUNKS
    temperature = options.temperature
    scale = scale_of(temperature)
    near_reach = _reach(near, temperature)
    far_reach = _reach(far, temperature)
    chunk_ptr = candidates.chunk_ptr
    num_chunks = candidates.num_chunks
    nearer = tl.zeros([TILE, SIZE // EACH], tl.float32)
    within = tl.zeros([TILE, SIZE // EACH], tl.float32)
    left = tl.zeros([TILE, SIZE // EACH], tl.float32)
    found = 0
    best = float("-inf")
    drawn = NO_COLUMN
    places = tl.arange(0, SIZE)
    # what was listed before everybody has read
    tl.debug_barrier()
    x = tile_of(
        row, chunk_ptr, 0, num_chunks, TILE, PIECE, CHUNKS, THREADS, EACH, HAS_IDS, HAS_EDITS
    )[0]
    for first in range(0, num_chunks, TILE):
        # of the next tile, while this one is measured
        next_x = tile_of(
            row,
            chunk_ptr,
            first + TILE,
            num_chunks,
            TILE,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            HAS_IDS,
            HAS_EDITS,
        )[0]
        differences = top - x
        exponents = differences * scale
        weights = tl.exp2(-exponents)
        measures = tl.where(by_mass, weights, 1.0)
        is_nearer = differences <= near_reach
        is_within = differences <= far_reach
        nearer += _sums(tl.where(is_nearer, measures, 0.0), EACH)
        within += _sums(tl.where(is_within, measures, 0.0), EACH)
        left += _sums(tl.where(is_nearer & (weights >= options.min_p), weights, 0.0), EACH)
        found = listed(
            x,
            is_within & (differences > near_reach),
            chunk_ptr,
            first,
            num_chunks,
            found,
            candidates.pair_ptr,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            TILE * SIZE // 512,
        )
        columns = columns_of(
            chunk_ptr, first, num_chunks, places, TILE, PIECE, CHUNKS, THREADS, EACH
        )[0]
        words = words_of_tile(
            row,
            chunk_ptr,
            columns,
            first,
            num_chunks,
            stream,
            TILE,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            HAS_IDS,
        )
        best, drawn = _best_of_tile(
            differences, exponents, weights, is_nearer, words, columns, options, best, drawn
        )
        x = next_x
    tl.debug_barrier()
    return Passed(
        tl.sum(tl.sum(nearer, axis=1), axis=0),
        tl.sum(tl.sum(within, axis=1), axis=0),
        found,
        Drawn(best, drawn, tl.sum(tl.sum(left, axis=1), axis=0)),
    )


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
        best, drawn = _better(noisy, columns, best, drawn)
    return best, drawn


@triton.jit
def _dealt(candidates, split, ALL_CHUNKS: tl.constexpr, SHARES: tl.constexpr):
    """Write which of the picked chunks are a share's, every so many-th; how many they are."""
    places = tl.arange(0, ALL_CHUNKS // SHARES)
    at = places * SHARES + split.share
    here = at < candidates.num_chunks
    chunks = tl.load(candidates.chunk_ptr + at, mask=here, other=0)
    tl.store(candidates.chunk_ptr + split.chunks_at + places, chunks, mask=here)
    return (candidates.num_chunks + (SHARES - 1) - split.share) // SHARES


@triton.jit
def _joined(passed, split, pair_ptr, SHARES: tl.constexpr):
    """What all shares of a row found, and whether this program is the last that tells: no other
    learns it.

    The list of share s stands PLACES * s behind ``pair_ptr``, that of all behind the last one.
    """
    told_ptr = split.told_ptr + split.share
    tl.store(told_ptr, passed.nearer)
    tl.store(told_ptr + SHARES, passed.within)
    tl.store(told_ptr + 2 * SHARES, passed.found.to(tl.float32, bitcast=True))
    tl.store(told_ptr + 3 * SHARES, passed.drawn.score)
    tl.store(told_ptr + 4 * SHARES, passed.drawn.column.to(tl.float32, bitcast=True))
    tl.store(told_ptr + 5 * SHARES, passed.drawn.mass)
    # one thread tells of what all of them wrote
    tl.debug_barrier()
    is_last = tl.atomic_add(split.arrived_ptr, 1, sem="acq_rel") == SHARES - 1
    nearer = passed.nearer
    within = passed.within
    found = tl.full([], 0, tl.int32)
    best = passed.drawn.score
    drawn = passed.drawn.column
    left = passed.drawn.mass
    if is_last:
        shares = tl.arange(0, SHARES)
        all_ptr = split.told_ptr + shares
        nearer = tl.sum(tl.load(all_ptr), axis=0)
        within = tl.sum(tl.load(all_ptr + SHARES), axis=0)
        numbers = tl.load(all_ptr + 2 * SHARES).to(tl.int32, bitcast=True)
        scores = tl.load(all_ptr + 3 * SHARES)
        columns = tl.load(all_ptr + 4 * SHARES).to(tl.int32, bitcast=True)
        left = tl.sum(tl.load(all_ptr + 5 * SHARES), axis=0)
        best, drawn = _better(scores, columns, float("-inf"), NO_COLUMN)
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
    return Passed(nearer, within, found, Drawn(best, drawn, left)), is_last


@triton.jit
def _narrowed(
    need,
    by_mass,
    high,
    end,
    total,
    row,
    candidates,
    split,
    is_split,
    options,
    stream,
    top,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    TILE: tl.constexpr,
    SAMPLE: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Two keys such that ids up to the first measure less than ``need`` and up to the second not.

    And what those up to the first measure, how many are between: they are listed, if not more than
    LISTED, and then what is drawn of those up to the first. And whether this program goes on with
    the row: of those that share it one does, the others know no more than that.
    """
    temperature = options.temperature
    low = tl.full([], -1, tl.int32)
    before = 0.0
    number = tl.full([], LISTED + 1, tl.int32)
    best = float("-inf")
    column = NO_COLUMN
    left = 0.0
    guesses = 0
    is_last = tl.full([], 1, tl.int1)
    num_dealt = candidates.num_chunks
    if SHARES > 1 and is_split:
        num_dealt = _dealt(candidates, split, ALL_CHUNKS, SHARES)
    while (number > LISTED) & (high - low > 1) & (guesses < GUESSES):
        near, far = _guessed(
            need,
            by_mass,
            low,
            before,
            high,
            end,
            total,
            row,
            top,
            temperature,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            ALL_CHUNKS,
            HAS_IDS,
            HAS_EDITS,
            SAMPLE,
        )
        looked_at = candidates
        is_shared = is_split & (guesses == 0)
        if SHARES > 1:
            looked_at = Candidates(
                candidates.chunk_ptr + tl.where(is_shared, split.chunks_at, 0),
                tl.where(is_shared, num_dealt, candidates.num_chunks),
                candidates.pair_ptr - tl.where(is_shared, (SHARES - split.share) * PLACES, 0),
                candidates.found,
            )
        passed = _between(
            near,
            far,
            by_mass,
            row,
            looked_at,
            options,
            stream,
            top,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            HAS_IDS,
            HAS_EDITS,
            TILE,
        )
        nearer = passed.nearer
        within = passed.within
        found = passed.found
        best = passed.drawn.score
        column = passed.drawn.column
        left = passed.drawn.mass
        if SHARES > 1 and is_shared:
            joined, is_last = _joined(passed, split, candidates.pair_ptr - SHARES * PLACES, SHARES)
            nearer = joined.nearer
            within = joined.within
            found = joined.found
            best = joined.drawn.score
            column = joined.drawn.column
            left = joined.drawn.mass
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
def _listed_within(
    key,
    row,
    candidates,
    temperature,
    top,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    TILE: tl.constexpr,
    WARPS: tl.constexpr,
):
    """List the ids of the picked chunks up to a key; how many they are, or more than LISTED."""
    reach = _reach(key, temperature)
    found = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    while (first < candidates.num_chunks) & (found <= LISTED):
        x = tile_of(
            row,
            candidates.chunk_ptr,
            first,
            candidates.num_chunks,
            TILE,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            HAS_IDS,
            HAS_EDITS,
        )[0]
        found = listed(
            x,
            top - x <= reach,
            candidates.chunk_ptr,
            first,
            candidates.num_chunks,
            found,
            candidates.pair_ptr,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            WARPS,
        )
        first += TILE
    tl.debug_barrier()
    return found


@triton.jit
def _listed_keys(candidates, number, top, temperature):
    """The keys of what is listed [LISTED], `NO_COLUMN` beyond them."""
    places = tl.arange(0, LISTED)
    here = places < number
    x = of_pairs(tl.load(candidates.pair_ptr + places, mask=here, other=0))[0]
    keys = depths_of(x, here, top, temperature).to(tl.int32, bitcast=True)
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
def _measured(
    k1,
    k2,
    k3,
    level,
    by_mass,
    row,
    candidates,
    top,
    temperature,
    BY_COLUMN: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The measure of the ids whose key is at most k1, k2, k3; one pass over the picked chunks.

    Key is the depth, bit for bit: none is negative, so its bits are in its order. The measure is
    the number of ids, or their mass. By column only ids of depth ``level`` count.
    """
    SIZE: tl.constexpr = PIECE // CHUNKS
    m1 = tl.zeros([TILE, SIZE], tl.float32)
    m2 = tl.zeros([TILE, SIZE], tl.float32)
    m3 = tl.zeros([TILE, SIZE], tl.float32)
    for first in range(0, candidates.num_chunks, TILE):
        x, columns = tile_of(
            row,
            candidates.chunk_ptr,
            first,
            candidates.num_chunks,
            TILE,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            HAS_IDS,
            HAS_EDITS,
        )
        depths = tl.div_rn(top - x, temperature)
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
def _least(
    need,
    low,
    high,
    before,
    level,
    by_mass,
    row,
    candidates,
    top,
    temperature,
    BY_COLUMN: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    TILE: tl.constexpr,
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
        m1, m2, m3 = _measured(
            k1,
            k2,
            k3,
            level,
            by_mass,
            row,
            candidates,
            top,
            temperature,
            BY_COLUMN,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            HAS_IDS,
            HAS_EDITS,
            TILE,
        )
        low, high, before = _quarter(need, low, high, before, k1, k2, k3, m1, m2, m3)
    return low, before


@triton.jit
def _better(noisy, columns, best, drawn):
    """The highest of noisy scores and of ``best``, and its lowest column."""
    highest = tl.max(noisy)
    at = tl.min(tl.where((noisy == highest) & (noisy > float("-inf")), columns, NO_COLUMN))
    at = tl.where(highest == best, tl.minimum(at, drawn), at)
    return tl.maximum(best, highest), tl.where(highest >= best, at, drawn)


@triton.jit
def _drawn_of_list(
    row,
    candidates,
    options,
    stream,
    limit,
    last,
    top,
    others,
    HAS_IDS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """What is drawn of a list, up to a key and a column at it, and of others."""
    best = others.score
    drawn = others.column
    left = others.mass
    for first in range(0, candidates.found, PAGE):
        places = first + tl.arange(0, PAGE)
        here = places < candidates.found
        x, columns = of_pairs(tl.load(candidates.pair_ptr + places, mask=here, other=0))
        depths = depths_of(x, here, top, options.temperature)
        keys = depths.to(tl.int32, bitcast=True)
        weights = tl.exp(-depths)
        kept = (keys < limit) | ((keys == limit) & (columns <= last))
        kept = here & kept & (weights >= options.min_p)
        left += tl.sum(tl.where(kept, weights, 0.0), axis=0)
        ids = ids_of(row, columns, kept, HAS_IDS)
        noisy = tl.where(kept, gumbel(words_of(ids, stream)) - depths, float("-inf"))
        best, drawn = _better(noisy, columns, best, drawn)
    return Drawn(best, drawn, left)


@triton.jit
def _drawn_of_chunks(
    row,
    candidates,
    options,
    stream,
    limit,
    last,
    top,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """As `_drawn_of_list`, of all ids of the picked chunks."""
    SIZE: tl.constexpr = PIECE // CHUNKS
    temperature = options.temperature
    scale = scale_of(temperature)
    before_reach = _reach(limit - 1, temperature)
    limit_reach = _reach(limit, temperature)
    chunk_ptr = candidates.chunk_ptr
    num_chunks = candidates.num_chunks
    best = float("-inf")
    drawn = NO_COLUMN
    left = tl.zeros([TILE, SIZE // EACH], tl.float32)
    places = tl.arange(0, SIZE)
    x = tile_of(
        row, chunk_ptr, 0, num_chunks, TILE, PIECE, CHUNKS, THREADS, EACH, HAS_IDS, HAS_EDITS
    )[0]
    for first in range(0, num_chunks, TILE):
        next_x = tile_of(
            row,
            chunk_ptr,
            first + TILE,
            num_chunks,
            TILE,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            HAS_IDS,
            HAS_EDITS,
        )[0]
        columns = columns_of(
            chunk_ptr, first, num_chunks, places, TILE, PIECE, CHUNKS, THREADS, EACH
        )[0]
        differences = top - x
        exponents = differences * scale
        weights = tl.exp2(-exponents)
        kept = (differences <= before_reach) | ((differences <= limit_reach) & (columns <= last))
        left += _sums(tl.where(kept & (weights >= options.min_p), weights, 0.0), EACH)
        words = words_of_tile(
            row,
            chunk_ptr,
            columns,
            first,
            num_chunks,
            stream,
            TILE,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            HAS_IDS,
        )
        best, drawn = _best_of_tile(
            differences, exponents, weights, kept, words, columns, options, best, drawn
        )
        x = next_x
    return Drawn(best, drawn, tl.sum(tl.sum(left, axis=1), axis=0))


@triton.jit
def drawn_of_many(
    row,
    candidates,
    split,
    options,
    stream,
    far,
    top,
    mass,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    WARPS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """As `drawn_of_cut`, of any number of candidates: all ids up to a depth, and of those that lie
    at it the first columns."""
    SIZE: tl.constexpr = PIECE // CHUNKS
    TILE: tl.constexpr = WARPS * 512 // SIZE
    SEARCHED: tl.constexpr = WARPS * 256 // SIZE
    SAMPLE: tl.constexpr = WARPS * 1024
    temperature = options.temperature
    top_k = options.top_k
    top_p = options.top_p
    is_listed = candidates.found <= LISTED
    is_split = (SHARES > 1) & (not is_listed) & (candidates.num_chunks > UNSHARED)
    is_split = is_split & (top_k == 0) & (top_p < 1)
    is_last = (SHARES == 1) | is_split | (split.share == 0)
    pair_ptr = candidates.pair_ptr
    if SHARES > 1:
        pair_ptr += tl.where(is_split, (SHARES - split.share) * PLACES, 0)
    candidates = Candidates(candidates.chunk_ptr, candidates.num_chunks, pair_ptr, candidates.found)
    # the depth as a key, and how many stay of the ids that lie there
    limit = (far * LN_2).to(tl.int32, bitcast=True)
    stay = 2147483647.0
    last = row.vocab - 1
    # up to where the row is measured: by count first, then by mass
    end = tl.full([], NO_DEPTH, tl.int32)
    by_mass = top_k == 0
    total = tl.where(by_mass, mass, row.vocab.to(tl.float32))
    number = candidates.found
    # of ids that are sure to stay and are not listed
    best = float("-inf")
    column = NO_COLUMN
    left = 0.0
    is_whole = (not is_listed) & (top_k > 0) & (top_k <= WHOLE)
    if not HAS_EDITS and is_whole:  # one more list with edits takes registers from all
        deepest = _guessed(
            top_k.to(tl.float32),
            by_mass,
            tl.full([], -1, tl.int32),
            0.0,
            limit,
            end,
            total,
            row,
            top,
            temperature,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            ALL_CHUNKS,
            HAS_IDS,
            HAS_EDITS,
            SAMPLE,
        )[1]
        found = _listed_within(
            deepest,
            row,
            candidates,
            temperature,
            top,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            HAS_IDS,
            HAS_EDITS,
            2 * TILE,
            WARPS,
        )
        is_listed = (found <= LISTED) & ((found >= top_k) | (deepest >= limit))
        number = tl.where(is_listed, found, number)
    is_cut = (top_k == 0) & (top_p >= 1)
    while not is_cut:
        need = tl.where(by_mass, tl.maximum(top_p * mass, LEAST_NEED), top_k.to(tl.float32))
        low = tl.full([], -1, tl.int32)
        high = limit
        before = 0.0
        if not is_listed:
            low, high, before, number, drawn, is_last = _narrowed(
                need,
                by_mass,
                limit,
                end,
                total,
                row,
                candidates,
                split,
                is_split,
                options,
                stream,
                top,
                PIECE,
                CHUNKS,
                THREADS,
                EACH,
                ALL_CHUNKS,
                HAS_IDS,
                HAS_EDITS,
                TILE,
                SAMPLE,
                SHARES,
            )
            best = drawn.score
            column = drawn.column
            left = drawn.mass
        if number <= LISTED:
            keys = _listed_keys(candidates, number, top, temperature)
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
                row,
                candidates,
                top,
                temperature,
                False,
                PIECE,
                CHUNKS,
                THREADS,
                EACH,
                HAS_IDS,
                HAS_EDITS,
                SEARCHED,
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
                keys = _listed_keys(candidates, number, top, temperature)
                weights = tl.exp(-keys.to(tl.float32, bitcast=True))
                nearer = tl.sum(tl.where(keys < limit, weights, 0.0), axis=0)
                within = tl.sum(tl.where(keys <= limit, weights, 0.0), axis=0)
            else:
                nearer, within, _ = _measured(
                    limit - 1,
                    limit,
                    limit,
                    0,
                    True,
                    row,
                    candidates,
                    top,
                    temperature,
                    False,
                    PIECE,
                    CHUNKS,
                    THREADS,
                    EACH,
                    HAS_IDS,
                    HAS_EDITS,
                    SEARCHED,
                )
            mass = tl.minimum(nearer + stay * weight, within)
            end = limit
            total = mass
        by_mass = True
    if (top_k > 0) | (top_p < 1):
        if number <= LISTED:
            keys = _listed_keys(candidates, number, top, temperature)
            places = tl.arange(0, LISTED)
            pairs = tl.load(candidates.pair_ptr + places, mask=places < number, other=0)
            columns = of_pairs(pairs)[1]
            columns = tl.where(keys == limit, columns, NO_COLUMN)
            if tl.sum((columns < NO_COLUMN).to(tl.float32), axis=0) > stay:
                last, _ = _least_listed(stay, tl.zeros_like(last), last, columns, False)
        else:
            equals, _, _ = _measured(
                last,
                last,
                last,
                limit,
                False,
                row,
                candidates,
                top,
                temperature,
                True,
                PIECE,
                CHUNKS,
                THREADS,
                EACH,
                HAS_IDS,
                HAS_EDITS,
                SEARCHED,
            )
            if equals > stay:
                last, _ = _least(
                    stay,
                    tl.zeros_like(last),
                    last,
                    tl.zeros_like(stay),
                    limit,
                    False,
                    row,
                    candidates,
                    top,
                    temperature,
                    True,
                    PIECE,
                    CHUNKS,
                    THREADS,
                    EACH,
                    HAS_IDS,
                    HAS_EDITS,
                    SEARCHED,
                )
    if number <= LISTED:
        drawn = _drawn_of_list(
            row,
            Candidates(candidates.chunk_ptr, candidates.num_chunks, candidates.pair_ptr, number),
            options,
            stream,
            limit,
            last,
            top,
            Drawn(best, column, left),
            HAS_IDS,
            WARPS * 256,
        )
    else:
        drawn = _drawn_of_chunks(
            row,
            candidates,
            options,
            stream,
            limit,
            last,
            top,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            HAS_IDS,
            HAS_EDITS,
            TILE,
        )
    return drawn.column, limit.to(tl.float32, bitcast=True), last, drawn.mass, is_last
