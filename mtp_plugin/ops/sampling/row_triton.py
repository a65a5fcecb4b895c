"""Parts of the sampling kernels that work on one row of logits; no launch of its own.

1. Options (`load_options`, `load_step`, `load_draft_sampling`) come from the request's row of the
   slot table.
2. Noise (`load_stream`, `philox_of_*`, `gumbel`): Philox-4x32-10 keyed by the seed, with the
   counter (id // 4, index of the sampled token, role, step). Each call gives the noise of four
   neighbouring ids. `gumbel_bound` is a cheap upper bound of the noise.
3. Values (`load_values`) are processed where they are loaded; NaN is -inf.
4. `best_noisy_column` is the argmax of scores plus noise: given a bound of each chunk, it reads the
   chunks in the order of their bounds until no bound reaches the best exact score.
5. A truncated row (`load_truncated_row`, `truncated_scores`, `truncated_probs`) is recomputed from
   the four numbers that `sample_tokens` wrote, for later kernels.

Tokens of a row are ordered by *difference* (maximum - x), then by column. The *depth* of a token is
its difference / T, rounded once, and its weight is exp(-depth).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.ops.logit_rows.processing_triton import (
    Pools,
    RowProcessing,
    load_processing,
    process_values,
)
from mtp_plugin.ops.logit_rows.rows_triton import (
    CACHED,
    GREEDY_BELOW,
    LOG2_E,
    NO_COLUMN,
    chunk_starts,
    columns_in_chunk,
    float_to_ordered_int,
    max_no_nan,
    ordered_int_to_float,
)
from mtp_plugin.ops.sampling import types
from mtp_plugin.ops.sampling.types import DraftedBy, Role, VerifiedBy
from mtp_plugin.requests.columns import TopPMass, request_column

TEMPERATURE = tl.constexpr(request_column("temperature"))
TOP_K = tl.constexpr(request_column("top_k"))
TOP_P = tl.constexpr(request_column("top_p"))
MIN_P = tl.constexpr(request_column("min_p"))
TOP_P_MASS = tl.constexpr(request_column("top_p_mass"))
OF_ALL = tl.constexpr(int(TopPMass.ALL))
OF_MIN_P = tl.constexpr(int(TopPMass.MIN_P))
SEED = tl.constexpr(request_column("seed"))
LOGPROBS = tl.constexpr(request_column("logprobs"))
TRUNCATION_SIZE = tl.constexpr(types.TRUNCATION_SIZE)
NO_KEY = tl.constexpr(-(2**31))
MAX_FLOAT = tl.constexpr(3.4028234663852886e38)
BOUND_SLACK = tl.constexpr(1e-3)
"""More than the rounding error of a bound of a noisy score."""

VERIFIED_BY_REJECTION = tl.constexpr(int(VerifiedBy.REJECTION))
VERIFIED_BY_BLOCK = tl.constexpr(int(VerifiedBy.BLOCK))
DRAFTED_PLAIN = tl.constexpr(int(DraftedBy.PLAIN))
DRAFTED_GREEDY = tl.constexpr(int(DraftedBy.GREEDY))
PLAIN_ROLE = tl.constexpr(int(Role.PLAIN_DRAFT))


class Options(NamedTuple):
    """Sampling options of a request."""

    temperature: tl.tensor
    top_k: tl.tensor  # 0: none
    top_p: tl.tensor  # 1: none
    min_p: tl.tensor
    top_p_mass: tl.tensor  # `TopPMass`
    num_logprobs: tl.tensor  # top-k logprobs; below 0: no log-probabilities


class Stream(NamedTuple):
    """Key and counter of a row's noise."""

    key0: tl.tensor  # two words
    key1: tl.tensor
    index: tl.tensor  # absolute index of the sampled token
    role: tl.tensor
    step: tl.tensor  # of the request, where its noise depends on the step


class LogitRow(NamedTuple):
    """One row of logits."""

    ptr: tl.tensor  # [vocab] floating
    vocab: tl.tensor
    ids_ptr: tl.tensor  # [vocab] int32: token id of each column
    processing: RowProcessing


class RowSample(NamedTuple):
    """One row, its options and its noise."""

    logit_row: LogitRow
    options: Options
    stream: Stream
    row_max: tl.tensor  # the row's maximum


