"""Sampling from rows with top-k, top-p and min-p; part of `sample_finish_kernel`.

`sample_truncated`, for one row (README.md has the invariants and the costs):

1. Bound the depth of kept tokens by the chunk maxima (and sums, for top-p). Chunks whose maximum is
   deeper are left out.
2. List the candidates of the other chunks: the ids within that depth.
3. Up to MANY candidates: rank them pair by pair, truncate, sample (`_sample_few`).
4. More: find the threshold by search (`truncation_search_triton`, `truncation_passes_triton`).
5. If thousands of ids remain of a row with top-p alone, of which only the token is needed, sample
   without a threshold (`sample_flat`).

Phase 5: top-p keeps the most likely ids, so an id is kept if the mass before it is less than top_p.
The id with the highest noisy score of the whole row is kept with probability top_p, and is then the
sample wherever the threshold lies; to check that, it suffices to read the row until more than
1 - top_p of the mass is found not to be before it. Otherwise the threshold is before this id, and
the id with the highest score among those before it is tried next.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from mtp_plugin.ops.logit_rows.processing_triton import process_values
from mtp_plugin.ops.logit_rows.rows_triton import (
    NO_COLUMN,
    load_block,
    max_no_nan,
    nan_to_neg_inf,
    select_chunks,
)
from mtp_plugin.ops.sampling.row_triton import (
    OF_ALL,
    OF_MIN_P,
    Cutoff,
    RowSample,
    best_noisy_column,
    gumbel,
    gumbel_bound,
    is_before,
    load_ids,
    load_values,
    log2_scale,
    no_cutoff,
    philox_of_block,
    philox_of_ids,
)
from mtp_plugin.ops.sampling.truncation_passes_triton import (
    LIST_CAPACITY,
    MIN_REQUIRED,
    Candidates,
    compute_depths,
    list_values,
    load_tile,
    max_difference,
    pack_pairs,
    unpack_pairs,
)
from mtp_plugin.ops.sampling.truncation_search_triton import LN_2, sample_by_search

MAX_DEPTH = tl.constexpr(58.0)
"""In log2: deeper ids are never sampled, as noise spans 38, and change no sum of weights."""
MAX_KEPT_DEPTH = tl.constexpr(1073741824.0)
"""In log2: the same where the truncation of rows is an output."""
DEPTH_SLACK = tl.constexpr(0.01)
"""In log2: more than the rounding error of a depth of MAX_DEPTH."""
ROUNDING = tl.constexpr(1e-6)
"""More than the relative rounding error of larger depths."""
FEW = tl.constexpr(64)
MANY = tl.constexpr(256)
"""Largest numbers of candidates that are ranked by counting."""
MANY_CHUNKS = tl.constexpr(64)
"""With more selected chunks, rows with a large top-k or a flat nucleus are not listed."""
FEW_CHUNKS = tl.constexpr(52)
"""A bound is tightened until at most so many chunks remain."""
STEPS = tl.constexpr(12)
STEPS_KEPT = tl.constexpr(24)
"""Steps of the search for the depth of a number of ids: equally fine, from either depth on."""
MIN_FLOAT = tl.constexpr(-3.4028234663852886e38)
NO_KEY = tl.constexpr(9223372036854775807)
FLAT_SUM = tl.constexpr(256.0)
"""Total of the candidate chunks' relative sums from which on a nucleus counts as flat."""
BLOCKS_PER_CHECK = tl.constexpr(2)
"""Blocks whose weights are summed between two checks; one where values are processed."""
MIN_FLAT_TOP_P = tl.constexpr(0.25)
"""Smallest top-p for `sample_flat`; for a smaller nucleus a search is as fast."""


