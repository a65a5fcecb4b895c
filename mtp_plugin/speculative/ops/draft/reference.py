"""What happens between two passes of the draft loop, in torch."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.logit_rows import (
    DrawnRows,
    ThinkingRule,
    ThinkingState,
    ban_next,
    edited,
)
from mtp_plugin.speculative.step import DraftOutput, SlotRows


def propose(logits: torch.Tensor, place: DraftOutput) -> None:
    """As at the door."""
    place.write(_first_choices(logits, place))


def propose_edited(
    logits: torch.Tensor,
    place: DraftOutput,
    rows: DrawnRows,
    slots: SlotRows,
    behind: DrawnRows | None,
    thinking: ThinkingRule | None,
) -> None:
    """As at the door."""
    values = edited(logits, rows, slots.as_drafts_read(), vocab_ids=place.vocab_ids)
    place_drafts(_first_choices(values, place), place, behind, slots, thinking)


def place_drafts(
    drafts: torch.Tensor,
    place: DraftOutput,
    behind: DrawnRows | None,
    slots: SlotRows | None,
    thinking: ThinkingRule | None,
) -> None:
    """As at the door."""
    drafts = drafts.clamp_min(0)
    if thinking is not None and slots is not None:
        state = ThinkingState.read(slots, slice(0, drafts.shape[0]))
        for column in range(place.column):
            token = place.drafts[:, column].to(torch.int64)
            state = state.behind(token, state.budget >= 0, thinking)
        forced = torch.where(state.budget >= 0, state.forced(thinking), -1)
        drafts = torch.where(forced >= 0, forced, drafts)
    place.write(drafts)
    if behind is not None and slots is not None:
        ban_next(behind, slots)


def draft_argmax(logits: torch.Tensor) -> torch.Tensor:
    """As at the door."""
    return logits.masked_fill(torch.isnan(logits), -torch.inf).argmax(dim=-1).to(torch.int32)


def _first_choices(logits: torch.Tensor, place: DraftOutput) -> torch.Tensor:
    """The ids of the highest values [R]."""
    columns = draft_argmax(logits)
    return columns if place.vocab_ids is None else place.vocab_ids.index_select(0, columns)


def local_top1(
    logits: torch.Tensor, first_id: int, num_ids: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As at the door."""
    real = logits[:, :num_ids]
    best = draft_argmax(real)
    of_best = real.gather(1, best.to(torch.int64).unsqueeze(1)).squeeze(1).to(torch.float32)
    values = of_best.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return values, best + first_id


def merge_top1(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As at the door."""
    best = values.amax(dim=0, keepdim=True)
    candidates = ids.masked_fill(values != best, torch.iinfo(torch.int32).max)
    return candidates.amin(dim=0)


def place_last_states(
    states: torch.Tensor, outputs: torch.Tensor, last_rows: torch.Tensor, offset: int
) -> None:
    """As at the door."""
    last = outputs[last_rows]
    states[last_rows + offset] = last.to(states.dtype)
