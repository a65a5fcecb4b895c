"""Triton kernels of draws: a scan of the rows by chunks of ids, and a finish per row.

A program of the scan reads pieces of a row. Chunk c of one is what a few neighbouring threads hold,
see `row_sums`: some segments of ids, so that nothing is moved between threads before a chunk is
reduced.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch import (
    grid_dependency_synchronize,
    grid_dependency_synchronize_ahead,
)
from mtp_plugin.speculative.logit_rows.processing_triton import (
    Pools,
    edited,
    edited_piece,
    edits_of,
    edits_of_piece,
    is_edited,
    shared_edits,
    unknown_shared_edits,
)
from mtp_plugin.speculative.logit_rows.rows_triton import (
    GREEDY_BELOW,
    LOG2_E,
    NO_COLUMN,
    highest_of,
    masses_of,
    number_of,
    number_or_zero,
    piece_of,
    place_of,
    row_mass_of,
    thread_tops,
)
from mtp_plugin.speculative.ops.sampling.best_kernel import best_noisy, everywhere
from mtp_plugin.speculative.ops.sampling.cuts.candidates_kernel import PLACES
from mtp_plugin.speculative.ops.sampling.cuts.cut_kernel import drawn_of_cut
from mtp_plugin.speculative.ops.sampling.cuts.shares_kernel import TOLD, Split
from mtp_plugin.speculative.ops.sampling.noise_kernel import (
    Draw,
    Row,
    choice_of,
    gumbel_bound,
    ids_of,
    options_of,
    scale_of,
    stream_of,
    values_of,
    words_of_piece,
)

EXPONENT_ROUNDING = tl.constexpr(2.0**-22)
"""Of an exponent: more than a product of that size, its sum with noise and another such product are
off by together, each by half of 2**-23. `BOUND_SLACK` covers what is added to sums this small."""
MOST_NOISE = tl.constexpr(160.0)
"""Above every bound of noise, in log2."""

CHANGING = ["num_contexts", "width", "column", "role", "num_pieces"]
CHANGING += ["judged_at", "drafted_at", "step_at"]
CHANGING += ["position_stride", "ahead_stride", "draft_stride", "table_stride", "slot_stride"]
SHIFTING = ["position_ptr", "ahead_ptr", "draft_ptr", "table_ptr", "slot_ptr"]
"""Of what is another number, or stands elsewhere, in every batch no binary is made."""


class Left(NamedTuple):
    """Where a scan leaves what it found in a row; pointers stand at the row's own."""

    top_ptr: tl.tensor
    detail_ptr: tl.tensor
    mass_ptr: tl.tensor
    raw_mass_ptr: tl.tensor


@triton.jit
def _above(bounds, exponents):
    """How far bounds of chunks lie above the exponents of their highest values, and no less.

    Sums and products are off by their rounding, which a value that could reach the bound shares
    with the highest one's; where those are no numbers, noise is at most as much. Where exponents
    are beyond 1e7, as no model's are, a row's chunks are bounded by hardly anything else, and most
    of them are read again.
    """
    above = bounds - exponents + tl.abs(exponents) * EXPONENT_ROUNDING
    return tl.where(tl.abs(exponents) < float("inf"), above, MOST_NOISE)


