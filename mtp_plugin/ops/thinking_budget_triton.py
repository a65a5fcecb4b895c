"""Triton implementation of `thinking_budget`: two functions of one launch each.

Both run one program per request (grid [R]), which walks the tokens of its request in order, since
each token's state depends on the one before.

`force_thinking_end_kernel`, after sampling:

1. Load the budget, thinking-token count and end-sequence progress of the request's slot. Without a
   budget (-1) the other columns are unset and are not read.
2. Write the forced token of the request's first row, -1 if any token may follow; where there is
   one, also overwrite the row's target token.
3. A generation repeats this for its other K rows, each after advancing the state by the draft
   before it. An absent draft (-1) is no token of the end sequence; the rows after it are never
   reached, so what they hold does not matter.

`update_thinking_state_kernel`, after verification: advance the state by the accepted tokens and
write it back. A request without a budget or with 0 accepted tokens changes nothing, so padding
requests may share a slot without one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.logit_rows import ThinkingRule
from mtp_plugin.ops.logit_rows.rows_triton import load_slot
from mtp_plugin.ops.logit_rows.thinking_triton import (
    BUDGET,
    END_PROGRESS,
    NUM_THINKING,
    clamp_progress,
    thinking_after,
)
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.step import Accepted, SlotRows, StepLayout


@triton.jit
def _store_forced(row, num_thinking, progress, budget, length, end_ptr, forced_ptr, target_ptr):
    """Store the token that a row must give, -1 if it may give any."""
    forces = (num_thinking >= 0) & (budget >= 0) & (num_thinking >= budget)
    forced = tl.load(end_ptr + clamp_progress(progress, length), mask=forces, other=-1)
    tl.store(forced_ptr + row, forced)
    tl.store(target_ptr + row, forced, mask=forces)


@triton.jit(do_not_specialize=["num_slots"])
def force_thinking_end_kernel(
    # inputs
    draft_ptr,  # [G, K] integer, contiguous
    slot_ptr,  # [>= R] integer
    table_ptr,  # [S, W] int32
    end_ptr,  # [length] int32: the end sequence
    next_ptr,  # [length, length] int32: progress after a progress and an id of the end sequence
    # outputs; rows: C + G*(K+1)
    forced_ptr,  # [rows] int32: the forced token, -1: none
    target_ptr,  # [rows] int32: overwritten where a token is forced
    # sizes
    num_contexts,  # C
    slot_stride,
    num_slots,  # S
    table_stride,
    begin_token,  # of thinking
    end_token,  # that ends thinking alone; -1: none
    length,  # of the end sequence
    # constants
    K: tl.constexpr,
    LANES: tl.constexpr,  # a power of two >= length
    PDL: tl.constexpr,
):
    """One program per request: the forced token of each row, given the drafts before it."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = load_slot(slot_ptr, slot_stride, request, num_slots)
    lanes = tl.arange(0, LANES)
    end_ids = tl.load(end_ptr + lanes, mask=lanes < length, other=-1)
    slot_row_ptr = table_ptr + slot * table_stride
    budget = tl.load(slot_row_ptr + BUDGET)
    # the other columns are unset without a budget
    num_thinking = tl.load(slot_row_ptr + NUM_THINKING, mask=budget >= 0, other=-1)
    progress = tl.load(slot_row_ptr + END_PROGRESS, mask=budget >= 0, other=0)
    if request < num_contexts:
        _store_forced(
            request, num_thinking, progress, budget, length, end_ptr, forced_ptr, target_ptr
        )
    else:
        generation = request - num_contexts
        first = num_contexts + generation * (K + 1)
        _store_forced(
            first, num_thinking, progress, budget, length, end_ptr, forced_ptr, target_ptr
        )
        for column in tl.static_range(K):
            token = tl.load(draft_ptr + generation * K + column)
            num_thinking, progress = thinking_after(
                token,
                num_thinking,
                progress,
                budget,
                begin_token,
                end_token,
                end_ids,
                next_ptr,
                length,
                lanes,
            )
            row = first + column + 1
            _store_forced(
                row, num_thinking, progress, budget, length, end_ptr, forced_ptr, target_ptr
            )


