"""Results into the sampler's store in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch
from torch.nn import functional

from mtp_plugin.speculative.ops.sampler_store.contract import check_results
from mtp_plugin.speculative.step import PAD_TOKEN, STATUS_OK


def store_results(
    store: torch.Tensor,
    slots: torch.Tensor,
    new_tokens: torch.Tensor,
    next_new_tokens: torch.Tensor,
    next_draft_tokens: torch.Tensor,
    new_tokens_lens: torch.Tensor,
    status: torch.Tensor | None,
) -> None:
    """Write the results of a step's requests into their rows of the store; no other row changes.

    A row holds the K+1 emitted tokens, the K+1 next inputs, the K next drafts, how many tokens were
    emitted, and the status. What a step with fewer drafts left out is padding; drafts beyond K are
    dropped, so that no later step verifies, and emits, more than a row holds.

    Args:
        store: [S, 3K+4] int32, written.
        slots: [R] int64, all different, 0..S-1: the row of each request.
        new_tokens, next_new_tokens: [>= R, k+1] integers, any strides; further rows are padding
            and are left alone, here and below.
        next_draft_tokens: [>= R, k].
        new_tokens_lens: [>= R].
        status: [>= R]; None: every request is well.

    Raises:
        TensorContractError: tensors of other shapes, dtypes or devices.
    """
    results = (new_tokens, next_new_tokens, next_draft_tokens, new_tokens_lens, status)
    draft_len, _ = check_results(store, slots, *results)
    count = slots.shape[0]
    if status is None:
        status = torch.full_like(new_tokens_lens, STATUS_OK)
    columns = (
        _widened(new_tokens, draft_len + 1),
        _widened(next_new_tokens, draft_len + 1),
        _widened(next_draft_tokens, draft_len),
        new_tokens_lens.unsqueeze(1),
        status.unsqueeze(1),
    )
    rows = torch.cat([column[:count].to(torch.int32) for column in columns], dim=1)
    store.index_copy_(0, slots, rows)


def _widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    """``rows`` filled up, or cut, to ``width`` columns."""
    return functional.pad(rows, (0, width - rows.shape[1]), value=PAD_TOKEN)
