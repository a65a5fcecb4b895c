"""What kernels of draws share: a row's values and options, and its noise."""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.requests.columns import request_column
from mtp_plugin.speculative.logit_rows.processing_triton import Edits, edited
from mtp_plugin.speculative.logit_rows.rows_triton import CACHED, LOG2_E
from mtp_plugin.speculative.ops.sampling.contract import DraftedBy, JudgedBy, Role

TEMPERATURE = tl.constexpr(request_column("temperature"))
TOP_K = tl.constexpr(request_column("top_k"))
TOP_P = tl.constexpr(request_column("top_p"))
MIN_P = tl.constexpr(request_column("min_p"))
SEED = tl.constexpr(request_column("seed"))
LOGPROBS = tl.constexpr(request_column("logprobs"))
BOUND_SLACK = tl.constexpr(1e-3)
"""More than a bound of a noisy score is off by its rounding."""

JUDGED_BY_REJECTION = tl.constexpr(int(JudgedBy.REJECTION))
JUDGED_BY_BLOCK = tl.constexpr(int(JudgedBy.BLOCK))
DRAFTED_PLAIN = tl.constexpr(int(DraftedBy.PLAIN))
DRAFTED_GREEDY = tl.constexpr(int(DraftedBy.GREEDY))
PLAIN_ROLE = tl.constexpr(int(Role.PLAIN_DRAFT))


class Options(NamedTuple):
    """Temperature, the cuts that are asked for, and what is told of tokens."""

    temperature: tl.tensor
    top_k: tl.tensor  # 0: none
    top_p: tl.tensor  # 1: none
    min_p: tl.tensor
    num_logprobs: tl.tensor  # most likely ids that are told; below 0: no log-probability is


class Stream(NamedTuple):
    """Which noise a row draws with."""

    key0: tl.tensor  # two words
    key1: tl.tensor
    index: tl.tensor  # the absolute index of the token that is drawn
    role: tl.tensor
    step: tl.tensor  # of the request, where its noise is counted by steps


class Row(NamedTuple):
    """One row of logits."""

    ptr: tl.tensor
    vocab: tl.tensor
    ids_ptr: tl.tensor  # what columns stand for
    edits: Edits


class Draw(NamedTuple):
    """What one token is drawn from, and how."""

    row: Row
    options: Options
    stream: Stream
    top: tl.tensor  # the row's highest value


@triton.jit
def options_of(slot, vocab, CACHE: tl.constexpr = CACHED):
    """The options of a request."""
    temperature = tl.load(slot + TEMPERATURE, cache_modifier=CACHE).to(tl.float32, bitcast=True)
    top_k = tl.load(slot + TOP_K, cache_modifier=CACHE)
    top_p = tl.load(slot + TOP_P, cache_modifier=CACHE).to(tl.float32, bitcast=True)
    min_p = tl.load(slot + MIN_P, cache_modifier=CACHE).to(tl.float32, bitcast=True)
    top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
    num_logprobs = tl.load(slot + LOGPROBS, cache_modifier=CACHE)
    return Options(temperature, top_k, top_p, min_p, num_logprobs)


@triton.jit
def step_of(slot, judged_at, step_at, CACHE: tl.constexpr = CACHED):
    """What noise beside the target's is counted by; ``step_at`` below 0: nobody has steps."""
    by_block = tl.load(slot + judged_at, cache_modifier=CACHE) == JUDGED_BY_BLOCK
    has_steps = by_block & (step_at >= 0)
    return tl.load(slot + tl.maximum(step_at, 0), mask=has_steps, other=0, cache_modifier=CACHE)


@triton.jit
def choice_of(
    slot, temperature, role, judged_at, drafted_at, step_at, CACHE: tl.constexpr = CACHED
):
    """Temperature, role and step of a draft, as its slot has it drawn."""
    drafted_by = tl.load(slot + drafted_at, cache_modifier=CACHE)
    is_plain = drafted_by == DRAFTED_PLAIN
    temperature = tl.where(drafted_by == DRAFTED_GREEDY, 0.0, temperature)
    step = tl.where(is_plain, step_of(slot, judged_at, step_at, CACHE), 0)
    return temperature, tl.where(is_plain, PLAIN_ROLE, role), step


