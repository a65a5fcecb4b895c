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


@triton.jit
def relaxed_kernel(
    logits_ptr,
    draft_ptr,
    thinking_ptr,
    value_ptr,
    id_ptr,
    weight_ptr,
    ahead_ptr,
    row_stride,
    vocab,
    piece,
    num_pieces,
    num_contexts,
    begin_token,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """As top1_kernel; for drafted rows of requests that think also the sum of weights and a rank.

    ``weight``: sum of exp(value - piece maximum). ``ahead``: tokens of the piece that come before
    the row's draft in order of falling value, then rising id.
    """
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * piece
    end = tl.minimum(first + piece, vocab)
    out = row * num_pieces + part
    row_start = row * row_stride

    generation = (row - num_contexts) // WIDTH
    column = (row - num_contexts) % WIDTH
    drafted = (row >= num_contexts) & (column < WIDTH - 1)
    request = tl.where(row < num_contexts, row, num_contexts + generation)
    thinking = tl.load(thinking_ptr + request) != 0
    drafts_start = generation * (WIDTH - 1)
    columns = tl.arange(0, COLUMNS)
    in_run = (columns < WIDTH - 1) & (row >= num_contexts)
    drafts = tl.load(draft_ptr + drafts_start + columns, mask=in_run, other=-1)
    # a phase that begins within the run needs its later rows judged too
    begins = tl.max((in_run & (drafts == begin_token)).to(tl.int32), axis=0) == 1
    if drafted & (thinking | begins):
        draft = tl.load(draft_ptr + drafts_start + column)
        known = (draft >= 0) & (draft < vocab)
        # wide ids are judged before they are narrowed
        draft = tl.minimum(tl.maximum(draft, -1), vocab).to(tl.int32)
        draft_value = tl.load(
            logits_ptr + row_start + tl.where(known, draft, 0), mask=known, other=float("-inf")
        ).to(tl.float32)
        draft_value = tl.where(draft_value == draft_value, draft_value, float("-inf"))
        lanes = tl.arange(0, BLOCK)
        top = tl.full([], float("-inf"), tl.float32)
        top_id = first
        weight = tl.full([], 0.0, tl.float32)
        ahead = tl.zeros([BLOCK], tl.int32)
        for start in range(first, end, BLOCK):
            ids = start + lanes
            value = tl.load(logits_ptr + row_start + ids, mask=ids < end, other=float("-inf"))
            value = value.to(tl.float32)
            value = tl.where(value == value, value, float("-inf"))
            block_top = tl.max(value, axis=0)
            block_id = tl.min(tl.where(value == block_top, ids, 2147483647), axis=0)
            top_id = tl.where(block_top > top, block_id, top_id)
            highest = tl.maximum(top, block_top)
            # one exponential per value; equal values differ by zero also where both are infinite
            finite = tl.where(highest == float("-inf"), 0.0, highest)
            scale = tl.where(top == highest, 1.0, tl.exp(top - finite))
            added = tl.where(value == highest, 1.0, tl.exp(value - finite))
            added = tl.where(value == float("-inf"), 0.0, added)
            weight = weight * scale + tl.sum(added, axis=0)
            top = highest
            first_of_equals = (value == draft_value) & (ids < draft)
            ahead += ((value > draft_value) | (first_of_equals & (ids < end))).to(tl.int32)
        tl.store(weight_ptr + out, weight)
        tl.store(ahead_ptr + out, tl.sum(ahead, axis=0))
        tl.store(value_ptr + out, top)
        tl.store(id_ptr + out, top_id)
    else:
        best, best_id = _lane_top1(logits_ptr, row_start, first, end, BLOCK)
        top = tl.max(best, axis=0)
        tl.store(value_ptr + out, top)
        tl.store(id_ptr + out, tl.min(tl.where(best == top, best_id, 2147483647), axis=0))
        tl.store(weight_ptr + out, 1.0)
        tl.store(ahead_ptr + out, 0)
