"""Triton kernels of the split reductions over the vocabulary."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize


@triton.jit
def _lane_top1(logits_ptr, row_start, first, end, BLOCK: tl.constexpr):
    """Highest value of each lane over [first, end), and its lowest id."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = first + lanes
    for start in range(first, end, BLOCK):
        ids = start + lanes
        value = tl.load(logits_ptr + row_start + ids, mask=ids < end, other=float("-inf"))
        value = value.to(tl.float32)
        # a comparison with NaN is false, so NaN never wins
        better = value > best
        best = tl.where(better, value, best)
        best_id = tl.where(better, ids, best_id)
    return best, best_id


@triton.jit
def top1_kernel(
    logits_ptr,
    value_ptr,
    id_ptr,
    row_stride,
    vocab,
    piece,
    num_pieces,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (row, piece): its highest value and the lowest id that has it."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * piece
    end = tl.minimum(first + piece, vocab)
    best, best_id = _lane_top1(logits_ptr, row * row_stride, first, end, BLOCK)
    top = tl.max(best, axis=0)
    top_id = tl.min(tl.where(best == top, best_id, 2147483647), axis=0)
    out = row * num_pieces + part
    tl.store(value_ptr + out, top)
    tl.store(id_ptr + out, top_id)