@triton.jit
def _scanned(
    x,
    row,
    options,
    temperature,
    stream,
    left,
    first_piece,
    last_piece,
    LAYOUT: tl.constexpr,
    NOISE_FIRST: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
):
    """Some pieces of a row, of the first of which ``x`` are the values."""
    PIECE: tl.constexpr = LAYOUT.piece
    scale = scale_of(temperature)
    is_cut = (options.top_k > 0) | (options.top_p < 1) | (options.min_p > 0)
    is_noisy = (temperature >= GREEDY_BELOW) & ~is_cut
    shared = unknown_shared_edits()
    for piece in range(first_piece, last_piece):
        if HAS_EDITS and not HAS_IDS:
            of_piece = edits_of_piece(piece * PIECE, row.vocab, row.edits, PIECE)
        if piece > first_piece:
            x = piece_of(row.ptr, piece, row.vocab, PIECE)
        elif HAS_EDITS and not HAS_IDS:
            # behind all that is asked for
            shared = shared_edits(row.edits, first_piece * PIECE, last_piece * PIECE)
        if HAS_EDITS:
            if HAS_IDS:
                columns = piece * PIECE + tl.arange(0, PIECE)
                inside = columns < row.vocab
                x = edited(number_of(x), ids_of(row, columns, inside, HAS_IDS), inside, row.edits)
            else:
                x = edited_piece(x, of_piece, piece * PIECE, row.vocab, row.ptr, row.edits, shared)
        if NOISE_FIRST:
            # while values are on their way
            noise = tl.zeros([PIECE], tl.float32)
            if is_noisy:
                noise = gumbel_bound(words_of_piece(row, piece, stream, PIECE, HAS_IDS))
        held = tl.reshape(x, [LAYOUT.wraps, LAYOUT.threads, LAYOUT.each])
        thread_top = thread_tops(held)
        by_chunk = tl.reshape(thread_top, [LAYOUT.chunks, LAYOUT.chunk_threads])
        top = tl.max(by_chunk, axis=1)
        base = number_or_zero(top)
        below = (by_chunk - base[:, None]) * scale

        out = piece * LAYOUT.chunks + tl.arange(0, LAYOUT.chunks)
        if temperature < GREEDY_BELOW:
            at = tl.reshape(piece * PIECE + tl.arange(0, PIECE), held.shape)
            at = tl.where(held == thread_top[None, :, None], at, NO_COLUMN)
            at = tl.reshape(tl.min(tl.min(at, axis=0), axis=1), by_chunk.shape)
            at = tl.min(tl.where(by_chunk == top[:, None], at, NO_COLUMN), axis=1)
            tl.store(left.detail_ptr + out, at.to(tl.float32, bitcast=True))
        elif is_noisy:
            if not NOISE_FIRST:
                noise = gumbel_bound(words_of_piece(row, piece, stream, PIECE, HAS_IDS))
            bound = tl.reshape(noise, held.shape) + held * scale
            bound = tl.reshape(tl.max(tl.max(bound, axis=0), axis=1), by_chunk.shape)
            bound = number_of(tl.max(bound, axis=1))
            tl.store(left.detail_ptr + out, _above(bound, base * scale))
            if HAS_CUTS:
                tl.store(left.mass_ptr + out, masses_of(held, thread_top, below, scale))
        elif (options.top_k == 0) & (options.top_p < 1):
            tl.store(left.detail_ptr + out, masses_of(held, thread_top, below, scale))
        if HAS_SUMS:  # noqa: SIM102 - known when it is compiled
            if options.num_logprobs >= 0:
                below = (by_chunk - base[:, None]) * LOG2_E
                tl.store(left.raw_mass_ptr + out, masses_of(held, thread_top, below, LOG2_E))
        tl.store(left.top_ptr + out, top)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=SHIFTING)
