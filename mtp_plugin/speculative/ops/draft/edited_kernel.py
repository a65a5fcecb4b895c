"""Triton kernel of first choices among edited logits."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize
from mtp_plugin.speculative.logit_rows.processing_triton import Pools, edited, edits_of

OF_SLOTS = ["table_stride", "slot_stride", "pool_vocab", "draft_stride", "column"]
SHIFTING = ["table_ptr", "slot_ptr", "draft_ptr"]
"""Of what is another number, or stands elsewhere, in every batch no binary is made."""


@triton.jit(do_not_specialize=OF_SLOTS, do_not_specialize_on_alignment=SHIFTING)
def edited_top1_kernel(
    # inputs
    logits_ptr,
    table_ptr,
    slot_ptr,
    bias_ptr,
    allowed_ptr,
    count_ptr,
    seen_ptr,
    draft_ptr,
    vocab_ptr,
    # outputs
    value_ptr,
    id_ptr,
    # sizes
    row_stride,
    table_stride,
    slot_stride,
    draft_stride,
    column,
    pool_vocab,
    vocab,
    piece,
    num_pieces,
    # constants
    HAS_VOCAB_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (row, piece): its highest value behind the request's edits, and the lowest column that
    has it."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = table_ptr + tl.load(slot_ptr + row * slot_stride).to(tl.int64) * table_stride
    pools = Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab)
    edits = edits_of(slot, pools, draft_ptr + row * draft_stride, column)
    first = part * piece
    end = tl.minimum(first + piece, vocab)
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_column = first + lanes
    for start in range(first, end, BLOCK):
        columns = start + lanes
        inside = columns < end
        x = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where(x == x, x, float("-inf"))
        ids = columns
        if HAS_VOCAB_IDS:
            ids = tl.load(vocab_ptr + columns, mask=inside, other=0)
        x = tl.where(inside, edited(x, ids, inside, edits), float("-inf"))
        better = x > best
        best = tl.where(better, x, best)
        best_column = tl.where(better, columns, best_column)
    top = tl.max(best, axis=0)
    top_column = tl.min(tl.where(best == top, best_column, 2147483647), axis=0)
    out = row * num_pieces + part
    tl.store(value_ptr + out, top)
    tl.store(id_ptr + out, top_column)
