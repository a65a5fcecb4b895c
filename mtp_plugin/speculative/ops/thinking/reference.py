"""Thinking budgets in torch: the CPU path and the oracle of the kernels."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.logit_rows import ThinkingRule, ThinkingState
from mtp_plugin.speculative.step import Accepted, SlotRows, StepLayout


def force_ends(
    layout: StepLayout,
    draft_tokens: torch.Tensor,
    slots: SlotRows,
    rule: ThinkingRule,
    choices: torch.Tensor,
) -> torch.Tensor:
    """As at the door."""
    contexts = layout.num_contexts
    drafts = draft_tokens.reshape(layout.num_generations, layout.draft_len).to(torch.int64)
    state = ThinkingState.read(slots, slice(contexts, layout.num_requests))
    rows = [state.forced(rule)]
    for column in range(layout.draft_len):
        state = state.behind(drafts[:, column], torch.ones_like(state.forces), rule)
        rows.append(state.forced(rule))
    prompts = ThinkingState.read(slots, slice(0, contexts)).forced(rule)
    forced = torch.cat([prompts, torch.stack(rows, dim=1).reshape(-1)]).to(torch.int32)
    choices.copy_(torch.where(forced >= 0, forced, choices))
    return forced


def note_thought(accepted: Accepted, slots: SlotRows, rule: ThinkingRule) -> None:
    """As at the door."""
    requests = slice(0, accepted.num_accepted.shape[0])
    state = ThinkingState.read(slots, requests)
    for column in range(accepted.tokens.shape[1]):
        is_there = (column < accepted.num_accepted) & (state.budget >= 0)
        state = state.behind(accepted.tokens[:, column].to(torch.int64), is_there, rule)
    rows = slots.of(requests)
    for name, values in (("thought", state.thought), ("end_place", state.place)):
        slots.table[rows, slots.columns.offset(name)] = values.to(torch.int32)