@triton.jit
def scale_of(temperature):
    """What turns differences of logits into exponents of 2; above 0 for every temperature.

    A quarter of the highest has an inverse that is no subnormal number; of others it is the same.
    """
    return 1.0 / (temperature * 0.25) * (LOG2_E * 0.25)


@triton.jit
def stream_of(
    slot,
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
    """The noise of a row that stands ``offset`` rows behind its request's position."""
    key0 = tl.load(slot + SEED, cache_modifier=CACHE).to(tl.uint32, bitcast=True)
    key1 = tl.load(slot + SEED + 1, cache_modifier=CACHE).to(tl.uint32, bitcast=True)
    index = tl.load(position_ptr + request * position_stride, cache_modifier=CACHE)
    index = index.to(tl.int64) + 1 + offset
    if HAS_AHEAD:
        ahead = tl.load(ahead_ptr + request * ahead_stride, cache_modifier=CACHE)
        index += ahead.to(tl.int64)
    return Stream(key0, key1, index.to(tl.uint32), role, step)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox-4x32-10 of a counter of four words and a key of two, all uint32.

    One product of 64 bits gives the high and the low word at once.
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
def words_of_groups(groups, stream):
    """The words of ids 4g to 4g + 3, four for each of the groups g."""
    role = stream.role.to(tl.uint32)
    step = stream.step.to(tl.uint32)
    return philox(groups.to(tl.uint32), stream.index, role, step, stream.key0, stream.key1)


@triton.jit
def words_of(ids, stream):
    """The word of each id."""
    w0, w1, w2, w3 = words_of_groups(ids >> 2, stream)
    place = ids & 3
    return tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))


@triton.jit
def words_of_piece(row, piece, stream, PIECE: tl.constexpr, HAS_IDS: tl.constexpr):
    """The words of the ids of a piece of a row [PIECE]."""
    if HAS_IDS:
        columns = piece * PIECE + tl.arange(0, PIECE)
        return words_of(ids_of(row, columns, columns < row.vocab, HAS_IDS), stream)
    else:
        groups = piece * (PIECE // 4) + tl.arange(0, PIECE // 4)
        w0, w1, w2, w3 = words_of_groups(groups, stream)
        return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [PIECE])


@triton.jit
def unit(words):
    """Uniform numbers in (0, 1) of words."""
    numbers = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.minimum(numbers, 0.99999994039535522)


@triton.jit
def gumbel(words):
    """-log(-log1p(-v)) of the uniform v of words; small v by their series."""
    v = unit(words)
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    return -tl.log(tl.where(v < 0.03125, series, -tl.log(1.0 - v)))


@triton.jit
def gumbel_bound(words):
    """No less than the noise of words, in log2, and hardly more where it is high, but of the dozen
    lowest of all words.

    The noise is at most -log2(v), as -log1p(-v) >= v. The bits of a float, over 2^23, are no more
    than its logarithm, but for the exponents' 127; of v's those of the word, which is less than
    2^32 v, are 32 ahead.
    """
    bits = words.to(tl.float32).to(tl.int32, bitcast=True)
    # as 2^23 and so many more: no conversion
    number = (0x4B000000 | (bits >> 8)).to(tl.float32, bitcast=True)
    return 415.0 - number * 3.0517578125e-05


@triton.jit
def ids_of(row, columns, inside, HAS_IDS: tl.constexpr):
    """What columns stand for."""
    if HAS_IDS:
        return tl.load(row.ids_ptr + columns, mask=inside, other=0)
    else:
        return columns


@triton.jit
def values_of(row, columns, inside, HAS_IDS: tl.constexpr, HAS_EDITS: tl.constexpr):
    """Values of columns, float32, edited; -inf for NaN and outside."""
    x = tl.load(row.ptr + columns, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    if HAS_EDITS:
        x = edited(x, ids_of(row, columns, inside, HAS_IDS), inside, row.edits)
    return x
