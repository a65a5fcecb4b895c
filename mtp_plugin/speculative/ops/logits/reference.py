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
    positions: torch.Tensor,
) -> AbstractContextManager[torch.Tensor]:
    """As at the door, in a copy."""
    requests = slice(0, layout.num_requests)
    owners, token_index = _drawn_tokens(layout, positions)
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


def _drawn_tokens(layout: StepLayout, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The request that each row of logits belongs to and the absolute index of the token that it
    draws, both [rows] int64."""
    positions, contexts, width = positions.to(torch.int64), layout.num_contexts, layout.step_rows
    last_rows = layout.context_lens.to(torch.int64).cumsum(0) - 1
    offsets = torch.arange(width, device=positions.device)
    first = positions[layout.num_ctx_tokens :: width]
    generation_index = first.unsqueeze(1) + 1 + offsets
    token_index = torch.cat([positions[last_rows] + 1, generation_index.reshape(-1)])
    requests = torch.arange(layout.num_requests, device=positions.device)
    owners = [requests[:contexts], requests[contexts:].repeat_interleave(width)]
    return torch.cat(owners), token_index
