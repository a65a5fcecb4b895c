"""Triton implementation of `thinking_budget`: one program per request walks its tokens."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.logit_rows import ThinkingRule
from mtp_plugin.ops.logit_rows.thinking_triton import (
    BUDGET,
    END_PROGRESS,
    NUM_THINKING,
    thinking_after,
)
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.step import Accepted, SlotRows, StepLayout


@triton.jit
def _store_forced(row, num_thinking, progress, budget, end_ptr, forced_ptr, choice_ptr):
    """Store the token that a row must give, -1 if any."""
    forces = (num_thinking >= 0) & (budget >= 0) & (num_thinking >= budget)
    forced = tl.load(end_ptr + progress, mask=forces, other=-1)
    tl.store(forced_ptr + row, forced)
    tl.store(choice_ptr + row, forced, mask=forces)


@triton.jit
def force_thinking_end_kernel(
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
    """One program per request: the forced token of each row, given the drafts before it."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + request * slot_stride).to(tl.int64)
    lanes = tl.arange(0, LANES)
    end_ids = tl.load(end_ptr + lanes, mask=lanes < length, other=-1)
    slot_row = table_ptr + slot * table_stride
    budget = tl.load(slot_row + BUDGET)
    # the other columns are unset without a budget
    num_thinking = tl.load(slot_row + NUM_THINKING, mask=budget >= 0, other=-1)
    progress = tl.load(slot_row + END_PROGRESS, mask=budget >= 0, other=0)
    if request < num_contexts:
        _store_forced(request, num_thinking, progress, budget, end_ptr, forced_ptr, choice_ptr)
    else:
        generation = request - num_contexts
        first = num_contexts + generation * (K + 1)
        _store_forced(first, num_thinking, progress, budget, end_ptr, forced_ptr, choice_ptr)
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
            _store_forced(row, num_thinking, progress, budget, end_ptr, forced_ptr, choice_ptr)


@triton.jit
def update_thinking_state_kernel(
    # inputs
    token_ptr,
    count_ptr,
    slot_ptr,
    end_ptr,
    next_ptr,
    # updated in place
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
    """One program per request: advance its thinking state by its accepted tokens."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + request * slot_stride).to(tl.int64)
    count = tl.load(count_ptr + request * count_stride)
    lanes = tl.arange(0, LANES)
    end_ids = tl.load(end_ptr + lanes, mask=lanes < length, other=-1)
    slot_row = table_ptr + slot * table_stride
    budget = tl.load(slot_row + BUDGET)
    if budget >= 0:
        num_thinking = tl.load(slot_row + NUM_THINKING)
        progress = tl.load(slot_row + END_PROGRESS)
        for column in range(0, count):
            token = tl.load(token_ptr + request * token_stride + column * column_stride)
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
        tl.store(slot_row + NUM_THINKING, num_thinking)
        tl.store(slot_row + END_PROGRESS, progress)


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
        slots.table.stride(0),
        rule.begin_token,
        rule.end_token,
        length,
        # constants
        LANES=triton.next_power_of_2(length),
        num_warps=1,
        **pdl_options(tokens.device),
    )
