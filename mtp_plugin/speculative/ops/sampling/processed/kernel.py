"""Triton kernel of processed scores."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch import grid_dependency_synchronize
from mtp_plugin.requests.columns import request_column
from mtp_plugin.speculative.logit_rows.processing_triton import Pools
from mtp_plugin.speculative.logit_rows.rows_triton import GREEDY_BELOW, place_of
from mtp_plugin.speculative.ops.sampling.noise_kernel import values_of
from mtp_plugin.speculative.ops.sampling.residual.row_kernel import (
    Batch,
    kept_of,
    only_of,
    score_of,
)

LOGPROBS = tl.constexpr(request_column("logprobs"))

CHANGING = ["num_contexts", "width", "num_pieces", "pool_vocab", "draft_stride", "forced_stride"]
CHANGING += ["table_stride", "slot_stride"]
SHIFTING = ["draft_ptr", "forced_ptr", "table_ptr", "slot_ptr"]
"""Of what is another number, or stands elsewhere, in every batch no binary is made."""


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=SHIFTING)
def processed_kernel(
    # inputs
    logits_ptr,
    draft_ptr,
    forced_ptr,
    table_ptr,
    slot_ptr,
    bias_ptr,
    allowed_ptr,
    count_ptr,
    seen_ptr,
    cut_ptr,
    # output
    score_ptr,
    # sizes
    num_contexts,
    width,
    vocab,
    num_pieces,
    pool_vocab,
    row_stride,
    draft_stride,
    forced_stride,
    table_stride,
    slot_stride,
    # constants
    PIECE: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (row, piece); nothing, where nobody asks for the row."""
    grid_dependency_synchronize(PDL)
    row = (tl.program_id(0) // num_pieces).to(tl.int64)
    piece = tl.program_id(0) % num_pieces
    request, offset, slot = place_of(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride
    )
    if tl.load(slot + LOGPROBS) >= 0:
        batch = Batch(
            logits_ptr,
            row_stride,
            vocab,
            logits_ptr,
            cut_ptr,
            Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab),
        )
        generation = tl.maximum(request - num_contexts, 0).to(tl.int64)
        drafts = draft_ptr + generation * draft_stride
        only = only_of(forced_ptr, row, forced_stride, HAS_FORCED)
        kept = kept_of(batch, row, slot, drafts, offset if HAS_DRAFTS else 0, only)
        columns = piece * PIECE + tl.arange(0, PIECE)
        inside = columns < vocab
        is_finite = (kept.top > float("-inf")) & (kept.top < float("inf"))
        if (kept.temperature < GREEDY_BELOW) & is_finite & (only < 0):
            score = values_of(kept.row, columns, inside, False, HAS_EDITS) - kept.top
        else:
            score = score_of(kept, columns, inside, False, HAS_EDITS)
        tl.store(score_ptr + row * vocab + columns, score, mask=inside)
