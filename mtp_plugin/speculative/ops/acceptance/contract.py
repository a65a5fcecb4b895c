"""What acceptance takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.speculative.step import SlotRows


@dataclass(frozen=True)
class RelaxedRule:
    """Relaxed acceptance: where state and limits of every request stand; both move on in place.

    A request thinks while its delta in force is above 0. One whose own limit is 0 has no delta that
    could say so: of it the column ``thinking`` does.
    """

    slots: SlotRows
    """With ``thinking``, ``relaxed_topk`` (>= 1), ``relaxed_limit`` (>= 0, the distance to the
    highest probability that the request allows) and ``stop_ids`` (accepted only as top-1)."""
    delta_in_force: torch.Tensor
    """[S] float32, any stride: the delta that counts, whoever wrote it; 0 where nobody thinks."""
    begin_token: int  # -1 where the vocabulary has none
    end_token: int

    def phase(self, requests: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of some requests think [N] bool, and the delta that each has or would have [N]
        float32."""
        in_force = self.delta_in_force[self.slots.of(requests)]
        limit = self.slots.read("relaxed_limit", requests)
        begins = in_force > 0
        unseen = (self.slots.read("thinking", requests) > 0) & (limit == 0)
        return begins | unseen, torch.where(begins, in_force, limit)

    def set_phase(self, requests: slice, thinking: torch.Tensor, delta: torch.Tensor) -> None:
        """Put some requests into a phase: ``thinking`` [N] bool, ``delta`` [N] of those who do."""
        slots = self.slots.of(requests)
        self.slots.table[slots, self.slots.columns.offset("thinking")] = thinking.to(torch.int32)
        self.delta_in_force[slots] = torch.where(thinking, delta, 0.0)


@dataclass(frozen=True)
class AcceptanceRules:
    """How the rows of a batch are judged; rows that no rule names are judged strictly."""

    relaxed: RelaxedRule | None = None  # decides where a request thinks
    choices: torch.Tensor | None = None
    """[rows] int32: the token that the target chose in every row, -1 where it has none; None: the
    row's argmax. Strict and forced rows go by it, and every bonus. Requests with a temperature are
    never relaxed where it is given."""
    forced_ids: torch.Tensor | None = None
    """[rows] int32: the only token that a row allows, which is its choice, -1: any. A draft stands
    there if it is that token, by whatever rule."""
    edited_by: SlotRows | None = None
    """The requests whose slots and pools say how logits are edited, beside choices that were; their
    relaxed rows are judged by edited values, and no rule takes an id that is not allowed. None:
    logits stand as they are."""
    forced_matches: torch.Tensor | None = None
    """[G] integer: so many leading drafts stand, and no other rule decides; negative: the target
    decides."""


STRICT = AcceptanceRules()
