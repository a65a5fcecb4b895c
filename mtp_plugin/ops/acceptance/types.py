"""Acceptance rules."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.ops.step import SlotRows


@dataclass(frozen=True)
class RelaxedRule:
    """Relaxed acceptance: state and limits of every request, in slots that a step updates in place.

    A request is in its thinking phase while its delta in force is above 0. A request whose own
    limit is 0 never has such a delta; its phase is in the column ``thinking`` alone.
    """

    slots: SlotRows
    """With ``thinking``, ``relaxed_topk`` (>= 1), ``relaxed_limit`` (>= 0, the distance to the
    highest probability that the request allows) and ``stop_ids`` (accepted only as top-1)."""
    delta_in_force: torch.Tensor
    """[>= S] float32, any stride: the delta that applies, 0 outside the thinking phase. A host
    engine may write it between steps."""
    begin_token: int  # -1 where the vocabulary has none
    end_token: int

    def phase(self, requests: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether each request is thinking [N] bool, and the delta that it has then [N] float32."""
        in_force = self.delta_in_force[self.slots.of(requests)]
        limit = self.slots.read("relaxed_limit", requests)
        has_delta = in_force > 0
        only_in_column = (self.slots.read("thinking", requests) > 0) & (limit == 0)
        return has_delta | only_in_column, torch.where(has_delta, in_force, limit)

    def set_phase(self, requests: slice, thinking: torch.Tensor, delta: torch.Tensor) -> None:
        """Write the phase of requests: ``thinking`` [N] bool, ``delta`` [N] of those that are."""
        slots = self.slots.of(requests)
        self.slots.table[slots, self.slots.columns.offset("thinking")] = thinking.to(torch.int32)
        self.delta_in_force[slots] = torch.where(thinking, delta, 0.0)


@dataclass(frozen=True)
class AcceptanceRules:
    """How drafts are verified: strictly, except where another rule applies.

    Tensors [rows] have one entry per row of logits.
    """

    relaxed: RelaxedRule | None = None  # applies to requests in their thinking phase
    choices: torch.Tensor | None = None
    """[rows] int32: the target token of each row, -1: none; None: the row's argmax. Strict and
    forced rows and all bonus tokens use it. If it is given, requests with a temperature are never
    relaxed."""
    forced_ids: torch.Tensor | None = None
    """[rows] int32: the only allowed token of a row, which is then its target token; -1: any. No
    rule accepts another draft there."""
    processed_slots: SlotRows | None = None
    """Slots with the logits-processor state of the requests, given with ``choices`` sampled from
    processed logits: relaxed rows are then verified with processed logits, and no rule accepts a
    masked token. None: raw logits are used."""
    forced_matches: torch.Tensor | None = None
    """[G] integer: the number of leading drafts that are accepted, without any other rule;
    negative: the other rules decide."""


STRICT = AcceptanceRules()