@triton.jit
def load_options(slot_row_ptr, vocab, CACHE: tl.constexpr = CACHED):
    """Load the sampling options of a request."""
    temperature = tl.load(slot_row_ptr + TEMPERATURE, cache_modifier=CACHE).to(
        tl.float32, bitcast=True
    )
    top_k = tl.load(slot_row_ptr + TOP_K, cache_modifier=CACHE)
    top_p = tl.load(slot_row_ptr + TOP_P, cache_modifier=CACHE).to(tl.float32, bitcast=True)
    min_p = tl.load(slot_row_ptr + MIN_P, cache_modifier=CACHE).to(tl.float32, bitcast=True)
    top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
    num_logprobs = tl.load(slot_row_ptr + LOGPROBS, cache_modifier=CACHE)
    top_p_mass = tl.load(slot_row_ptr + TOP_P_MASS, cache_modifier=CACHE)
    return Options(temperature, top_k, top_p, min_p, top_p_mass, num_logprobs)


@triton.jit
def load_step(slot_row_ptr, verification_column, step_column, CACHE: tl.constexpr = CACHED):
    """The step that keys noise other than the target's; ``step_column`` below 0: there is none."""
    by_block = (
        tl.load(slot_row_ptr + verification_column, cache_modifier=CACHE) == VERIFIED_BY_BLOCK
    )
    has_steps = by_block & (step_column >= 0)
    return tl.load(
        slot_row_ptr + tl.maximum(step_column, 0), mask=has_steps, other=0, cache_modifier=CACHE
    )


@triton.jit
def load_draft_sampling(
    slot_row_ptr,
    temperature,
    role,
    verification_column,
    draft_sampling_column,
    step_column,
    CACHE: tl.constexpr = CACHED,
):
    """Temperature, role and step of a draft, by the slot's column ``draft_sampling``."""
    drafted_by = tl.load(slot_row_ptr + draft_sampling_column, cache_modifier=CACHE)
    is_plain = drafted_by == DRAFTED_PLAIN
    temperature = tl.where(drafted_by == DRAFTED_GREEDY, 0.0, temperature)
    step = tl.where(is_plain, load_step(slot_row_ptr, verification_column, step_column, CACHE), 0)
    return temperature, tl.where(is_plain, PLAIN_ROLE, role), step


@triton.jit
def log2_scale(temperature):
    """The factor from differences of logits to exponents of 2; above 0 for every temperature.

    The inverse of a quarter of the largest temperature is no subnormal number; scaling by powers of
    two does not change the result for other temperatures.
    """
    return 1.0 / (temperature * 0.25) * (LOG2_E * 0.25)


@triton.jit
def load_stream(
    slot_row_ptr,
    request,
    offset,
    role,
    step,
    position_ptr,
    position_stride,
    ahead_ptr,
    ahead_stride,
    HAS_AHEAD: tl.constexpr,
    CACHE: tl.constexpr = CACHED,
):
    """The noise of the row that follows its request's position by ``offset`` rows."""
    key0 = tl.load(slot_row_ptr + SEED, cache_modifier=CACHE).to(tl.uint32, bitcast=True)
    key1 = tl.load(slot_row_ptr + SEED + 1, cache_modifier=CACHE).to(tl.uint32, bitcast=True)
    index = tl.load(position_ptr + request * position_stride, cache_modifier=CACHE)
    index = index.to(tl.int64) + 1 + offset
    if HAS_AHEAD:
        ahead = tl.load(ahead_ptr + request * ahead_stride, cache_modifier=CACHE)
        index += ahead.to(tl.int64)
    return Stream(key0, key1, index.to(tl.uint32), role, step)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox-4x32-10 of a counter of four words and a key of two, all uint32.

    A 64-bit product gives the high and the low word at once.
    """
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def philox_of_groups(groups, stream):
    """The random words of ids 4g to 4g + 3, four for each group g."""
    role = stream.role.to(tl.uint32)
    step = stream.step.to(tl.uint32)
    return philox(groups.to(tl.uint32), stream.index, role, step, stream.key0, stream.key1)


@triton.jit
def philox_of_ids(ids, stream):
    """The random word of each id."""
    w0, w1, w2, w3 = philox_of_groups(ids >> 2, stream)
    word = ids & 3
    return tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))


@triton.jit
def philox_of_block(logit_row, block, stream, BLOCK: tl.constexpr, HAS_IDS: tl.constexpr):
    """The random words of the ids of a block of a row [BLOCK]."""
    if HAS_IDS:
        columns = block * BLOCK + tl.arange(0, BLOCK)
        return philox_of_ids(
            load_ids(logit_row, columns, columns < logit_row.vocab, HAS_IDS), stream
        )
    else:
        groups = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        w0, w1, w2, w3 = philox_of_groups(groups, stream)
        return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])


@triton.jit
def uniform(words):
    """Uniform numbers in (0, 1) from random words."""
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.minimum(u, 0.99999994039535522)


@triton.jit
def gumbel(words):
    """-log(-log1p(-v)) of the uniform v of random words; by its series for small v."""
    v = uniform(words)
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.03125, series, -tl.log(1.0 - v)))


@triton.jit
def gumbel_bound(words):
    """An upper bound of the noise of random words, in log2.

    It is tight where noise is high, except for the dozen smallest words. The noise is at most
    -log2(v), as -log1p(-v) >= v. The bits of a float divided by 2^23 are at most its logarithm plus
    127, and the word is less than 2^32 v.
    """
    bits = words.to(tl.float32).to(tl.int32, bitcast=True)
    # set as mantissa of 2^23: no conversion
    mantissa = (0x4B000000 | (bits >> 8)).to(tl.float32, bitcast=True)
    return 415.0 - mantissa * 3.0517578125e-05


@triton.jit
def load_ids(logit_row, columns, inside, HAS_IDS: tl.constexpr):
    """The token ids of columns."""
    if HAS_IDS:
        return tl.load(logit_row.ids_ptr + columns, mask=inside, other=0)
    else:
        return columns


@triton.jit
def load_values(logit_row, columns, inside, HAS_IDS: tl.constexpr, HAS_PROCESSING: tl.constexpr):
    """Load processed values of columns as float32; -inf for NaN and outside."""
    x = tl.load(logit_row.ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    if HAS_PROCESSING:
        x = process_values(
            x, load_ids(logit_row, columns, inside, HAS_IDS), inside, logit_row.processing
        )
    return x


class Cutoff(NamedTuple):
    """A point in the order of a row's ids, which is by depth, then by column."""

    before: tl.tensor  # ids up to this difference to the maximum are before it
    within: tl.tensor  # so are those up to this one with a lower column
    column: tl.tensor


