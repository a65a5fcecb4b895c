"""Draws under top-k, top-p and min-p on the device.

Of an id counts its depth, (the row's maximum - x) / T: -z of the door. Chunks of ids that lie too
deep are left out, the few ids of the others are ordered by counting. Where they are many, the cuts
are searched for by passes over them; a flat nucleus from which only a token is drawn has none.
"""

import triton
import triton.language as tl

from mtp_plugin.speculative.logit_rows.processing_triton import only_lower
from mtp_plugin.speculative.logit_rows.rows_triton import NO_COLUMN, Picked, highest_of, picked_of
from mtp_plugin.speculative.ops.sampling.cuts.candidates_kernel import (
    LISTED,
    Candidates,
    depths_of,
    listed,
    listed_fours,
    listed_of_fours,
    of_pairs,
    pairs_of,
    tile_of,
)
from mtp_plugin.speculative.ops.sampling.cuts.flat_kernel import drawn_of_flat
from mtp_plugin.speculative.ops.sampling.cuts.search_kernel import UNSHARED, drawn_of_many
from mtp_plugin.speculative.ops.sampling.noise_kernel import (
    Draw,
    gumbel,
    ids_of,
    scale_of,
    words_of,
)

LN_2 = tl.constexpr(0.6931471805599453)
DEEPEST = tl.constexpr(58.0)
"""In log2: what lies deeper is never drawn, as noise spans 38, and no sum of weights shows it."""
DEEPEST_TOLD = tl.constexpr(1073741824.0)
"""In log2: what stays up to there counts where somebody asks what is left of rows."""
DEPTH_SLACK = tl.constexpr(0.01)
"""In log2: more than a depth of DEEPEST is off by its rounding."""
ROUNDING = tl.constexpr(1e-6)
"""Of a depth beyond that: more than it is off."""
FEW = tl.constexpr(64)
MANY = tl.constexpr(256)
"""Candidates that are ordered by counting."""
PICKED = tl.constexpr(64)
"""Chunks, and fours of neighbours in them, that are looked at in one go."""
ASKED = tl.constexpr(52)
"""Chunks that a bound should leave at most: of some more fours of neighbours are near."""
STEPS = tl.constexpr(12)
STEPS_TOLD = tl.constexpr(24)
"""Of a search for a depth of some number of ids: as fine, from the deepest on."""
LEAST = tl.constexpr(-3.4028234663852886e38)
NO_KEY = tl.constexpr(9223372036854775807)
CROWD = tl.constexpr(256.0)
"""Masses of chunks, each as multiples of its highest value's, that tell of a flat nucleus."""
LEAST_TRIED = tl.constexpr(0.25)
"""Of top-p: of a smaller nucleus one id in many is tried, and a search is as fast."""


@triton.jit
def _depth_of_count(depths, top_k, far, STEPS: tl.constexpr):
    """A depth up to ``far`` within which at least ``top_k`` ids lie, or ``far``.

    Each chunk within it has such an id. Three depths are tried at a time, their counts in one word:
    of the chunks that lie deeper, as the first one never does.
    """
    ALL: tl.constexpr = depths.shape[0]
    BITS: tl.constexpr = 10 if ALL <= 1024 else 20
    WORD: tl.constexpr = tl.int32 if ALL <= 1024 else tl.int64
    MASK: tl.constexpr = (1 << BITS) - 1
    near = 0.0
    count = ALL + 1
    step = tl.where(top_k > ALL, STEPS, 0)
    while (count > tl.maximum(top_k, ASKED)) & (step < STEPS):
        part = (far - near) * 0.25
        d1 = near + part
        d2 = near + part * 2
        d3 = near + part * 3
        deeper = (depths > d1).to(WORD)
        deeper += ((depths > d2).to(WORD) << BITS) + ((depths > d3).to(WORD) << (2 * BITS))
        counts = tl.sum(deeper, axis=0)
        n1 = ALL - (counts & MASK).to(tl.int32)
        n2 = ALL - ((counts >> BITS) & MASK).to(tl.int32)
        n3 = ALL - ((counts >> (2 * BITS)) & MASK).to(tl.int32)
        count = tl.where(
            n1 >= top_k, n1, tl.where(n2 >= top_k, n2, tl.where(n3 >= top_k, n3, count))
        )
        near = tl.where(n1 >= top_k, near, tl.where(n2 >= top_k, d1, tl.where(n3 >= top_k, d2, d3)))
        far = tl.where(n1 >= top_k, d1, tl.where(n2 >= top_k, d2, tl.where(n3 >= top_k, d3, far)))
        step += 1
    return far


