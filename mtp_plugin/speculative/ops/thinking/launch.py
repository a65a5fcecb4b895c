"""Launches of thinking budgets: one before a step's tokens are judged, one behind."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.logit_rows import ThinkingRule
from mtp_plugin.speculative.ops.thinking.kernel import force_kernel, note_kernel
from mtp_plugin.speculative.step import Accepted, SlotRows, StepLayout


def force_ends(
    layout: StepLayout,
    draft_tokens: torch.Tensor,
    slots: SlotRows,
    rule: ThinkingRule,
    choices: torch.Tensor,
) -> torch.Tensor:
    """As at the door."""
    forced = torch.empty_like(choices)
    if layout.num_requests == 0:
        return forced
    drafts = draft_tokens.reshape(-1).contiguous()
    length = rule.end_ids.numel()
    force_kernel[(layout.num_requests,)](
        # inputs
        drafts if drafts.numel() else forced,  # without drafts never read
        slots.slot_ids,
        slots.table,
        rule.end_ids,
        rule.next_places,
        # outputs
        forced,
        choices,
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
        **pdl_options(choices.device),
    )
    return forced


def note_thought(accepted: Accepted, slots: SlotRows, rule: ThinkingRule) -> None:
    """As at the door."""
    tokens = accepted.tokens
    length = rule.end_ids.numel()
    note_kernel[(tokens.shape[0],)](
        # inputs
        tokens,
        accepted.num_accepted,
        slots.slot_ids,
        rule.end_ids,
        rule.next_places,
        # read, and moved on
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
