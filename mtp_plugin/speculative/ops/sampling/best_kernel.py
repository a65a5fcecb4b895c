"""The highest noisy score of a row, found by bounds of its chunks."""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.speculative.logit_rows.rows_triton import (
    LOG2_E,
    NO_COLUMN,
    highest_of,
    order_of,
    spread_of,
    starts_of,
    value_of,
)
from mtp_plugin.speculative.ops.sampling.noise_kernel import (
    BOUND_SLACK,
    gumbel,
    ids_of,
    values_of,
    words_of,
)

NO_KEY = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(3.4028234663852886e38)


class Place(NamedTuple):
    """A place in the order of a row's ids, which is by depth, then by column."""

    before: tl.tensor  # differences to the highest value, up to which ids are ahead
    within: tl.tensor  # and up to which those of lower columns are
    column: tl.tensor


@triton.jit
def everywhere():
    """The place that all ids are ahead of, but those whose values are -inf."""
    highest = tl.full([], HIGHEST, tl.float32)
    return Place(highest, highest, tl.full([], NO_COLUMN, tl.int32))


@triton.jit
def is_ahead(differences, columns, place):
    """Which of some ids are ahead of a place."""
    at = (differences <= place.within) & (columns < place.column)
    return (differences <= place.before) | at


@triton.jit
def best_noisy(
    draw,
    temperature,
    bounds,
    chunks,
    place,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    HAS_PLACE: tl.constexpr,
):
    """The column of the highest noisy score, by exact scores of the chunks whose bound reaches it.

    They are one or two of a thousand. With a place only of ids that are ahead of it, and that min-p
    keeps.
    """
    NUMBERS: tl.constexpr = chunks.shape[0] - 1
    # with the chunk's number in the lowest bits, which make no bound lower
    keys = (order_of(bounds) & ~NUMBERS) | chunks
    first = tl.max(keys, axis=0)
    highest = value_of(first | NUMBERS)
    best = tl.full([], float("-inf"), tl.float32)
    column = tl.full([], NO_COLUMN, tl.int32)
    while (highest > float("-inf")) & (highest + BOUND_SLACK >= best * LOG2_E):
        # two at a time, which takes hardly longer than one
        keys = tl.where(keys == first, NO_KEY, keys)
        second = tl.max(keys, axis=0)
        keys = tl.where(keys == second, NO_KEY, keys)
        places = tl.arange(0, 2 * LAYOUT.chunk_size)
        chunk = tl.where(places < LAYOUT.chunk_size, first, second) & NUMBERS
        columns = starts_of(chunk, LAYOUT) + spread_of(places % LAYOUT.chunk_size, LAYOUT)
        inside = columns < draw.row.vocab
        x = values_of(draw.row, columns, inside, HAS_IDS, HAS_EDITS)
        # while the values are on their way
        first = tl.max(keys, axis=0)
        highest = value_of(first | NUMBERS)
        noise = gumbel(words_of(ids_of(draw.row, columns, inside, HAS_IDS), draw.stream))
        depths = tl.div_rn(draw.top - x, temperature)
        noisy = noise - depths
        if HAS_PLACE:
            kept = is_ahead(draw.top - x, columns, place)
            kept = kept & (tl.exp(-depths) >= draw.options.min_p)
            noisy = tl.where(kept, noisy, float("-inf"))
        tile_best = highest_of(noisy)
        here = noisy == tile_best
        if HAS_PLACE:
            here = here & (noisy > float("-inf"))
        at = tl.min(tl.where(here, columns, NO_COLUMN), axis=0)
        at = tl.where(tile_best == best, tl.minimum(at, column), at)
        column = tl.where(tile_best >= best, at, column)
        best = tl.maximum(best, tile_best)
    return column