def scan_kernel(
    # inputs
    logits_ptr,
    vocab_ids_ptr,
    position_ptr,
    ahead_ptr,
    draft_ptr,
    table_ptr,
    slot_ptr,
    bias_ptr,
    allowed_ptr,
    count_ptr,
    seen_ptr,
    # outputs
    top_ptr,
    detail_ptr,
    mass_ptr,
    raw_mass_ptr,
    arrived_ptr,
    # sizes
    num_contexts,
    width,
    column,
    role,
    judged_at,
    drafted_at,
    step_at,
    vocab,
    num_pieces,
    pool_vocab,
    row_stride,
    position_stride,
    ahead_stride,
    draft_stride,
    table_stride,
    slot_stride,
    # constants
    LAYOUT: tl.constexpr,
    PARTS: tl.constexpr,
    NOISE_FIRST: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    HAS_CHOICE: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    ROW_AXIS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """``PARTS`` pieces of a row: per chunk the highest value, and what the options need beside it.

    That is: of a greedy row the lowest column of that value, bit for bit; of one without cuts a
    bound of the highest noisy score, in log2 and above that value's; of one with top-p alone the
    sum of weights, as multiples of that value's. One without cuts has that too where somebody asks
    what is left of rows. Raw rows whose request asks for log-probabilities have one at a
    temperature of 1. Of rows that several programs finish none has arrived.
    """
    grid_dependency_synchronize_ahead(PDL)
    first_piece = tl.program_id(1 - ROW_AXIS) * PARTS
    last_piece = tl.minimum(first_piece + PARTS, num_pieces)
    number = tl.program_id(ROW_AXIS).to(tl.int64)
    if IS_SPLIT:
        tl.store(arrived_ptr + number, 0, mask=first_piece == 0)
    # asked for before the values, behind which it would wait
    request, offset, slot = place_of(
        number, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride
    )
    x = piece_of(logits_ptr + number * row_stride, first_piece, vocab, LAYOUT.piece)
    offset += column
    options = options_of(slot, vocab)
    temperature = options.temperature
    step = tl.full([], 0, tl.int32)
    if HAS_CHOICE:
        temperature, role, step = choice_of(slot, temperature, role, judged_at, drafted_at, step_at)
    stream = stream_of(
        slot,
        request,
        offset,
        role,
        step,
        position_ptr,
        position_stride,
        ahead_ptr,
        ahead_stride,
        HAS_AHEAD,
    )
    pools = Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab)
    draft_ptr += tl.maximum(request - num_contexts, 0) * draft_stride
    num_before = tl.where(request < num_contexts, 0, offset) if HAS_DRAFTS else 0
    edits = edits_of(slot, pools, draft_ptr, num_before)
    row = Row(logits_ptr + number * row_stride, vocab, vocab_ids_ptr, edits)
    chunk = number * (num_pieces * LAYOUT.chunks)
    left = Left(top_ptr + chunk, detail_ptr + chunk, mass_ptr + chunk, raw_mass_ptr + chunk)
    # apart, so that rows without edits hold nothing of theirs
    if HAS_EDITS and is_edited(slot):
        _scanned(
            x,
            row,
            options,
            temperature,
            stream,
            left,
            first_piece,
            last_piece,
            LAYOUT,
            False,  # while it is edited a piece takes all registers
            HAS_IDS,
            True,
            HAS_CUTS,
            HAS_SUMS,
        )
    else:
        _scanned(
            x,
            row,
            options,
            temperature,
            stream,
            left,
            first_piece,
            last_piece,
            LAYOUT,
            NOISE_FIRST,
            HAS_IDS,
            False,
            HAS_CUTS,
            HAS_SUMS,
        )


