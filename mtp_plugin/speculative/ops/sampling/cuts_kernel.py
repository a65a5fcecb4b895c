"""Draws under top-k, top-p and min-p on the device.

Of an id counts its depth, (the row's maximum - x) / T: -z of the door. Chunks of ids that lie too
deep are left out, the few ids of the others are ordered by counting. Where they are many, the cuts
are searched for by passes over them.
"""

import triton
import triton.language as tl

from mtp_plugin.speculative.ops.sampling.noise_kernel import gumbel, ids_of, scale_of, words_of

LN_2 = tl.constexpr(0.6931471805599453)
NO_COLUMN = tl.constexpr(2147483647)
DEEPEST = tl.constexpr(58.0)
"""In log2: what lies deeper is never drawn, as noise spans 38, and no sum of weights shows it."""
DEPTH_SLACK = tl.constexpr(0.01)
"""In log2: more than a depth is off by its rounding."""
FEW = tl.constexpr(64)
MANY = tl.constexpr(256)
"""Candidates that are ordered by counting; rows of the launch's buffers have as many places."""
PICKED = tl.constexpr(64)
"""Chunks that a bound should leave at most."""
GATHERED = tl.constexpr(32)
SEARCHED = tl.constexpr(16)
"""Chunks that are read at a time."""
BY_COUNT = tl.constexpr(0)
BY_MASS = tl.constexpr(1)
BY_COLUMN = tl.constexpr(2)


@triton.jit
def _depth_of_count(depths, top_k, ALL_CHUNKS: tl.constexpr):
    """A depth within which at least ``top_k`` ids lie, or the deepest.

    Each chunk within it has such an id. Three depths are tried at a time, their counts in one word.
    """
    BITS: tl.constexpr = 10 if ALL_CHUNKS < 1024 else 20
    MASK: tl.constexpr = (1 << BITS) - 1
    near = 0.0
    far = DEEPEST + 0.0
    count = ALL_CHUNKS + 1
    step = tl.where(top_k > ALL_CHUNKS, 12, 0)
    while (count > tl.maximum(top_k, PICKED)) & (step < 12):
        part = (far - near) * 0.25
        d1 = near + part
        d2 = near + part * 2
        d3 = near + part * 3
        within = (depths <= d1).to(tl.int64)
        within += ((depths <= d2).to(tl.int64) << BITS) + ((depths <= d3).to(tl.int64) << (2 * BITS))
        counts = tl.sum(within, axis=0)
        n1 = (counts & MASK).to(tl.int32)
        n2 = ((counts >> BITS) & MASK).to(tl.int32)
        n3 = ((counts >> (2 * BITS)) & MASK).to(tl.int32)
        count = tl.where(
            n1 >= top_k, n1, tl.where(n2 >= top_k, n2, tl.where(n3 >= top_k, n3, count))
        )
        near = tl.where(
            n1 >= top_k, near, tl.where(n2 >= top_k, d1, tl.where(n3 >= top_k, d2, d3))
        )
        far = tl.where(n1 >= top_k, d1, tl.where(n2 >= top_k, d2, tl.where(n3 >= top_k, d3, far)))
        step += 1
    return far


@triton.jit
def _depth_of_mass(depths, masses, need, SIZE: tl.constexpr):
    """A depth within which ids of at least the mass ``need`` lie, or the deepest.

    What lies deeper than d weighs less than 2^-d, so of a chunk whose first id lies within it at
    least its mass without all others at that weight does.
    """
    near = 0.0
    far = DEEPEST + 0.0
    weights = tl.exp2(-depths)
    while far - near > 0.6:
        middle = (near + far) * 0.5
        sure = tl.maximum(weights, masses - (SIZE - 1) * tl.exp2(-middle))
        enough = tl.sum(tl.where(depths <= middle, sure, 0.0), axis=0) >= need
        far = tl.where(enough, middle, far)
        near = tl.where(enough, near, middle)
    return far