@triton.jit(do_not_specialize=["num_slots"])
def update_thinking_state_kernel(
    # inputs
    token_ptr,  # [R, K+1] integer: accepted tokens
    count_ptr,  # [R] integer: how many of each row count
    slot_ptr,  # [>= R] integer
    end_ptr,  # [length] int32: the end sequence
    next_ptr,  # [length, length] int32, as above
    # updated in place
    table_ptr,  # [S, W] int32
    # sizes
    token_row_stride,
    token_stride,
    count_stride,
    slot_stride,
    num_slots,  # S
    table_stride,
    begin_token,
    end_token,
    length,  # of the end sequence
    # constants
    LANES: tl.constexpr,  # a power of two >= length
    PDL: tl.constexpr,
):
    """One program per request: advance its thinking state by its accepted tokens."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = load_slot(slot_ptr, slot_stride, request, num_slots)
    count = tl.load(count_ptr + request * count_stride)
    lanes = tl.arange(0, LANES)
    end_ids = tl.load(end_ptr + lanes, mask=lanes < length, other=-1)
    slot_row_ptr = table_ptr + slot * table_stride
    budget = tl.load(slot_row_ptr + BUDGET)
    if budget >= 0:
        num_thinking = tl.load(slot_row_ptr + NUM_THINKING)
        progress = tl.load(slot_row_ptr + END_PROGRESS)
        for column in range(0, count):
            token = tl.load(token_ptr + request * token_row_stride + column * token_stride)
            num_thinking, progress = thinking_after(
                token,
                num_thinking,
                progress,
                budget,
                begin_token,
                end_token,
                end_ids,
                next_ptr,
                length,
                lanes,
            )
        tl.store(slot_row_ptr + NUM_THINKING, num_thinking)
        tl.store(slot_row_ptr + END_PROGRESS, progress)


def force_thinking_end_triton(
    layout: StepLayout,
    draft_tokens: torch.Tensor,
    slots: SlotRows,
    rule: ThinkingRule,
    target_tokens: torch.Tensor,
) -> torch.Tensor:
    forced = torch.empty_like(target_tokens)
    if layout.num_requests == 0:
        return forced
    drafts = draft_tokens.reshape(-1).contiguous()
    length = rule.end_ids.numel()
    force_thinking_end_kernel[(layout.num_requests,)](
        # inputs
        drafts if drafts.numel() else forced,  # never read without drafts
        slots.slot_ids,
        slots.table,
        rule.end_ids,
        rule.next_progress,
        # outputs
        forced,
        target_tokens,
        # sizes
        layout.num_contexts,
        slots.slot_ids.stride(0),
        slots.table.shape[0],
        slots.table.stride(0),
        rule.begin_token,
        rule.end_token,
        length,
        # constants
        K=layout.draft_len,
        LANES=triton.next_power_of_2(length),
        num_warps=1,
        **pdl_options(target_tokens.device),
    )
    return forced


def update_thinking_state_triton(accepted: Accepted, slots: SlotRows, rule: ThinkingRule) -> None:
    tokens = accepted.tokens
    length = rule.end_ids.numel()
    update_thinking_state_kernel[(tokens.shape[0],)](
        # inputs
        tokens,
        accepted.num_accepted,
        slots.slot_ids,
        rule.end_ids,
        rule.next_progress,
        # updated in place
        slots.table,
        # sizes
        tokens.stride(0),
        tokens.stride(1),
        accepted.num_accepted.stride(0),
        slots.slot_ids.stride(0),
        slots.table.shape[0],
        slots.table.stride(0),
        rule.begin_token,
        rule.end_token,
        length,
        # constants
        LANES=triton.next_power_of_2(length),
        num_warps=1,
        **pdl_options(tokens.device),
    )
