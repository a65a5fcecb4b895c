"""Triton kernels of thinking budgets: a program per request, its tokens one after the other."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize
from mtp_plugin.speculative.logit_rows.thinking_kernel import BUDGET, PLACE, THOUGHT, behind


@triton.jit
def _store_forced(row, thought, place, budget, end_ptr, forced_ptr, choice_ptr):
    """One row: the id that it must give."""
    forces = (thought >= 0) & (budget >= 0) & (thought >= budget)
    forced = tl.load(end_ptr + place, mask=forces, other=-1)
    tl.store(forced_ptr + row, forced)
    tl.store(choice_ptr + row, forced, mask=forces)


@triton.jit
def force_kernel(
    # inputs
    draft_ptr,
    slot_ptr,
    table_ptr,
    end_ptr,
    next_ptr,
    # outputs
    forced_ptr,
    choice_ptr,
    # sizes
    num_contexts,
    slot_stride,
    table_stride,
    begin_token,
    end_token,
    length,
    # constants
    K: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One request: what its rows must give, each behind the drafts in front of it."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + request * slot_stride).to(tl.int64)
    lanes = tl.arange(0, LANES)
    end_ids = tl.load(end_ptr + lanes, mask=lanes < length, other=-1)
    slot_row = table_ptr + slot * table_stride
    budget = tl.load(slot_row + BUDGET)
    # without a budget nothing else is kept
    thought = tl.load(slot_row + THOUGHT, mask=budget >= 0, other=-1)
    place = tl.load(slot_row + PLACE, mask=budget >= 0, other=0)
    if request < num_contexts:
        _store_forced(request, thought, place, budget, end_ptr, forced_ptr, choice_ptr)
    else:
        generation = request - num_contexts
        first = num_contexts + generation * (K + 1)
        _store_forced(first, thought, place, budget, end_ptr, forced_ptr, choice_ptr)
        for column in tl.static_range(K):
            token = tl.load(draft_ptr + generation * K + column)
            thought, place = behind(
                token,
                thought,
                place,
                budget,
                begin_token,
                end_token,
                end_ids,
                next_ptr,
                length,
                lanes,
            )
            row = first + column + 1
            _store_forced(row, thought, place, budget, end_ptr, forced_ptr, choice_ptr)


@triton.jit
def note_kernel(
    # inputs
    token_ptr,
    count_ptr,
    slot_ptr,
    end_ptr,
    next_ptr,
    # read, and moved on
    table_ptr,
    # sizes
    token_stride,
    column_stride,
    count_stride,
    slot_stride,
    table_stride,
    begin_token,
    end_token,
    length,
    # constants
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One request: what it has thought behind the tokens that it emitted."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + request * slot_stride).to(tl.int64)
    count = tl.load(count_ptr + request * count_stride)
    lanes = tl.arange(0, LANES)
    end_ids = tl.load(end_ptr + lanes, mask=lanes < length, other=-1)
    slot_row = table_ptr + slot * table_stride
    budget = tl.load(slot_row + BUDGET)
    if budget >= 0:
        thought = tl.load(slot_row + THOUGHT)
        place = tl.load(slot_row + PLACE)
        for column in range(0, count):
            token = tl.load(token_ptr + request * token_stride + column * column_stride)
            thought, place = behind(
                token,
                thought,
                place,
                budget,
                begin_token,
                end_token,
                end_ids,
                next_ptr,
                length,
                lanes,
            )
        tl.store(slot_row + THOUGHT, thought)
        tl.store(slot_row + PLACE, place)
