"""Masked logits in torch: the CPU path and the oracle."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from mtp_plugin.speculative.logit_rows import DrawnRows, banned
from mtp_plugin.speculative.step import SlotRows


def banned_masked(
    logits: torch.Tensor, rows: DrawnRows, slots: SlotRows
) -> AbstractContextManager[torch.Tensor]:
    """As at the door, in a copy."""
    ids = torch.cat(banned(rows, slots), dim=1)
    vocab = logits.shape[1]
    is_there = (ids >= 0) & (ids < vocab)
    ceiling = torch.where(is_there, -torch.inf, torch.inf).to(logits.dtype)
    # the minimum leaves entries of padded ids alone, whatever id they were clamped to
    return nullcontext(
        logits.scatter_reduce(1, ids.clamp(0, vocab - 1), ceiling, reduce="amin", include_self=True)
    )