@triton.jit
def _first_infinite(
    row, tops, chunks, LAYOUT: tl.constexpr, HAS_IDS: tl.constexpr, HAS_EDITS: tl.constexpr
):
    """The lowest column that holds +inf: in the first piece that has one."""
    piece = tl.min(tl.where(tops == float("inf"), chunks // LAYOUT.chunks, NO_COLUMN), axis=0)
    columns = piece * LAYOUT.piece + tl.arange(0, LAYOUT.piece)
    x = values_of(row, columns, columns < row.vocab, HAS_IDS, HAS_EDITS)
    return tl.min(tl.where(x == float("inf"), columns, NO_COLUMN), axis=0)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=SHIFTING)
def finish_kernel(
    # inputs
    logits_ptr,
    vocab_ids_ptr,
    position_ptr,
    ahead_ptr,
    draft_ptr,
    table_ptr,
    slot_ptr,
    bias_ptr,
    allowed_ptr,
    count_ptr,
    seen_ptr,
    top_ptr,
    detail_ptr,
    mass_ptr,
    raw_mass_ptr,
    # outputs
    token_ptr,
    cut_ptr,
    row_mass_ptr,
    # written and read here
    picked_ptr,
    pair_ptr,
    arrived_ptr,
    told_ptr,
    bound_ptr,
    # sizes
    num_contexts,
    width,
    column,
    role,
    judged_at,
    drafted_at,
    step_at,
    vocab,
    num_pieces,
    pool_vocab,
    row_stride,
    position_stride,
    ahead_stride,
    draft_stride,
    table_stride,
    slot_stride,
    # constants
    LAYOUT: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    BOUNDS: tl.constexpr,
    ALL_BOUNDS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    HAS_CHOICE: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    WARPS: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: its token, what its cuts leave, and its mass where log-probabilities are asked for;
    ``SHARES`` programs share it where its nucleus is flat."""
    SEGMENTS: tl.constexpr = SHARES + 1 if SHARES > 1 else 1
    LISTS: tl.constexpr = 2 if SHARES > 1 else 1
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    # what the scan does not write, while it ends
    request, offset, slot = place_of(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride, ".cg"
    )
    offset += column
    options = options_of(slot, vocab, ".cg")
    temperature = options.temperature
    step = tl.full([], 0, tl.int32)
    if HAS_CHOICE:
        temperature, role, step = choice_of(
            slot, temperature, role, judged_at, drafted_at, step_at, ".cg"
        )
    stream = stream_of(
        slot,
        request,
        offset,
        role,
        step,
        position_ptr,
        position_stride,
        ahead_ptr,
        ahead_stride,
        HAS_AHEAD,
        ".cg",
    )
    if SHARES > 1:
        is_nucleus = (options.top_k == 0) & (options.top_p < 1) & (temperature >= GREEDY_BELOW)
        if (share > 0) & ~is_nucleus:
            return  # there is nothing to share: the scan may have the room
    grid_dependency_synchronize(PDL)
    num_chunks = num_pieces * LAYOUT.chunks
    chunks = tl.arange(0, ALL_CHUNKS)
    tops = tl.load(
        top_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")
    )
    details = tl.load(detail_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    if HAS_SUMS:
        tells_mass = (share == 0) & (options.num_logprobs >= 0)
        raw_masses = tl.load(
            raw_mass_ptr + row * num_chunks + chunks,
            mask=(chunks < num_chunks) & tells_mass,
            other=0.0,
        )
    pools = Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab)
    draft_ptr += tl.maximum(request - num_contexts, 0) * draft_stride
    num_before = tl.where(request < num_contexts, 0, offset) if HAS_DRAFTS else 0
    edits = edits_of(slot, pools, draft_ptr, num_before)
    of_row = Row(logits_ptr + row * row_stride, vocab, vocab_ids_ptr, edits)
    top = highest_of(tops)
    draw = Draw(of_row, options, stream, top)
    if HAS_SUMS:  # noqa: SIM102 - known when it is compiled
        if tells_mass:
            tl.store(row_mass_ptr + row, row_mass_of(raw_masses, tops, top, LOG2_E))
    drawn = tl.full([], NO_COLUMN, tl.int32)
    limit = tl.full([], 0.0, tl.float32)
    last = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float32)
    is_known = share == 0
    is_asked = top > float("-inf")
    if SHARES > 1:
        is_asked = is_asked & (is_known | (top < float("inf")))
    if is_asked:
        if temperature < GREEDY_BELOW:
            firsts = details.to(tl.int32, bitcast=True)
            drawn = tl.min(tl.where(tops == top, firsts, NO_COLUMN), axis=0)
            last = drawn
            mass += 1.0
        elif top == float("inf"):
            drawn = _first_infinite(of_row, tops, chunks, LAYOUT, HAS_IDS, HAS_EDITS)
            last = drawn
            mass += 1.0
        elif (options.top_k == 0) & (options.top_p >= 1) & (options.min_p <= 0):
            bounds = details + (tops - top) * scale_of(temperature)
            bounds = tl.where(tops > float("-inf"), bounds, float("-inf"))
            drawn = best_noisy(
                draw,
                temperature,
                bounds,
                chunks,
                everywhere(),
                LAYOUT,
                HAS_IDS,
                HAS_EDITS,
                False,
            )
            if HAS_CUTS:
                limit += float("inf")
                last += vocab
                masses = tl.load(
                    mass_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0
                )
                mass = row_mass_of(masses, tops, top, scale_of(temperature))
        else:
            drawn, limit, last, mass, is_known = drawn_of_cut(
                draw,
                tops,
                details,
                chunks,
                num_chunks,
                picked_ptr + (row * SHARES + share) * (num_chunks * LISTS),
                pair_ptr + (row * SEGMENTS + share) * PLACES,
                Split(share, arrived_ptr + row, told_ptr + row * (TOLD * SHARES), num_chunks),
                bound_ptr + row * (tl.cdiv(vocab, BOUNDS.piece) * BOUNDS.chunks),
                LAYOUT,
                ALL_CHUNKS,
                BOUNDS,
                ALL_BOUNDS,
                HAS_IDS,
                HAS_EDITS,
                HAS_CUTS,
                WARPS,
                SHARES,
            )
    token = drawn
    if HAS_IDS:
        token = tl.load(vocab_ids_ptr + drawn, mask=drawn < vocab, other=NO_COLUMN)
    if SHARES == 1 or is_known:
        tl.store(token_ptr + row, tl.where(token == NO_COLUMN, -1, token))
        if HAS_CUTS:
            tl.store(cut_ptr + row * 4, top)
            tl.store(cut_ptr + row * 4 + 1, limit)
            tl.store(cut_ptr + row * 4 + 2, last.to(tl.float32))
            tl.store(cut_ptr + row * 4 + 3, mass)
