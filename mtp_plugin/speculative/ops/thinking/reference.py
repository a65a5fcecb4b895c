"""Thinking budgets in torch: the CPU path and the oracle of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import Self

from mtp_plugin.speculative.ops.thinking.contract import ThinkingRule
from mtp_plugin.speculative.step import Accepted, SlotRows, StepLayout


@dataclass(frozen=True)
class _State:
    """Of some requests, all [N] int64."""

    budget: torch.Tensor
    thought: torch.Tensor
    place: torch.Tensor

    @classmethod
    def read(cls, slots: SlotRows, requests: slice) -> Self:
        names = ("thinking_token_budget", "thought", "end_place")
        return cls(*(slots.read(name, requests).to(torch.int64) for name in names))

    @property
    def forces(self) -> torch.Tensor:
        """Whether the end must go on [N] bool."""
        return (self.thought >= 0) & (self.budget >= 0) & (self.thought >= self.budget)

    def forced(self, rule: ThinkingRule) -> torch.Tensor:
        """The id that must come next, -1: any."""
        place = self.place.clamp(0, len(rule.end_ids) - 1)
        return torch.where(self.forces, rule.end_ids[place], -1)

    def behind(self, tokens: torch.Tensor, is_there: torch.Tensor, rule: ThinkingRule) -> _State:
        """The state behind ``tokens`` [N], where they are."""
        length = len(rule.end_ids)
        hits = tokens.unsqueeze(1) == rule.end_ids
        places = rule.next_places[self.place.clamp(0, length - 1)]
        place = torch.where(hits, places, 0).amax(dim=1).to(torch.int64)
        thinks = self.thought >= 0
        ends = (tokens == rule.end_token) & (tokens >= 0) & ~self.forces
        ends = (ends | (place == length)) & thinks
        begins = (tokens == rule.begin_token) & ~thinks
        thought = torch.where(thinks & ~ends, self.thought + 1, torch.where(begins, 0, -1))
        place = torch.where(thinks & ~ends, place, 0)
        return _State(
            self.budget,
            torch.where(is_there, thought, self.thought),
            torch.where(is_there, place, self.place),
        )


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
    state = _State.read(slots, slice(contexts, layout.num_requests))
    rows = [state.forced(rule)]
    for column in range(layout.draft_len):
        state = state.behind(drafts[:, column], torch.ones_like(state.forces), rule)
        rows.append(state.forced(rule))
    prompts = _State.read(slots, slice(0, contexts)).forced(rule)
    forced = torch.cat([prompts, torch.stack(rows, dim=1).reshape(-1)]).to(torch.int32)
    choices.copy_(torch.where(forced >= 0, forced, choices))
    return forced


def note_thought(accepted: Accepted, slots: SlotRows, rule: ThinkingRule) -> None:
    """As at the door."""
    requests = slice(0, accepted.num_accepted.shape[0])
    state = _State.read(slots, requests)
    for column in range(accepted.tokens.shape[1]):
        is_there = (column < accepted.num_accepted) & (state.budget >= 0)
        state = state.behind(accepted.tokens[:, column].to(torch.int64), is_there, rule)
    rows = slots.of(requests)
    for name, values in (("thought", state.thought), ("end_place", state.place)):
        slots.table[rows, slots.columns.offset(name)] = values.to(torch.int32)