@triton.jit
def no_cutoff():
    """The cutoff that all ids are before, except those with a value of -inf."""
    highest = tl.full([], MAX_FLOAT, tl.float32)
    return Cutoff(highest, highest, tl.full([], NO_COLUMN, tl.int32))


@triton.jit
def is_before(differences, columns, cutoff):
    """Whether ids are before a cutoff."""
    at_cutoff = (differences <= cutoff.within) & (columns < cutoff.column)
    return (differences <= cutoff.before) | at_cutoff


@triton.jit
def best_noisy_column(
    sample,
    temperature,
    bounds,
    chunks,
    cutoff,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    HAS_CUTOFF: tl.constexpr,
):
    """The column of the highest noisy score.

    Exact scores are computed only for chunks whose bound reaches it, one or two of a thousand. With
    a cutoff, only ids before it that min-p keeps count.
    """
    INDEX_MASK: tl.constexpr = chunks.shape[0] - 1
    # the chunk's index in the lowest bits, which decreases no bound
    keys = (float_to_ordered_int(bounds) & ~INDEX_MASK) | chunks
    first = tl.max(keys, axis=0)
    highest = ordered_int_to_float(first | INDEX_MASK)
    best = tl.full([], float("-inf"), tl.float32)
    column = tl.full([], NO_COLUMN, tl.int32)
    while (highest > float("-inf")) & (highest + BOUND_SLACK >= best * LOG2_E):
        # two at a time take hardly longer than one
        keys = tl.where(keys == first, NO_KEY, keys)
        second = tl.max(keys, axis=0)
        keys = tl.where(keys == second, NO_KEY, keys)
        offsets = tl.arange(0, 2 * LAYOUT.chunk_size)
        chunk = tl.where(offsets < LAYOUT.chunk_size, first, second) & INDEX_MASK
        columns = chunk_starts(chunk, LAYOUT) + columns_in_chunk(
            offsets % LAYOUT.chunk_size, LAYOUT
        )
        inside = columns < sample.logit_row.vocab
        x = load_values(sample.logit_row, columns, inside, HAS_IDS, HAS_PROCESSING)
        # while the values are loaded
        first = tl.max(keys, axis=0)
        highest = ordered_int_to_float(first | INDEX_MASK)
        noise = gumbel(
            philox_of_ids(load_ids(sample.logit_row, columns, inside, HAS_IDS), sample.stream)
        )
        depths = tl.div_rn(sample.row_max - x, temperature)
        noisy = noise - depths
        if HAS_CUTOFF:
            is_kept = is_before(sample.row_max - x, columns, cutoff)
            is_kept = is_kept & (tl.exp(-depths) >= sample.options.min_p)
            noisy = tl.where(is_kept, noisy, float("-inf"))
        tile_best = max_no_nan(noisy)
        is_best = noisy == tile_best
        if HAS_CUTOFF:
            is_best = is_best & (noisy > float("-inf"))
        best_in_tile = tl.min(tl.where(is_best, columns, NO_COLUMN), axis=0)
        best_in_tile = tl.where(tile_best == best, tl.minimum(best_in_tile, column), best_in_tile)
        column = tl.where(tile_best >= best, best_in_tile, column)
        best = tl.maximum(best, tile_best)
    return column