@triton.jit
def _depth_of_mass(depths, masses, need, SIZE: tl.constexpr):
    """A depth within which ids of at least the mass ``need`` lie, or the deepest.

    What lies deeper than d weighs less than 2^-d, so of a chunk whose first id lies within it at
    least its mass without all others at that weight does. Where few chunks are within it nearer
    ones are not asked for.
    """
    near = 0.0
    far = DEEPEST + 0.0
    count = depths.shape[0]
    weights = tl.exp2(-depths)
    while (far - near > 0.6) & (count > ASKED):
        middle = (near + far) * 0.5
        within = depths <= middle
        sure = tl.maximum(weights, masses - (SIZE - 1) * tl.exp2(-middle))
        enough = tl.sum(tl.where(within, sure, 0.0), axis=0) >= need
        count = tl.where(enough, tl.sum(within.to(tl.int32), axis=0), count)
        far = tl.where(enough, middle, far)
        near = tl.where(enough, near, middle)
    return far


@triton.jit
def _drawn_of_few(
    draw,
    candidates,
    mass,
    HAS_IDS: tl.constexpr,
    SIZE: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """As `drawn_of_cut`, of few candidates, whose order and mass are counted."""
    options = draw.options
    found = candidates.found
    places = tl.arange(0, SIZE)
    here = places < found
    x, columns = of_pairs(tl.load(candidates.pair_ptr + places, mask=here, other=0))
    depths = depths_of(x, here, draw.top, options.temperature)
    # by depth, then by column, in one comparison
    keys = pairs_of(depths, columns)
    key_ptr = candidates.pair_ptr + MANY
    tl.store(key_ptr + places, keys, mask=here)
    tl.debug_barrier()
    rank = tl.zeros([SIZE], tl.int32)
    ahead = tl.zeros([SIZE], tl.float32)
    for start in range(0, found, COMPARED):
        others = start + tl.arange(0, COMPARED)
        other_keys = tl.load(key_ptr + others, mask=others < found, other=NO_KEY)
        first = other_keys[:, None] < keys[None, :]
        rank += tl.sum(first.to(tl.int32), axis=0)
        weights = tl.exp(-of_pairs(other_keys)[0])
        ahead += tl.sum(tl.where(first, weights[:, None], 0.0), axis=0)
    weights = tl.exp(-depths)
    kept = here
    if options.top_k > 0:
        kept = kept & (rank < options.top_k)
        mass = tl.sum(tl.where(kept, weights, 0.0), axis=0)
    need = tl.where(options.top_p < 1, options.top_p * mass, float("inf"))
    # the first stays, however little is asked for
    kept = kept & ((ahead < need) | (rank == 0)) & (weights >= options.min_p)
    ids = ids_of(draw.row, columns, here, HAS_IDS)
    noisy = gumbel(words_of(ids, draw.stream)) - depths
    noisy = tl.where(kept, noisy, float("-inf"))
    best = highest_of(noisy)
    drawn = tl.min(tl.where(kept & (noisy == best), columns, NO_COLUMN), axis=0)
    limit = highest_of(tl.where(kept, depths, -1.0))
    last = tl.max(tl.where(kept & (depths == limit), columns, -1), axis=0)
    return drawn, limit, last, tl.sum(tl.where(kept, weights, 0.0), axis=0)


@triton.jit
def drawn_of_cut(
    draw,
    tops,
    details,
    chunks,
    num_chunks,
    picked_ptr,
    pair_ptr,
    split,
    bound_ptr,
    LAYOUT: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    BOUNDS: tl.constexpr,
    ALL_BOUNDS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    WARPS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """The column that a row draws, and of what stays the deepest depth, the last column there and
    the mass; of its chunks' highest values ``tops`` and, for top-p alone, their masses ``details``.
    And whether this program knows them: of those that share a row one does.

    All pointers stand at the row's own, of what is written at the share's."""
    # so many chunks as a bound should leave are one tile
    GATHERED: tl.constexpr = WARPS * (512 if HAS_EDITS else 1024) // LAYOUT.chunk_size
    row = draw.row
    options = draw.options
    temperature = options.temperature
    # no difference to it is -0, whose bits are not in the order of the others
    top = tl.where(draw.top == 0, 0.0, draw.top)
    draw = Draw(row, options, draw.stream, top)
    depths = (top - tops) * scale_of(temperature)
    far = (DEEPEST_TOLD if HAS_CUTS else DEEPEST) + 0.0
    mass = 0.0
    if options.top_k > 0:
        far = _depth_of_count(depths, options.top_k, far, STEPS_TOLD if HAS_CUTS else STEPS)
    elif options.top_p < 1:
        masses = tl.where(tops > float("-inf"), details * tl.exp2(-depths), 0.0)
        mass = tl.sum(masses, axis=0)
        far = _depth_of_mass(depths, masses, options.top_p * mass, LAYOUT.chunk_size)
    # the mass of the k first counts what min-p leaves out
    if (options.top_k == 0) | (options.top_p >= 1):
        far = tl.minimum(far, -tl.log2(options.min_p))
    far += DEPTH_SLACK
    if HAS_CUTS:
        far += far * ROUNDING

    here = (depths <= far) & (chunks < num_chunks)
    picked = picked_of(here, picked_ptr)
    is_nucleus = (options.top_k == 0) & (options.top_p < 1)
    is_helped = is_nucleus & (picked.number > UNSHARED)
    is_tried = is_nucleus & (options.top_p >= LEAST_TRIED)
    if SHARES > 1:
        is_idle = (split.share > 0) & (picked.number <= UNSHARED)
        picked = Picked(picked_ptr, tl.where(is_idle, 0, picked.number))
    # what a thread wrote others read
    tl.debug_barrier()
    # a number, so that what is -inf lies deeper
    least = tl.maximum(top - far * LN_2 * temperature, LEAST)
    found = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    by_fours = picked.number <= PICKED
    if HAS_EDITS:
        by_fours = by_fours & only_lower(row.edits)
    if by_fours:
        four_ptr = pair_ptr + 2 * MANY
        num_fours = listed_fours(
            row, least, picked, four_ptr, PICKED, WARPS, LAYOUT, HAS_IDS, HAS_EDITS
        )
        tl.debug_barrier()
        if num_fours <= PICKED:
            found = listed_of_fours(
                row, least, four_ptr, num_fours, pair_ptr, PICKED, HAS_IDS, HAS_EDITS
            )
            first = picked.number
    # of so many ids every chunk has some, and nearly all would be listed
    is_many = (options.top_k > MANY) & (picked.number > UNSHARED)
    found = tl.where(is_many, LISTED + 1, found)
    if not HAS_CUTS:
        # the cut is not asked for: what is crowded needs no list; of other rows nothing is there
        crowd = tl.sum(tl.where(here & is_tried, details, 0.0), axis=0)
        found = tl.where(is_helped & is_tried & (crowd > CROWD), LISTED + 1, found)
    while (first < picked.number) & (found <= LISTED):
        x = tile_of(row, picked, first, GATHERED, LAYOUT, HAS_IDS, HAS_EDITS)[0]
        found = listed(x, x >= least, picked, first, found, pair_ptr, LAYOUT, WARPS)
        first += GATHERED
        if SHARES > 1:
            # with help no more is listed of a row that by what is seen has twice too many
            seen = tl.minimum(first, picked.number)
            is_flat = is_helped & (found * picked.number > seen * (2 * LISTED))
            found = tl.where(is_flat, tl.maximum(found, LISTED + 1), found)
    tl.debug_barrier()

    candidates = Candidates(picked, pair_ptr, found)
    drawn = tl.full([], NO_COLUMN, tl.int32)
    limit = tl.full([], 0.0, tl.float32)
    last = tl.full([], 0, tl.int32)
    left = tl.full([], 0.0, tl.float32)
    is_known = split.share == 0
    if SHARES == 1 or is_known | (found > LISTED):
        if found <= FEW:
            drawn, limit, last, left = _drawn_of_few(draw, candidates, mass, HAS_IDS, FEW, FEW)
        elif found <= MANY:
            drawn, limit, last, left = _drawn_of_few(
                draw, candidates, mass, HAS_IDS, MANY, WARPS * 512 // MANY
            )
        else:
            is_flat = is_tried & (found > LISTED)
            if not HAS_CUTS and is_flat:
                drawn, is_known = drawn_of_flat(
                    draw,
                    split,
                    is_helped,
                    mass,
                    bound_ptr,
                    BOUNDS,
                    HAS_IDS,
                    HAS_EDITS,
                    ALL_BOUNDS,
                    SHARES,
                )
            else:
                drawn, limit, last, left, is_known = drawn_of_many(
                    draw,
                    candidates,
                    split,
                    far,
                    mass,
                    LAYOUT,
                    ALL_CHUNKS,
                    HAS_IDS,
                    HAS_EDITS,
                    WARPS,
                    SHARES,
                )
    return drawn, limit, last, left, is_known
