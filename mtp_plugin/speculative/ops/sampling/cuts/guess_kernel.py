"""Where a cut lies, as a sample of the row tells."""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.speculative.logit_rows.rows_triton import spread_of, starts_of
from mtp_plugin.speculative.ops.sampling.cuts.candidates_kernel import LISTED
from mtp_plugin.speculative.ops.sampling.noise_kernel import values_of

HALVINGS = tl.constexpr(10)
"""Of the depths among which a guess is made."""
DEVIATIONS = tl.constexpr(4.0)
"""Of what a sample tells, on both sides of a guess."""
ROOM = tl.constexpr(0.85)
"""Of the list, what a guess should fill at most."""


class Bounds(NamedTuple):
    """What is known of where a measure is reached: behind a key, and at another or before."""

    low: tl.tensor
    before: tl.tensor  # what ids up to it measure
    high: tl.tensor
    end: tl.tensor  # a key, no less
    total: tl.tensor  # what ids up to that one measure


@triton.jit(noinline=True)
def guessed(
    need,
    by_mass,
    bounds,
    draw,
    SAMPLE: tl.constexpr,
    LAYOUT: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """Two keys from the lower bound to the higher between which a measure of ``need`` is likely
    reached.

    What lies between is told by ``SAMPLE`` ids of all chunks, from both ends of what is known, each
    as far as it can be trusted.
    """
    low = bounds.low
    before = bounds.before
    high = bounds.high
    end = bounds.end
    total = bounds.total
    row = draw.row
    SKIP: tl.constexpr = ALL_CHUNKS // SAMPLE if ALL_CHUNKS > SAMPLE else 1
    SPARSE: tl.constexpr = LAYOUT.chunk_size * ALL_CHUNKS // SAMPLE // SKIP
    EVERY: tl.constexpr = SPARSE if SPARSE > 1 else 1
    PER_CHUNK: tl.constexpr = LAYOUT.chunk_size // EVERY
    FACTOR: tl.constexpr = SKIP * EVERY
    each = tl.arange(0, ALL_CHUNKS // SKIP * PER_CHUNK)
    chunks = each // PER_CHUNK * SKIP
    # in every chunk others, so that no period of a row is met
    places = each % PER_CHUNK * EVERY + (chunks * 5 + each % PER_CHUNK * 11) % EVERY
    columns = starts_of(chunks, LAYOUT)
    columns += spread_of(places, LAYOUT)
    inside = columns < row.vocab
    x = values_of(row, columns, inside, HAS_IDS, HAS_EDITS)
    depths = tl.div_rn(draw.top - x, draw.options.temperature)
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