@triton.jit
def _depth_of_count(depths, top_k, far, STEPS: tl.constexpr):
    """A depth of at most ``far`` that has at least ``top_k`` ids within it, or ``far``.

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
def _depth_of_mass(depths, chunk_sums, required, SIZE: tl.constexpr):
    """A depth that has a mass of at least ``required`` within it, or MAX_DEPTH.

    Ids deeper than d weigh less than 2^-d each, so a chunk with its maximum within d has at least
    its mass minus (SIZE - 1) 2^-d there. The search ends when few chunks are within the depth.
    """
    near = 0.0
    far = MAX_DEPTH + 0.0
    count = depths.shape[0]
    weights = tl.exp2(-depths)
    while (far - near > 0.6) & (count > FEW_CHUNKS):
        middle = (near + far) * 0.5
        within = depths <= middle
        lower_bound = tl.maximum(weights, chunk_sums - (SIZE - 1) * tl.exp2(-middle))
        enough = tl.sum(tl.where(within, lower_bound, 0.0), axis=0) >= required
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
    """`sample_truncated` for few candidates: compare them pair by pair."""
    options = sample.options
    num_listed = candidates.num_listed
    offsets = tl.arange(0, SIZE)
    inside = offsets < num_listed
    x, columns = unpack_pairs(tl.load(candidates.pair_ptr + offsets, mask=inside, other=0))
    depths = compute_depths(x, inside, sample.row_max, options.temperature)
    # ordered by depth, then by column
    keys = pack_pairs(depths, columns)
    key_ptr = candidates.pair_ptr + MANY
    tl.store(key_ptr + offsets, keys, mask=inside)
    tl.debug_barrier()
    rank = tl.zeros([SIZE], tl.int32)
    mass_before = tl.zeros([SIZE], tl.float32)
    for start in range(0, num_listed, COMPARED):
        others = start + tl.arange(0, COMPARED)
        other_keys = tl.load(key_ptr + others, mask=others < num_listed, other=NO_KEY)
        is_first = other_keys[:, None] < keys[None, :]
        rank += tl.sum(is_first.to(tl.int32), axis=0)
        weights = tl.exp(-unpack_pairs(other_keys)[0])
        mass_before += tl.sum(tl.where(is_first, weights[:, None], 0.0), axis=0)
    weights = tl.exp(-depths)
    is_kept = inside
    is_of_min_p = options.top_p_mass == OF_MIN_P
    if options.top_k > 0:
        is_kept = is_kept & (rank < options.top_k)
    if ((options.top_k > 0) & (options.top_p_mass != OF_ALL)) | is_of_min_p:
        is_counted = is_kept & ((weights >= options.min_p) | ~is_of_min_p)
        mass = tl.sum(tl.where(is_counted, weights, 0.0), axis=0)
    required = tl.where(options.top_p < 1, options.top_p * mass, float("inf"))
    # the first is always kept
    is_kept = is_kept & ((mass_before < required) | (rank == 0)) & (weights >= options.min_p)
    ids = load_ids(sample.logit_row, columns, inside, HAS_IDS)
    noisy = gumbel(philox_of_ids(ids, sample.stream)) - depths
    noisy = tl.where(is_kept, noisy, float("-inf"))
    best = max_no_nan(noisy)
    sampled = tl.min(tl.where(is_kept & (noisy == best), columns, NO_COLUMN), axis=0)
    limit = max_no_nan(tl.where(is_kept, depths, -1.0))
    last = tl.max(tl.where(is_kept & (depths == limit), columns, -1), axis=0)
    return sampled, limit, last, tl.sum(tl.where(is_kept, weights, 0.0), axis=0)


@triton.jit
def _load_processed_block(
    logit_row, block, BLOCK: tl.constexpr, HAS_IDS: tl.constexpr, HAS_PROCESSING: tl.constexpr
):
    """Load processed values of a block; -inf for NaN and past the end of the row."""
    x = nan_to_neg_inf(load_block(logit_row.ptr, block, logit_row.vocab, BLOCK))
    if HAS_PROCESSING:
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < logit_row.vocab
        x = process_values(
            x, load_ids(logit_row, columns, inside, HAS_IDS), inside, logit_row.processing
        )
    return x


@triton.jit(noinline=True)
def _bound_scores(
    sample,
    bound_ptr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """Bound the noisy scores of all chunks, in log2 and relative to that of the row's maximum."""
    BLOCK: tl.constexpr = LAYOUT.block
    scale = log2_scale(sample.options.temperature)
    x = _load_processed_block(sample.logit_row, 0, BLOCK, HAS_IDS, HAS_PROCESSING)
    for block in range(tl.cdiv(sample.logit_row.vocab, BLOCK)):
        # load the next block while this one is processed
        next_x = _load_processed_block(sample.logit_row, block + 1, BLOCK, HAS_IDS, HAS_PROCESSING)
        noise = gumbel_bound(
            philox_of_block(sample.logit_row, block, sample.stream, BLOCK, HAS_IDS)
        )
        bound = noise - (sample.row_max - x) * scale
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
def _sum_weights(
    first, cutoff, sample, LAYOUT: tl.constexpr, HAS_IDS: tl.constexpr, HAS_PROCESSING: tl.constexpr
):
    """Sum the weights of the ids of some blocks that are before a cutoff, and of the others."""
    BLOCK: tl.constexpr = LAYOUT.block
    THREADS: tl.constexpr = LAYOUT.threads
    NUM_BLOCKS: tl.constexpr = 1 if HAS_PROCESSING else BLOCKS_PER_CHECK
    scale = log2_scale(sample.options.temperature)
    mass_before = tl.zeros([THREADS], tl.float32)
    other_mass = tl.zeros([THREADS], tl.float32)
    for index in tl.static_range(NUM_BLOCKS):
        block = first + index
        x = _load_processed_block(sample.logit_row, block, BLOCK, HAS_IDS, HAS_PROCESSING)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        differences = sample.row_max - x
        weights = tl.exp2(differences * -scale)
        before_cutoff = is_before(differences, columns, cutoff)
        mass_before += _by_thread(tl.where(before_cutoff, weights, 0.0), LAYOUT)
        other_mass += _by_thread(tl.where(before_cutoff, 0.0, weights), LAYOUT)
    return tl.sum(mass_before, axis=0), tl.sum(other_mass, axis=0)