@triton.jit
def _tile(
    row_ptr,
    picked_ptr,
    first,
    num_picked,
    vocab,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """Values and columns of some picked chunks, both [TILE, ids of a chunk]; -inf beyond them."""
    SEGMENT: tl.constexpr = THREADS // CHUNKS * EACH
    at = first + tl.arange(0, TILE)
    chunk = tl.load(picked_ptr + at, mask=at < num_picked, other=0)
    places = tl.arange(0, PIECE // CHUNKS)
    places = places // SEGMENT * (THREADS * EACH) + places % SEGMENT
    starts = chunk // CHUNKS * PIECE + chunk % CHUNKS * SEGMENT
    columns = starts[:, None] + places[None, :]
    inside = (at < num_picked)[:, None] & (columns < vocab)
    x = tl.load(row_ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf")), columns


@triton.jit
def _drawn_of_few(
    found,
    value_ptr,
    column_ptr,
    vocab_ids_ptr,
    top,
    temperature,
    top_k,
    top_p,
    min_p,
    mass,
    index,
    key0,
    key1,
    ROLE: tl.constexpr,
    HAS_IDS: tl.constexpr,
    SIZE: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """The column that is drawn from ``found`` candidates, whose order and mass are counted."""
    places = tl.arange(0, SIZE)
    here = places < found
    x = tl.load(value_ptr + places, mask=here, other=float("-inf"))
    columns = tl.load(column_ptr + places, mask=here, other=NO_COLUMN)
    depths = tl.div_rn(top - x, temperature)
    rank = tl.zeros([SIZE], tl.int32)
    ahead = tl.zeros([SIZE], tl.float32)
    for start in range(0, found, COMPARED):
        others = start + tl.arange(0, COMPARED)
        other_x = tl.load(value_ptr + others, mask=others < found, other=float("-inf"))
        other_columns = tl.load(column_ptr + others, mask=others < found, other=NO_COLUMN)
        other_depths = tl.div_rn(top - other_x, temperature)
        first = other_depths[None, :] < depths[:, None]
        equal = other_depths[None, :] == depths[:, None]
        first = first | (equal & (other_columns[None, :] < columns[:, None]))
        rank += tl.sum(first.to(tl.int32), axis=1)
        ahead += tl.sum(tl.where(first, tl.exp(-other_depths)[None, :], 0.0), axis=1)
    weights = tl.exp(-depths)
    kept = here
    if top_k > 0:
        kept = kept & (rank < top_k)
        mass = tl.sum(tl.where(kept, weights, 0.0), axis=0)
    need = tl.where(top_p < 1, top_p * mass, float("inf"))
    kept = kept & (ahead < need) & (weights >= min_p)
    ids = ids_of(columns, here, vocab_ids_ptr, HAS_IDS)
    noisy = gumbel(words_of(ids, index, key0, key1, ROLE)) - depths
    noisy = tl.where(kept, noisy, float("-inf"))
    best = tl.max(noisy, axis=0)
    return tl.min(tl.where(kept & (noisy == best), columns, NO_COLUMN), axis=0)


@triton.jit
def _measured(
    k1,
    k2,
    k3,
    level,
    row_ptr,
    picked_ptr,
    num_picked,
    vocab,
    top,
    temperature,
    BY: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
):
    """The measure of the ids whose key is at most k1, k2, k3; one pass over the picked chunks.

    Key is the depth, bit for bit: none is negative, so its bits are in its order. The measure is
    the number of ids, or their mass. By column only ids of depth ``level`` count.
    """
    SIZE: tl.constexpr = PIECE // CHUNKS
    m1 = tl.zeros([SEARCHED, SIZE], tl.float32)
    m2 = tl.zeros([SEARCHED, SIZE], tl.float32)
    m3 = tl.zeros([SEARCHED, SIZE], tl.float32)
    for first in range(0, num_picked, SEARCHED):
        x, columns = _tile(
            row_ptr,
            picked_ptr,
            first,
            num_picked,
            vocab,
            SEARCHED,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
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
    row_ptr,
    picked_ptr,
    num_picked,
    vocab,
    top,
    temperature,
    BY: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
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
            row_ptr,
            picked_ptr,
            num_picked,
            vocab,
            top,
            temperature,
            BY,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
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
def _drawn_of_many(
    row_ptr,
    picked_ptr,
    num_picked,
    vocab_ids_ptr,
    vocab,
    far,
    top,
    temperature,
    top_k,
    top_p,
    min_p,
    mass,
    index,
    key0,
    key1,
    ROLE: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """The column that is drawn from any number of candidates: all ids up to a depth, and of those
    that lie at it the first columns."""
    # the depth as a key, and how many stay of the ids that lie there
    limit = (far * LN_2).to(tl.int32, bitcast=True)
    stay = 2147483647.0
    if top_k > 0:
        limit, before = _least(
            top_k.to(tl.float32),
            limit,
            0,
            row_ptr,
            picked_ptr,
            num_picked,
            vocab,
            top,
            temperature,
            BY_COUNT,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
        )
        stay = top_k.to(tl.float32) - before
        if top_p < 1:
            nearer, within, _ = _measured(
                limit - 1,
                limit,
                limit,
                0,
                row_ptr,
                picked_ptr,
                num_picked,
                vocab,
                top,
                temperature,
                BY_MASS,
                PIECE,
                CHUNKS,
                THREADS,
                EACH,
            )
            weight = tl.exp(-limit.to(tl.float32, bitcast=True))
            mass = tl.minimum(nearer + stay * weight, within)
    if top_p < 1:
        need = top_p * mass
        cut, before = _least(
            need,
            limit,
            0,
            row_ptr,
            picked_ptr,
            num_picked,
            vocab,
            top,
            temperature,
            BY_MASS,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
        )
        weight = tl.exp(-cut.to(tl.float32, bitcast=True))
        # each of the equals stays while the mass in front of it is less than needed
        equals = tl.maximum(tl.ceil((need - before) / weight), 1.0)
        stay = tl.where(cut == limit, tl.minimum(stay, equals), equals)
        limit = cut
    last = vocab - 1
    if (top_k > 0) | (top_p < 1):
        last, _ = _least(
            stay,
            last,
            limit,
            row_ptr,
            picked_ptr,
            num_picked,
            vocab,
            top,
            temperature,
            BY_COLUMN,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
        )
    best = float("-inf")
    drawn = NO_COLUMN
    for first in range(0, num_picked, SEARCHED):
        x, columns = _tile(
            row_ptr, picked_ptr, first, num_picked, vocab, SEARCHED, PIECE, CHUNKS, THREADS, EACH
        )
        depths = tl.div_rn(top - x, temperature)
        keys = depths.to(tl.int32, bitcast=True)
        kept = (keys < limit) | ((keys == limit) & (columns <= last))
        kept = kept & (tl.exp(-depths) >= min_p)
        ids = ids_of(columns, kept, vocab_ids_ptr, HAS_IDS)
        noisy = gumbel(words_of(ids, index, key0, key1, ROLE)) - depths
        noisy = tl.where(kept, noisy, float("-inf"))
        tile_best = tl.max(tl.max(noisy, axis=1), axis=0)
        at = tl.where(kept & (noisy == tile_best), columns, NO_COLUMN)
        at = tl.min(tl.min(at, axis=1), axis=0)
        at = tl.where(tile_best == best, tl.minimum(at, drawn), at)
        drawn = tl.where(tile_best >= best, at, drawn)
        best = tl.maximum(best, tile_best)
    return drawn


@triton.jit
def drawn_of_cut(
    row_ptr,
    vocab_ids_ptr,
    picked_ptr,
    value_ptr,
    column_ptr,
    vocab,
    num_chunks,
    tops,
    details,
    chunks,
    top,
    temperature,
    top_k,
    top_p,
    min_p,
    index,
    key0,
    key1,
    ROLE: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    EACH: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    """The column that a row draws, of its chunks' highest values ``tops`` and, for top-p alone,
    their masses ``details``. All pointers stand at the row's own."""
    SIZE: tl.constexpr = PIECE // CHUNKS
    depths = (top - tops) * scale_of(temperature)
    far = DEEPEST + 0.0
    mass = 0.0
    if top_k > 0:
        far = _depth_of_count(depths, top_k, ALL_CHUNKS)
    elif top_p < 1:
        masses = tl.where(tops > float("-inf"), details * tl.exp2(-depths), 0.0)
        mass = tl.sum(masses, axis=0)
        far = _depth_of_mass(depths, masses, top_p * mass, SIZE)
    # the mass of the k first counts what min-p leaves out
    if (top_k == 0) | (top_p >= 1):
        far = tl.minimum(far, -tl.log2(min_p))
    far += DEPTH_SLACK

    picked = (depths <= far) & (chunks < num_chunks)
    rank = tl.cumsum(picked.to(tl.int32), axis=0)
    num_picked = tl.max(rank, axis=0)
    tl.store(picked_ptr + rank - 1, chunks, mask=picked)
    # what a thread wrote others read
    tl.debug_barrier()
    reach = far * LN_2 * temperature
    found = 0
    first = 0
    while (first < num_picked) & (found <= MANY):
        x, columns = _tile(
            row_ptr, picked_ptr, first, num_picked, vocab, GATHERED, PIECE, CHUNKS, THREADS, EACH
        )
        near = (top - x <= reach) & (x > float("-inf"))
        run = tl.cumsum(near.to(tl.int32), axis=1)
        per_chunk = tl.max(run, axis=1)
        start = found + tl.cumsum(per_chunk, axis=0) - per_chunk
        place = start[:, None] + run - 1
        near = near & (place < MANY)
        tl.store(value_ptr + place, x, mask=near)
        tl.store(column_ptr + place, columns, mask=near)
        found += tl.sum(per_chunk, axis=0)
        first += GATHERED
    tl.debug_barrier()

    if found <= FEW:
        drawn = _drawn_of_few(
            found,
            value_ptr,
            column_ptr,
            vocab_ids_ptr,
            top,
            temperature,
            top_k,
            top_p,
            min_p,
            mass,
            index,
            key0,
            key1,
            ROLE,
            HAS_IDS,
            FEW,
            64,
        )
    elif found <= MANY:
        drawn = _drawn_of_few(
            found,
            value_ptr,
            column_ptr,
            vocab_ids_ptr,
            top,
            temperature,
            top_k,
            top_p,
            min_p,
            mass,
            index,
            key0,
            key1,
            ROLE,
            HAS_IDS,
            MANY,
            16,
        )
    else:
        drawn = _drawn_of_many(
            row_ptr,
            picked_ptr,
            num_picked,
            vocab_ids_ptr,
            vocab,
            far,
            top,
            temperature,
            top_k,
            top_p,
            min_p,
            mass,
            index,
            key0,
            key1,
            ROLE,
            PIECE,
            CHUNKS,
            THREADS,
            EACH,
            HAS_IDS,
        )
    return drawn
