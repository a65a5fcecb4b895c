"""Draws of flat nuclei without their cut.

Top-p keeps the likeliest ids, so whether one of them stays is told by the mass ahead of it. The
highest noisy score of all ids stays with a probability of top-p, and then it is the draw, wherever
the cut may lie: to know that takes no more of the row than weighs what top-p leaves out. Else the
cut lies ahead of it, and the highest score of the ids ahead of it is the next to try.

One pass bounds the scores of the row's chunks. Where rows are few several programs share it, and
the last of them goes on.
"""

import triton
import triton.language as tl

from mtp_plugin.speculative.logit_rows.processing_triton import edited
from mtp_plugin.speculative.logit_rows.rows_triton import NO_COLUMN, number_of, piece_of
from mtp_plugin.speculative.ops.sampling.best_kernel import Place, best_noisy, everywhere, is_ahead
from mtp_plugin.speculative.ops.sampling.cuts.candidates_kernel import depths_of
from mtp_plugin.speculative.ops.sampling.cuts.passes_kernel import LEAST_NEED, reach_of
from mtp_plugin.speculative.ops.sampling.cuts.shares_kernel import is_last_of
from mtp_plugin.speculative.ops.sampling.noise_kernel import (
    gumbel_bound,
    ids_of,
    scale_of,
    values_of,
    words_of_piece,
)

WEIGHED = tl.constexpr(2)
"""Pieces that are weighed before it is asked whether that is enough; one where they are edited."""


@triton.jit
def _piece_of(row, piece, PIECE: tl.constexpr, HAS_IDS: tl.constexpr, HAS_EDITS: tl.constexpr):
    """Edited values of a piece; -inf for NaN and behind the row."""
    x = number_of(piece_of(row.ptr, piece, row.vocab, PIECE))
    if HAS_EDITS:
        columns = piece * PIECE + tl.arange(0, PIECE)
        inside = columns < row.vocab
        x = edited(x, ids_of(row, columns, inside, HAS_IDS), inside, row.edits)
    return x


