"""Triton kernels between two passes of the draft loop."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize
from mtp_plugin.speculative.logit_rows.processing_triton import ban_next
from mtp_plugin.speculative.logit_rows.thinking_triton import forced_behind

OF_SLOTS = ["drawn_position_stride", "ahead_stride", "table_stride", "slot_stride", "pool_vocab"]
OF_SLOTS += ["begin_token", "end_token", "end_length"]
SHIFTING = ["drawn_position_ptr", "ahead_ptr", "table_ptr", "slot_ptr"]
"""Of what is another number, or stands elsewhere, in every batch no binary is made."""


@triton.jit(do_not_specialize=OF_SLOTS, do_not_specialize_on_alignment=SHIFTING)
def place_kernel(
    value_ptr,
    id_ptr,
    draft_ptr,
    next_ptr,
    shifted_ptr,
    row_ptr,
    position_ptr,
    kv_len_ptr,
    vocab_ptr,
    drawn_position_ptr,
    ahead_ptr,
    table_ptr,
    slot_ptr,
    words_ptr,
    allowed_ptr,
    hidden_ptr,
    end_ptr,
    next_place_ptr,
    num_pieces,
    draft_stride,
    next_stride,
    column,
    max_position,
    drawn_position_stride,
    ahead_stride,
    table_stride,
    slot_stride,
    pool_vocab,
    begin_token,
    end_token,
    end_length,
    PIECES: tl.constexpr,
    SHIFT: tl.constexpr,
    ADVANCE: tl.constexpr,
    HAS_KV: tl.constexpr,
    HAS_VOCAB_IDS: tl.constexpr,
    IS_DRAWN: tl.constexpr,
    HAS_BANS: tl.constexpr,
    HAS_THINKING: tl.constexpr,
    LANES: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    STOPS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One request: the draft of its row, written wherever the next pass and the sampler read it,
    and what the draft behind it must not be."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, PIECES)
    if IS_DRAWN:
        draft = tl.maximum(tl.load(id_ptr + request), 0)
    else:
        inside = pieces < num_pieces
        place = request * num_pieces + pieces
        values = tl.load(value_ptr + place, mask=inside, other=float("-inf"))
        ids = tl.load(id_ptr + place, mask=inside, other=2147483647)
        top = tl.max(values, axis=0)
        draft = tl.min(tl.where(values == top, ids, 2147483647), axis=0)
    if HAS_VOCAB_IDS:
        draft = tl.load(vocab_ptr + draft)
    slot = table_ptr
    if HAS_BANS or HAS_THINKING:
        slot += tl.load(slot_ptr + request * slot_stride).to(tl.int64) * table_stride
    if HAS_THINKING:
        forced = forced_behind(
            slot,
            draft_ptr + request * draft_stride,
            column,
            begin_token,
            end_token,
            end_ptr,
            next_place_ptr,
            end_length,
            LANES,
        )
        draft = tl.where(forced >= 0, forced, draft)
    tl.store(draft_ptr + request * draft_stride + column, draft)
    tl.store(next_ptr + request * next_stride + column + 1, draft)
    if SHIFT:
        # the window moves by an offset into the ids: only the entry behind it is new
        row = tl.load(row_ptr + request)
        tl.store(shifted_ptr + row + column + 1, draft)
    if ADVANCE:
        position = tl.load(position_ptr + request) + 1
        tl.store(position_ptr + request, tl.minimum(position, max_position))
        if HAS_KV:
            tl.store(kv_len_ptr + request, tl.load(kv_len_ptr + request) + 1)
    if HAS_BANS:
        index = tl.load(drawn_position_ptr + request * drawn_position_stride).to(tl.int64)
        if HAS_AHEAD:
            index += tl.load(ahead_ptr + request * ahead_stride).to(tl.int64)
        # the draft is read by other threads than wrote it
        tl.debug_barrier()
        ban_next(
            slot,
            index + column + 2,
            column + 1,
            allowed_ptr,
            hidden_ptr,
            words_ptr,
            draft_ptr + request * draft_stride,
            pool_vocab,
            STOPS,
            WORDS,
            LENGTH,
            True,
        )


@triton.jit
def local_kernel(
    value_ptr,
    id_ptr,
    value_out_ptr,
    id_out_ptr,
    num_pieces,
    first_id,
    PIECES: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: the best value of a rank's pieces, where asked for, and its global id."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, PIECES)
    inside = pieces < num_pieces
    values = tl.load(value_ptr + row * num_pieces + pieces, mask=inside, other=float("-inf"))
    ids = tl.load(id_ptr + row * num_pieces + pieces, mask=inside, other=2147483647)
    top = tl.max(values, axis=0)
    if HAS_VALUES:
        tl.store(value_out_ptr + row, top)
    tl.store(id_out_ptr + row, tl.min(tl.where(values == top, ids, 2147483647), axis=0) + first_id)


@triton.jit
def merge_kernel(value_ptr, id_ptr, draft_ptr, rows, ranks, RANKS: tl.constexpr):
    """One row: the best of every rank's pair, the lowest id on ties."""
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    values = tl.load(value_ptr + rank * rows + row, mask=rank < ranks, other=float("-inf"))
    ids = tl.load(id_ptr + rank * rows + row, mask=rank < ranks, other=2147483647)
    top = tl.max(values, axis=0)
    tl.store(draft_ptr + row, tl.min(tl.where(values == top, ids, 2147483647), axis=0))
