"""Processing of target logits before acceptance, in torch: the CPU path and the oracle."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from mtp_plugin.speculative.step import SlotRows, StepLayout

EDITED_OPTIONS = frozenset({"min_tokens"})
"""Options of a request for which logits are edited here."""


def early_stops_masked(
    layout: StepLayout,
    logits: torch.Tensor,
    slots: SlotRows,
) -> AbstractContextManager[torch.Tensor]:
    """As at the door, in a copy."""
    requests = slice(0, layout.num_requests)
    owners, token_index = _drawn_tokens(layout)
    first = slots.read("prompt_len", requests).to(torch.int64)
    first += slots.read("min_tokens", requests)
    early = token_index < first[owners]
    stop_ids = slots.read("stop_ids", requests).to(torch.int64)[owners]  # [rows, P]
    vocab = logits.shape[1]
    masked = early.unsqueeze(1) & (stop_ids >= 0) & (stop_ids < vocab)
    ceiling = torch.where(masked, -torch.inf, torch.inf).to(logits.dtype)
    # the minimum leaves entries of padded ids alone, whatever id they were clamped to
    return nullcontext(
        logits.scatter_reduce(
            1, stop_ids.clamp(0, vocab - 1), ceiling, reduce="amin", include_self=True
        )
    )


def _drawn_tokens(layout: StepLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """The request that each row of logits belongs to and the absolute index of the token that it
    draws, both [rows] int64."""
    first = layout.drawn_positions("min_tokens").to(torch.int64) + 1
    contexts, device = layout.num_contexts, first.device
    requests = torch.arange(layout.num_requests, device=device)
    owners = torch.cat(
        [requests[:contexts], requests[contexts:].repeat_interleave(layout.step_rows)]
    )
    place = torch.arange(layout.num_logit_rows, device=device) - contexts
    return owners, first[owners] + torch.where(place < 0, 0, place % layout.step_rows)