@triton.jit(noinline=True)
def _is_kept(
    column,
    required,
    mass,
    sample,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """Whether less than ``required`` of the row's ``mass`` is before a column, and its cutoff.

    The pass ends as soon as the weights that are not before it exceed the rest of the mass.
    """
    BLOCK: tl.constexpr = LAYOUT.block
    temperature = sample.options.temperature
    columns = column + tl.zeros([32], tl.int32)
    x = load_values(
        sample.logit_row, columns, columns < sample.logit_row.vocab, HAS_IDS, HAS_PROCESSING
    )
    keys = compute_depths(x, columns < sample.logit_row.vocab, sample.row_max, temperature).to(
        tl.int32, bitcast=True
    )
    key = tl.max(keys, axis=0)
    cutoff = Cutoff(max_difference(key - 1, temperature), max_difference(key, temperature), column)
    rest = mass - required
    mass_before = 0.0
    other_mass = 0.0
    first = tl.full([], 0, tl.int32)
    num_blocks = tl.cdiv(sample.logit_row.vocab, BLOCK)
    while (first < num_blocks) & (mass_before < required) & (other_mass <= rest):
        before, other = _sum_weights(first, cutoff, sample, LAYOUT, HAS_IDS, HAS_PROCESSING)
        mass_before += before
        other_mass += other
        first += 1 if HAS_PROCESSING else BLOCKS_PER_CHECK
    return mass_before < required, cutoff


@triton.jit
def sample_flat(
    sample,
    mass,
    bound_ptr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    PADDED_BOUNDS: tl.constexpr,
):
    """The column that a row samples with top-p alone, without its threshold."""
    _bound_scores(sample, bound_ptr, LAYOUT, HAS_IDS, HAS_PROCESSING)
    tl.debug_barrier()
    required = tl.maximum(sample.options.top_p * mass, MIN_REQUIRED)
    offsets = tl.arange(0, PADDED_BOUNDS)
    num_bounds = tl.cdiv(sample.logit_row.vocab, LAYOUT.block) * LAYOUT.chunks
    bounds = tl.load(bound_ptr + offsets, mask=offsets < num_bounds, other=float("-inf"))
    cutoff = no_cutoff()
    before = cutoff.before
    within = cutoff.within
    column = cutoff.column
    is_searching = tl.full([], 1, tl.int1)
    while is_searching:
        column = best_noisy_column(
            sample,
            sample.options.temperature,
            bounds,
            offsets,
            Cutoff(before, within, column),
            LAYOUT,
            HAS_IDS,
            HAS_PROCESSING,
            True,
        )
        is_kept, cutoff = _is_kept(column, required, mass, sample, LAYOUT, HAS_IDS, HAS_PROCESSING)
        before = cutoff.before
        within = cutoff.within
        is_searching = ~is_kept & (column != NO_COLUMN)
    return column


@triton.jit
def sample_truncated(
    sample,
    chunk_maxima,
    relative_sums,
    chunks,
    num_chunks,
    selected_ptr,
    pair_ptr,
    bound_ptr,
    LAYOUT: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    BOUNDS: tl.constexpr,
    PADDED_BOUNDS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    HAS_TRUNCATION: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Sample from a row after top-k, top-p and min-p.

    Args:
        chunk_maxima: the maxima of the row's chunks.
        relative_sums: their sums of weights, for top-p of the mass of all tokens.
        selected_ptr, pair_ptr, bound_ptr: those of the row.

    Returns:
        The sampled column; and of the kept tokens the largest depth, the last column at that depth
        and the mass.
    """
    # the chunks that a bound leaves fit one tile
    TILE: tl.constexpr = WARPS * (512 if HAS_PROCESSING else 1024) // LAYOUT.chunk_size
    logit_row = sample.logit_row
    options = sample.options
    temperature = options.temperature
    # no difference to the maximum is -0.0, whose bits are out of order
    row_max = tl.where(sample.row_max == 0, 0.0, sample.row_max)
    sample = RowSample(logit_row, options, sample.stream, row_max)
    depths = (row_max - chunk_maxima) * log2_scale(temperature)

    # phase 1: bound the depth of kept tokens, select chunks
    far = (MAX_KEPT_DEPTH if HAS_TRUNCATION else MAX_DEPTH) + 0.0
    mass = 0.0
    if options.top_k > 0:
        far = _depth_of_count(depths, options.top_k, far, STEPS_KEPT if HAS_TRUNCATION else STEPS)
    # of the tokens that min-p keeps, the mass is known when they are listed
    is_of_min_p = (options.top_p_mass == OF_MIN_P) & (options.min_p > 0)
    is_of_all = (options.top_k == 0) | (options.top_p_mass == OF_ALL)
    if (options.top_p < 1) & is_of_all & ~is_of_min_p:
        chunk_sums = tl.where(chunk_maxima > float("-inf"), relative_sums * tl.exp2(-depths), 0.0)
        mass = tl.sum(chunk_sums, axis=0)
        far = tl.minimum(
            far, _depth_of_mass(depths, chunk_sums, options.top_p * mass, LAYOUT.chunk_size)
        )
    # the mass of the top k may include ids that min-p removes
    if is_of_all | is_of_min_p | (options.top_p >= 1):
        far = tl.minimum(far, -tl.log2(options.min_p))
    far += DEPTH_SLACK
    if HAS_TRUNCATION:
        far += far * ROUNDING

    is_candidate = (depths <= far) & (chunks < num_chunks)
    selected = select_chunks(is_candidate, selected_ptr)
    is_nucleus = (options.top_k == 0) & (options.top_p < 1)
    may_be_flat = is_nucleus & (options.top_p >= MIN_FLAT_TOP_P) & ~is_of_min_p
    # threads read what others wrote
    tl.debug_barrier()

    # phase 2: list the candidates
    # finite, so that -inf is deeper
    min_value = tl.maximum(row_max - far * LN_2 * temperature, MIN_FLOAT)
    num_listed = tl.full([], 0, tl.int32)
    first = tl.full([], 0, tl.int32)
    # with a large top-k nearly all ids of the chunks would be listed
    has_many_chunks = selected.num_chunks > MANY_CHUNKS
    num_listed = tl.where(has_many_chunks & (options.top_k > MANY), LIST_CAPACITY + 1, num_listed)
    if not HAS_TRUNCATION:
        # the truncation is no output, so a flat nucleus needs no list
        candidate_sum = tl.sum(tl.where(is_candidate & may_be_flat, relative_sums, 0.0), axis=0)
        num_listed = tl.where(
            has_many_chunks & may_be_flat & (candidate_sum > FLAT_SUM),
            LIST_CAPACITY + 1,
            num_listed,
        )
    while (first < selected.num_chunks) & (num_listed <= LIST_CAPACITY):
        x = load_tile(logit_row, selected, first, TILE, LAYOUT, HAS_IDS, HAS_PROCESSING)[0]
        num_listed = list_values(
            x, x >= min_value, selected, first, num_listed, pair_ptr, LAYOUT, WARPS
        )
        first += TILE
    tl.debug_barrier()

    # phases 3 to 5: truncate and sample, by the number of candidates
    candidates = Candidates(selected, pair_ptr, num_listed)
    sampled = tl.full([], NO_COLUMN, tl.int32)
    limit = tl.full([], 0.0, tl.float32)
    last = tl.full([], 0, tl.int32)
    kept_mass = tl.full([], 0.0, tl.float32)
    if num_listed <= FEW:
        sampled, limit, last, kept_mass = _sample_few(sample, candidates, mass, HAS_IDS, FEW, FEW)
    elif num_listed <= MANY:
        sampled, limit, last, kept_mass = _sample_few(
            sample, candidates, mass, HAS_IDS, MANY, WARPS * 512 // MANY
        )
    else:
        is_flat = may_be_flat & (num_listed > LIST_CAPACITY)
        if not HAS_TRUNCATION and is_flat:
            sampled = sample_flat(
                sample,
                mass,
                bound_ptr,
                BOUNDS,
                HAS_IDS,
                HAS_PROCESSING,
                PADDED_BOUNDS,
            )
        else:
            sampled, limit, last, kept_mass = sample_by_search(
                sample,
                candidates,
                far,
                mass,
                LAYOUT,
                PADDED_CHUNKS,
                HAS_IDS,
                HAS_PROCESSING,
                WARPS,
            )
    return sampled, limit, last, kept_mass