@triton.jit(noinline=True)
def _bounded(
    draw,
    first,
    step,
    bound_ptr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """Bound the noisy scores of every chunk of every so many-th piece, in log2 and below the row's
    highest value's."""
    PIECE: tl.constexpr = LAYOUT.piece
    scale = scale_of(draw.options.temperature)
    x = _piece_of(draw.row, first, PIECE, HAS_IDS, HAS_EDITS)
    for piece in range(first, tl.cdiv(draw.row.vocab, PIECE), step):
        # of the next piece, while this one is looked at
        next_x = _piece_of(draw.row, piece + step, PIECE, HAS_IDS, HAS_EDITS)
        noise = gumbel_bound(words_of_piece(draw.row, piece, draw.stream, PIECE, HAS_IDS))
        bound = noise - (draw.top - x) * scale
        bound = tl.reshape(bound, [LAYOUT.wraps, LAYOUT.threads, LAYOUT.each])
        bound = tl.max(tl.max(bound, axis=0), axis=1)
        bound = tl.max(tl.reshape(bound, [LAYOUT.chunks, LAYOUT.chunk_threads]), axis=1)
        tl.store(bound_ptr + piece * LAYOUT.chunks + tl.arange(0, LAYOUT.chunks), bound)
        x = next_x


@triton.jit
def _by_thread(x, LAYOUT: tl.constexpr):
    """The sums of what threads hold of a piece."""
    return tl.sum(
        tl.sum(tl.reshape(x, [LAYOUT.wraps, LAYOUT.threads, LAYOUT.each]), axis=0), axis=1
    )


@triton.jit
def _weighed(
    first, place, draw, LAYOUT: tl.constexpr, HAS_IDS: tl.constexpr, HAS_EDITS: tl.constexpr
):
    """The weights of the ids of some pieces that are ahead of a place, and of all others there."""
    PIECE: tl.constexpr = LAYOUT.piece
    THREADS: tl.constexpr = LAYOUT.threads
    NUMBER: tl.constexpr = 1 if HAS_EDITS else WEIGHED
    scale = scale_of(draw.options.temperature)
    ahead = tl.zeros([THREADS], tl.float32)
    behind = tl.zeros([THREADS], tl.float32)
    for number in tl.static_range(NUMBER):
        piece = first + number
        x = _piece_of(draw.row, piece, PIECE, HAS_IDS, HAS_EDITS)
        columns = piece * PIECE + tl.arange(0, PIECE)
        differences = draw.top - x
        weights = tl.exp2(differences * -scale)
        here = is_ahead(differences, columns, place)
        ahead += _by_thread(tl.where(here, weights, 0.0), LAYOUT)
        behind += _by_thread(tl.where(here, 0.0, weights), LAYOUT)
    return tl.sum(ahead, axis=0), tl.sum(behind, axis=0)


@triton.jit(noinline=True)
def _stays(
    column,
    need,
    mass,
    draw,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
):
    """Whether less than ``need`` of the row's ``mass`` is ahead of a column, and its place.

    That is sure as soon as more than the rest is not.
    """
    PIECE: tl.constexpr = LAYOUT.piece
    temperature = draw.options.temperature
    same = column + tl.zeros([32], tl.int32)
    x = values_of(draw.row, same, same < draw.row.vocab, HAS_IDS, HAS_EDITS)
    keys = depths_of(x, same < draw.row.vocab, draw.top, temperature).to(tl.int32, bitcast=True)
    key = tl.max(keys, axis=0)
    place = Place(reach_of(key - 1, temperature), reach_of(key, temperature), column)
    rest = mass - need
    ahead = 0.0
    behind = 0.0
    first = tl.full([], 0, tl.int32)
    num_pieces = tl.cdiv(draw.row.vocab, PIECE)
    while (first < num_pieces) & (ahead < need) & (behind <= rest):
        nearer, others = _weighed(first, place, draw, LAYOUT, HAS_IDS, HAS_EDITS)
        ahead += nearer
        behind += others
        first += 1 if HAS_EDITS else WEIGHED
    return ahead < need, place


@triton.jit
def drawn_of_flat(
    draw,
    split,
    is_shared,
    mass,
    bound_ptr,
    LAYOUT: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    ALL_BOUNDS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """The column that a row draws under top-p alone, of whose ``mass`` it keeps a share. And
    whether this program knows it: of those that share the row, if they do, one does."""
    is_last = tl.full([], 1, tl.int1)
    if SHARES > 1 and is_shared:
        _bounded(draw, split.share, SHARES, bound_ptr, LAYOUT, HAS_IDS, HAS_EDITS)
        is_last = is_last_of(split, SHARES)
    else:
        _bounded(draw, 0, 1, bound_ptr, LAYOUT, HAS_IDS, HAS_EDITS)
        tl.debug_barrier()
    need = tl.maximum(draw.options.top_p * mass, LEAST_NEED)
    numbers = tl.arange(0, ALL_BOUNDS)
    num_bounds = tl.cdiv(draw.row.vocab, LAYOUT.piece) * LAYOUT.chunks
    inside = (numbers < num_bounds) & is_last
    bounds = tl.load(bound_ptr + numbers, mask=inside, other=float("-inf"))
    place = everywhere()
    before = place.before
    within = place.within
    column = place.column
    is_sought = is_last
    while is_sought:
        column = best_noisy(
            draw,
            draw.options.temperature,
            bounds,
            numbers,
            Place(before, within, column),
            LAYOUT,
            HAS_IDS,
            HAS_EDITS,
            True,
        )
        is_kept, place = _stays(column, need, mass, draw, LAYOUT, HAS_IDS, HAS_EDITS)
        before = place.before
        within = place.within
        is_sought = ~is_kept & (column != NO_COLUMN)
    return column, is_last
