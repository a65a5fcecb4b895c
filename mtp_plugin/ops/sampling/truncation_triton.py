"""Sampling from rows with top-k, top-p and min-p.

The depth of an id is (row maximum - x) / T. Chunks of ids that are too deep are left out, and the
few remaining candidates are ranked by counting. If there are many, `truncation_search_triton` finds
the threshold by passes over them.

A flat nucleus (top-p alone, many tokens) of which only the token is needed has no threshold search.
Top-p keeps the most likely ids, so an id is kept if the mass ahead of it is less than top_p. The id
with the highest noisy score of the whole row is kept with probability top_p, and is then the sample
wherever the threshold lies; to check that, it suffices to read the row until more than 1 - top_p of
the mass is found not to be ahead. Otherwise the threshold is ahead of this id, and the id with the
highest score among those ahead of it is tried next.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from mtp_plugin.ops.logit_rows.processing_triton import only_lower, process_values
from mtp_plugin.ops.logit_rows.rows_triton import (
    NO_COLUMN,
    Picked,
    highest_of,
    load_block,
    number_of,
    picked_of,
)
from mtp_plugin.ops.sampling.row_triton import (
    Cutoff,
    RowSample,
    best_noisy_column,
    gumbel,
    gumbel_bound,
    ids_of,
    is_ahead,
    no_cutoff,
    random_words,
    scale_of,
    values_of,
    words_of,
)
from mtp_plugin.ops.sampling.truncation_passes_triton import (
    LEAST_NEED,
    LISTED,
    UNSHARED,
    Candidates,
    depths_of,
    is_last_of,
    list_from_groups,
    list_groups,
    list_values,
    of_pairs,
    pairs_of,
    reach_of,
    tile_of,
)
from mtp_plugin.ops.sampling.truncation_search_triton import LN_2, sample_many

DEEPEST = tl.constexpr(58.0)
"""In log2: deeper ids are never sampled, as noise spans 38, and change no sum of weights."""
DEEPEST_KEPT = tl.constexpr(1073741824.0)
"""In log2: the same where the truncation of rows is an output."""
DEPTH_SLACK = tl.constexpr(0.01)
"""In log2: more than the rounding error of a depth of DEEPEST."""
ROUNDING = tl.constexpr(1e-6)
"""More than the relative rounding error of larger depths."""
FEW = tl.constexpr(64)
MANY = tl.constexpr(256)
"""Largest numbers of candidates that are ranked by counting."""
PICKED = tl.constexpr(64)
"""Chunks, and groups of four neighbours in them, that are read in one tile."""
FEW_CHUNKS = tl.constexpr(52)
"""A bound is tightened until at most so many chunks remain; PICKED with a margin."""
STEPS = tl.constexpr(12)
STEPS_KEPT = tl.constexpr(24)
"""Steps of the search for the depth of a number of ids: equally fine, from either depth on."""
LEAST = tl.constexpr(-3.4028234663852886e38)
NO_KEY = tl.constexpr(9223372036854775807)
CROWD = tl.constexpr(256.0)
"""Sum of the relative masses of chunks from which on a nucleus counts as flat."""
WEIGHED = tl.constexpr(2)
"""Blocks that are weighed between two checks; one where values are processed."""
LEAST_TRIED = tl.constexpr(0.25)
"""Smallest top-p for `sample_flat`; for a smaller nucleus a search is as fast."""


@triton.jit
def _depth_of_count(depths, top_k, far, STEPS: tl.constexpr):
    """A depth of at most ``far`` within which at least ``top_k`` ids lie, or ``far``.

    Each chunk within that depth has such an id. A step tries three depths, with the counts of the
    deeper chunks packed into one word; the first chunk is never deeper.
    """
    ALL: tl.constexpr = depths.shape[0]
    BITS: tl.constexpr = 10 if ALL <= 1024 else 20
    WORD: tl.constexpr = tl.int32 if ALL <= 1024 else tl.int64
    MASK: tl.constexpr = (1 << BITS) - 1
    near = 0.0
    count = ALL + 1
    step = tl.where(top_k > ALL, STEPS, 0)
    while (count > tl.maximum(top_k, FEW_CHUNKS)) & (step < STEPS):
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
    """A depth within which ids with a mass of at least ``need`` lie, or DEEPEST.

    Ids deeper than d weigh less than 2^-d each, so a chunk with its maximum within d has at least
    its mass minus (SIZE - 1) 2^-d there. The search ends when few chunks are within the depth.
    """
    near = 0.0
    far = DEEPEST + 0.0
    count = depths.shape[0]
    weights = tl.exp2(-depths)
    while (far - near > 0.6) & (count > FEW_CHUNKS):
        middle = (near + far) * 0.5
        within = depths <= middle
        sure = tl.maximum(weights, masses - (SIZE - 1) * tl.exp2(-middle))
        enough = tl.sum(tl.where(within, sure, 0.0), axis=0) >= need
        count = tl.where(enough, tl.sum(within.to(tl.int32), axis=0), count)
        far = tl.where(enough, middle, far)
        near = tl.where(enough, near, middle)
    return far


@triton.jit
def _sample_few(
    sample,
    candidates,
    mass,
    HAS_IDS: tl.constexpr,
    SIZE: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """`sample_truncated` for few candidates: their ranks and masses are counted pair by pair."""
    options = sample.options
    found = candidates.found
    places = tl.arange(0, SIZE)
    here = places < found
    x, columns = of_pairs(tl.load(candidates.pair_ptr + places, mask=here, other=0))
    depths = depths_of(x, here, sample.top, options.temperature)
    # ordered by depth, then by column
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
    # the first is always kept
    kept = kept & ((ahead < need) | (rank == 0)) & (weights >= options.min_p)
    ids = ids_of(sample.row, columns, here, HAS_IDS)
    noisy = gumbel(words_of(ids, sample.stream)) - depths
    noisy = tl.where(kept, noisy, float("-inf"))
    best = highest_of(noisy)
    sampled = tl.min(tl.where(kept & (noisy == best), columns, NO_COLUMN), axis=0)
    limit = highest_of(tl.where(kept, depths, -1.0))
    last = tl.max(tl.where(kept & (depths == limit), columns, -1), axis=0)
    return sampled, limit, last, tl.sum(tl.where(kept, weights, 0.0), axis=0)


@triton.jit
def _load_processed_block(
    row, block, BLOCK: tl.constexpr, HAS_IDS: tl.constexpr, HAS_PROCESSING: tl.constexpr
):
    """Load processed values of a block; -inf for NaN and past the end of the row."""
    x = number_of(load_block(row.ptr, block, row.vocab, BLOCK))
    if HAS_PROCESSING:
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < row.vocab
        x = process_values(x, ids_of(row, columns, inside, HAS_IDS), inside, row.processing)
    return x


@triton.jit(noinline=True)
def _bound_scores(
    sample,
    first,
    step,
    bound_ptr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """Bound the noisy scores of the chunks of every ``step``-th block.

    Bounds are in log2, relative to the score of the row's maximum.
    """
    BLOCK: tl.constexpr = LAYOUT.block
    scale = scale_of(sample.options.temperature)
    x = _load_processed_block(sample.row, first, BLOCK, HAS_IDS, HAS_PROCESSING)
    for block in range(first, tl.cdiv(sample.row.vocab, BLOCK), step):
        # load the next block while this one is processed
        next_x = _load_processed_block(sample.row, block + step, BLOCK, HAS_IDS, HAS_PROCESSING)
        noise = gumbel_bound(random_words(sample.row, block, sample.stream, BLOCK, HAS_IDS))
        bound = noise - (sample.top - x) * scale
        bound = tl.reshape(bound, [LAYOUT.wraps, LAYOUT.threads, LAYOUT.each])
        bound = tl.max(tl.max(bound, axis=0), axis=1)
        bound = tl.max(tl.reshape(bound, [LAYOUT.chunks, LAYOUT.chunk_threads]), axis=1)
        tl.store(bound_ptr + block * LAYOUT.chunks + tl.arange(0, LAYOUT.chunks), bound)
        x = next_x


@triton.jit
def _by_thread(x, LAYOUT: tl.constexpr):
    """Sum the values of a block per thread."""
    return tl.sum(
        tl.sum(tl.reshape(x, [LAYOUT.wraps, LAYOUT.threads, LAYOUT.each]), axis=0), axis=1
    )


@triton.jit
def _weigh(
    first, cutoff, sample, LAYOUT: tl.constexpr, HAS_IDS: tl.constexpr, HAS_PROCESSING: tl.constexpr
):
    """The weights of the ids of some blocks that are ahead of a cutoff, and of the others there."""
    BLOCK: tl.constexpr = LAYOUT.block
    THREADS: tl.constexpr = LAYOUT.threads
    NUMBER: tl.constexpr = 1 if HAS_PROCESSING else WEIGHED
    scale = scale_of(sample.options.temperature)
    ahead = tl.zeros([THREADS], tl.float32)
    others = tl.zeros([THREADS], tl.float32)
    for number in tl.static_range(NUMBER):
        block = first + number
        x = _load_processed_block(sample.row, block, BLOCK, HAS_IDS, HAS_PROCESSING)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        differences = sample.top - x
        weights = tl.exp2(differences * -scale)
        here = is_ahead(differences, columns, cutoff)
        ahead += _by_thread(tl.where(here, weights, 0.0), LAYOUT)
        others += _by_thread(tl.where(here, 0.0, weights), LAYOUT)
    return tl.sum(ahead, axis=0), tl.sum(others, axis=0)


@triton.jit(noinline=True)
def _is_kept(
    column,
    need,
    mass,
    sample,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """Whether less than ``need`` of the row's ``mass`` is ahead of a column, and its cutoff.

    The pass ends as soon as the weights that are not ahead exceed the rest of the mass.
    """
    BLOCK: tl.constexpr = LAYOUT.block
    temperature = sample.options.temperature
    same = column + tl.zeros([32], tl.int32)
    x = values_of(sample.row, same, same < sample.row.vocab, HAS_IDS, HAS_PROCESSING)
    keys = depths_of(x, same < sample.row.vocab, sample.top, temperature).to(tl.int32, bitcast=True)
    key = tl.max(keys, axis=0)
    cutoff = Cutoff(reach_of(key - 1, temperature), reach_of(key, temperature), column)
    rest = mass - need
    ahead = 0.0
    others = 0.0
    first = tl.full([], 0, tl.int32)
    num_blocks = tl.cdiv(sample.row.vocab, BLOCK)
    while (first < num_blocks) & (ahead < need) & (others <= rest):
        nearer, outer = _weigh(first, cutoff, sample, LAYOUT, HAS_IDS, HAS_PROCESSING)
        ahead += nearer
        others += outer
        first += 1 if HAS_PROCESSING else WEIGHED
    return ahead < need, cutoff


@triton.jit
def sample_flat(
    sample,
    split,
    is_shared,
    mass,
    bound_ptr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    ALL_BOUNDS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """The column that a row samples with top-p alone, without its threshold.

    Returns it and whether this program knows it: one of the programs that share the row does.
    """
    is_last = tl.full([], 1, tl.int1)
    if SHARES > 1 and is_shared:
        _bound_scores(sample, split.share, SHARES, bound_ptr, LAYOUT, HAS_IDS, HAS_PROCESSING)
        is_last = is_last_of(split, SHARES)
    else:
        _bound_scores(sample, 0, 1, bound_ptr, LAYOUT, HAS_IDS, HAS_PROCESSING)
        tl.debug_barrier()
    need = tl.maximum(sample.options.top_p * mass, LEAST_NEED)
    numbers = tl.arange(0, ALL_BOUNDS)
    num_bounds = tl.cdiv(sample.row.vocab, LAYOUT.block) * LAYOUT.chunks
    inside = (numbers < num_bounds) & is_last
    bounds = tl.load(bound_ptr + numbers, mask=inside, other=float("-inf"))
    cutoff = no_cutoff()
    before = cutoff.before
    within = cutoff.within
    column = cutoff.column
    is_searching = is_last
    while is_searching:
        column = best_noisy_column(
            sample,
            sample.options.temperature,
            bounds,
            numbers,
            Cutoff(before, within, column),
            LAYOUT,
            HAS_IDS,
            HAS_PROCESSING,
            True,
        )
        is_kept, cutoff = _is_kept(column, need, mass, sample, LAYOUT, HAS_IDS, HAS_PROCESSING)
        before = cutoff.before
        within = cutoff.within
        is_searching = ~is_kept & (column != NO_COLUMN)
    return column, is_last


@triton.jit
def sample_truncated(
    sample,
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
    HAS_PROCESSING: tl.constexpr,
    HAS_TRUNCATION: tl.constexpr,
    WARPS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Sample from a row after top-k, top-p and min-p.

    Args:
        tops: the maxima of the row's chunks.
        details: their masses, for top-p alone.
        picked_ptr, pair_ptr: of the share; other pointers are those of the row.

    Returns:
        The sampled column; of the kept tokens the largest depth, the last column at that depth and
        the mass; and whether this program knows them: one of those that share a row does.
    """
    # the chunks that a bound leaves fit one tile
    GATHERED: tl.constexpr = WARPS * (512 if HAS_PROCESSING else 1024) // LAYOUT.chunk_size
    row = sample.row
    options = sample.options
    temperature = options.temperature
    # no difference to the maximum is -0.0, whose bits are out of order
    top = tl.where(sample.top == 0, 0.0, sample.top)
    sample = RowSample(row, options, sample.stream, top)
    depths = (top - tops) * scale_of(temperature)
    far = (DEEPEST_KEPT if HAS_TRUNCATION else DEEPEST) + 0.0
    mass = 0.0
    if options.top_k > 0:
        far = _depth_of_count(depths, options.top_k, far, STEPS_KEPT if HAS_TRUNCATION else STEPS)
    elif options.top_p < 1:
        masses = tl.where(tops > float("-inf"), details * tl.exp2(-depths), 0.0)
        mass = tl.sum(masses, axis=0)
        far = _depth_of_mass(depths, masses, options.top_p * mass, LAYOUT.chunk_size)
    # with top-k and top-p, the mass of the top k includes ids that min-p removes
    if (options.top_k == 0) | (options.top_p >= 1):
        far = tl.minimum(far, -tl.log2(options.min_p))
    far += DEPTH_SLACK
    if HAS_TRUNCATION:
        far += far * ROUNDING

    here = (depths <= far) & (chunks < num_chunks)
    picked = picked_of(here, picked_ptr)
    is_nucleus = (options.top_k == 0) & (options.top_p < 1)
    is_helped = is_nucleus & (picked.number > UNSHARED)
    is_tried = is_nucleus & (options.top_p >= LEAST_TRIED)
    if SHARES > 1:
        is_idle = (split.share > 0) & (picked.number <= UNSHARED)
        picked = Picked(picked_ptr, tl.where(is_idle, 0, picked.number))
    # threads read what others wrote
    tl.debug_barrier()
    # finite, so that -inf lies deeper
    least = tl.maximum(top - far * LN_2 * temperature, LEAST)
    found = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    by_groups = picked.number <= PICKED
    if HAS_PROCESSING:
        by_groups = by_groups & only_lower(row.processing)
    if by_groups:
        group_ptr = pair_ptr + 2 * MANY
        num_groups = list_groups(
            row, least, picked, group_ptr, PICKED, WARPS, LAYOUT, HAS_IDS, HAS_PROCESSING
        )
        tl.debug_barrier()
        if num_groups <= PICKED:
            found = list_from_groups(
                row, least, group_ptr, num_groups, pair_ptr, PICKED, HAS_IDS, HAS_PROCESSING
            )
            first = picked.number
    # with a large top-k nearly all ids of the chunks would be listed
    is_many = (options.top_k > MANY) & (picked.number > UNSHARED)
    found = tl.where(is_many, LISTED + 1, found)
    if not HAS_TRUNCATION:
        # the truncation is no output, so a flat nucleus needs no list
        crowd = tl.sum(tl.where(here & is_tried, details, 0.0), axis=0)
        found = tl.where(is_helped & is_tried & (crowd > CROWD), LISTED + 1, found)
    while (first < picked.number) & (found <= LISTED):
        x = tile_of(row, picked, first, GATHERED, LAYOUT, HAS_IDS, HAS_PROCESSING)[0]
        found = list_values(x, x >= least, picked, first, found, pair_ptr, LAYOUT, WARPS)
        first += GATHERED
        if SHARES > 1:
            # a shared row that so far has twice too many ids is listed no further
            seen = tl.minimum(first, picked.number)
            is_flat = is_helped & (found * picked.number > seen * (2 * LISTED))
            found = tl.where(is_flat, tl.maximum(found, LISTED + 1), found)
    tl.debug_barrier()

    candidates = Candidates(picked, pair_ptr, found)
    sampled = tl.full([], NO_COLUMN, tl.int32)
    limit = tl.full([], 0.0, tl.float32)
    last = tl.full([], 0, tl.int32)
    kept_mass = tl.full([], 0.0, tl.float32)
    is_known = split.share == 0
    if SHARES == 1 or is_known | (found > LISTED):
        if found <= FEW:
            sampled, limit, last, kept_mass = _sample_few(
                sample, candidates, mass, HAS_IDS, FEW, FEW
            )
        elif found <= MANY:
            sampled, limit, last, kept_mass = _sample_few(
                sample, candidates, mass, HAS_IDS, MANY, WARPS * 512 // MANY
            )
        else:
            is_flat = is_tried & (found > LISTED)
            if not HAS_TRUNCATION and is_flat:
                sampled, is_known = sample_flat(
                    sample,
                    split,
                    is_helped,
                    mass,
                    bound_ptr,
                    BOUNDS,
                    HAS_IDS,
                    HAS_PROCESSING,
                    ALL_BOUNDS,
                    SHARES,
                )
            else:
                sampled, limit, last, kept_mass, is_known = sample_many(
                    sample,
                    candidates,
                    split,
                    far,
                    mass,
                    LAYOUT,
                    ALL_CHUNKS,
                    HAS_IDS,
                    HAS_PROCESSING,
                    WARPS,
                    SHARES,
                )
    return sampled, limit, last, kept_mass, is_known
