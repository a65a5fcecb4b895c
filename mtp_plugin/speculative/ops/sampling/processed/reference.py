"""Processed scores in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.logit_rows import GREEDY_BELOW, DrawnRows, edited
from mtp_plugin.speculative.ops.sampling.reference import kept_scores
from mtp_plugin.speculative.step import SlotRows


def processed_scores(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    cuts: torch.Tensor,
    forced: torch.Tensor | None,
) -> torch.Tensor:
    """As at the door."""
    owners = rows.owners()[0]
    temperature, min_p = (
        slots.read(name, slice(0, rows.num_requests))[owners] for name in ("temperature", "min_p")
    )
    values, highest = edited(logits, rows, slots), cuts[:, :1]
    scores = kept_scores(values, cuts, temperature, min_p)
    is_whole = (temperature < GREEDY_BELOW).unsqueeze(1) & highest.isfinite()
    scores = torch.where(is_whole, values - highest, scores)
    if forced is None:
        return scores
    ids = torch.arange(values.shape[1], device=values.device)
    alone = torch.where(ids == forced.unsqueeze(1), 0.0, -torch.inf)
    return torch.where((forced >= 0).unsqueeze(1), alone, scores)