@triton.jit
def first_infinite(
    logit_row,
    chunk_maxima,
    chunks,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
):
    """The lowest column that holds +inf."""
    block = tl.min(
        tl.where(chunk_maxima == float("inf"), chunks // LAYOUT.chunks, NO_COLUMN), axis=0
    )
    columns = block * LAYOUT.block + tl.arange(0, LAYOUT.block)
    x = load_values(logit_row, columns, columns < logit_row.vocab, HAS_IDS, HAS_PROCESSING)
    return tl.min(tl.where(x == float("inf"), columns, NO_COLUMN), axis=0)


class Batch(NamedTuple):
    """Pointers and sizes that all rows of a launch share."""

    logits_ptr: tl.tensor  # [N, vocab] floating
    row_stride: tl.tensor
    vocab: tl.tensor
    vocab_ids_ptr: tl.tensor  # [vocab] int32
    truncation_ptr: tl.tensor  # [N, TRUNCATION_SIZE] float32
    pools: Pools


class TruncatedRow(NamedTuple):
    """A row and its truncation, as `sample_tokens` wrote it."""

    logit_row: LogitRow
    temperature: tl.tensor
    min_p: tl.tensor
    row_max: tl.tensor
    limit: tl.tensor  # largest depth of a kept token
    last: tl.tensor  # last kept column at that depth
    mass: tl.tensor  # sum of the kept tokens' weights
    forced: tl.tensor  # the forced id; -1: none


@triton.jit
def load_truncated_row(batch, row, slot_row_ptr, draft_ptr, num_before, forced):
    """Load a row of a batch.

    Args:
        draft_ptr: the first of its request's draft tokens.
        forced: the id that the row forces; below 0: none.
    """
    processing = load_processing(slot_row_ptr, batch.pools, draft_ptr, num_before)
    options = load_options(slot_row_ptr, batch.vocab)
    truncation_row_ptr = batch.truncation_ptr + row * TRUNCATION_SIZE
    return TruncatedRow(
        LogitRow(
            batch.logits_ptr + row * batch.row_stride, batch.vocab, batch.vocab_ids_ptr, processing
        ),
        options.temperature,
        options.min_p,
        tl.load(truncation_row_ptr),
        tl.load(truncation_row_ptr + 1),
        tl.load(truncation_row_ptr + 2).to(tl.int32),
        tl.where(forced >= 0, 1.0, tl.load(truncation_row_ptr + 3)),
        forced,
    )


@triton.jit
def truncated_scores(
    truncated, columns, inside, HAS_IDS: tl.constexpr, HAS_PROCESSING: tl.constexpr
):
    """The scores of columns after truncation; -inf for tokens that are not kept."""
    x = load_values(truncated.logit_row, columns, inside, HAS_IDS, HAS_PROCESSING)
    depth = tl.div_rn(truncated.row_max - x, tl.maximum(truncated.temperature, GREEDY_BELOW))
    # the difference of two infinities is NaN
    depth = tl.where(
        truncated.row_max == float("inf"), tl.where(x == float("inf"), 0.0, 1.0), depth
    )
    is_kept = (depth < truncated.limit) | ((depth == truncated.limit) & (columns <= truncated.last))
    is_kept = is_kept & (tl.exp(-depth) >= truncated.min_p) & inside
    score = tl.where(is_kept, -depth, float("-inf"))
    forced_score = tl.where((columns == truncated.forced) & inside, 0.0, float("-inf"))
    score = tl.where(truncated.forced >= 0, forced_score, score)
    return tl.where(truncated.mass > 0, score, float("-inf"))


@triton.jit
def truncated_probs(truncated, score):
    """The probability of a score."""
    weight = tl.where(score > float("-inf"), tl.exp(score), 0.0)
    return tl.where(truncated.mass > 0, tl.div_rn(weight, truncated.mass), 0.0)


@triton.jit
def load_forced_id(forced_ptr, row, forced_stride, HAS_FORCED: tl.constexpr):
    """The id that a row forces; -1: none."""
    if HAS_FORCED:
        forced = tl.load(forced_ptr + row * forced_stride)
        return tl.minimum(tl.maximum(forced, -1), NO_COLUMN).to(tl.int32)
    else:
        return tl.full([], -1, tl.int32)
