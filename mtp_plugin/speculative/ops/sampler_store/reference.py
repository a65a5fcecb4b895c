"""Results into the sampler's store in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch
from torch.nn import functional

from mtp_plugin.speculative.step import NO_INPUT, PAD_TOKEN, STATUS_OK


def store_results(
    store: torch.Tensor,
    slots: torch.Tensor,
    new_tokens: torch.Tensor,
    next_new_tokens: torch.Tensor,
    next_draft_tokens: torch.Tensor,
    new_tokens_lens: torch.Tensor,
    status: torch.Tensor | None,
    *,
    max_draft_len: int,
) -> None:
    """As at the door."""
    if status is None:
        status = torch.full_like(new_tokens_lens, STATUS_OK)
    columns = (
        _widened(new_tokens, max_draft_len + 1),
        _widened(next_new_tokens, max_draft_len + 1, NO_INPUT),
        _widened(next_draft_tokens, max_draft_len),
        new_tokens_lens.unsqueeze(1),
        status.unsqueeze(1),
    )
    count = slots.shape[0]
    rows = torch.cat([column[:count].to(torch.int32) for column in columns], dim=1)
    store.index_copy_(0, slots, rows)


def _widened(rows: torch.Tensor, width: int, filling: int = PAD_TOKEN) -> torch.Tensor:
    """``rows`` filled up, or cut, to ``width`` columns."""
    return functional.pad(rows, (0, width - rows.shape[1]), value=filling)
