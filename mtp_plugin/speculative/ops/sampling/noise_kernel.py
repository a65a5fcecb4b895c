"""Noise of draws on the device, and which draw a row is."""

import triton
import triton.language as tl

from mtp_plugin.requests.columns import request_column

TEMPERATURE = tl.constexpr(request_column("temperature"))
TOP_K = tl.constexpr(request_column("top_k"))
TOP_P = tl.constexpr(request_column("top_p"))
MIN_P = tl.constexpr(request_column("min_p"))
SEED = tl.constexpr(request_column("seed"))
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_SCALE = tl.constexpr(1.2e-38)


@triton.jit
def place_of(row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride):
    """The request of a row, the row's number in it, and where the request's slot stands."""
    behind = tl.maximum(row - num_contexts, 0)
    is_context = row < num_contexts
    request = tl.where(is_context, row, num_contexts + behind // width)
    offset = tl.where(is_context, 0, behind % width)
    slot = tl.load(slot_ptr + request * slot_stride).to(tl.int64)
    return request, offset, table_ptr + slot * table_stride


@triton.jit
def options_of(slot, vocab):
    """Temperature, and the cuts that are asked for: top-k (0: none), top-p (1: none), min-p."""
    temperature = tl.load(slot + TEMPERATURE).to(tl.float32, bitcast=True)
    top_k = tl.load(slot + TOP_K)
    top_p = tl.load(slot + TOP_P).to(tl.float32, bitcast=True)
    min_p = tl.load(slot + MIN_P).to(tl.float32, bitcast=True)
    top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
    return temperature, top_k, top_p, min_p


@triton.jit
def scale_of(temperature):
    """What turns differences of logits into exponents of 2; a number for every temperature > 0."""
    return tl.maximum(1.0 / temperature * LOG2_E, LEAST_SCALE)


@triton.jit
def stream_of(
    slot,
    request,
    offset,
    column,
    position_ptr,
    position_stride,
    ahead_ptr,
    ahead_stride,
    HAS_AHEAD: tl.constexpr,
):
    """The key of a row's noise, two words, and the absolute index of the token that it draws."""
    key0 = tl.load(slot + SEED).to(tl.uint32, bitcast=True)
    key1 = tl.load(slot + SEED + 1).to(tl.uint32, bitcast=True)
    index = tl.load(position_ptr + request * position_stride).to(tl.int64) + column + 1 + offset
    if HAS_AHEAD:
        index += tl.load(ahead_ptr + request * ahead_stride).to(tl.int64)
    return key0, key1, index.to(tl.uint32)


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
def words_of_groups(groups, index, key0, key1, role):
    """The words of ids 4g to 4g + 3, four for each of the groups g."""
    zero = tl.full([], 0, tl.uint32)
    return philox(groups.to(tl.uint32), index, role.to(tl.uint32), zero, key0, key1)


@triton.jit
def words_of(ids, index, key0, key1, role):
    """The word of each id."""
    w0, w1, w2, w3 = words_of_groups(ids >> 2, index, key0, key1, role)
    place = ids & 3
    return tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))


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
    """No less than the noise of words, in log2, and hardly more where it is high.

    The noise is at most -log2(v), as -log1p(-v) >= v. The bits of a float, over 2^23, are no more
    than its logarithm, but for the exponents' 127; of v's those of 2^32 v are 32 ahead.
    """
    bits = (words.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
    return 159.0 - bits.to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def ids_of(columns, inside, vocab_ids_ptr, HAS_IDS: tl.constexpr):
    """What columns stand for."""
    if HAS_IDS:
        return tl.load(vocab_ids_ptr + columns, mask=inside, other=0)
    else:
        return columns
