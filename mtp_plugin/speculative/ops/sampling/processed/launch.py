"""Processed scores on the device, in one launch."""

from __future__ import annotations

import torch

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.ops.sampling.processed.kernel import processed_kernel
from mtp_plugin.speculative.step import SlotRows

PIECE = 2048
"""Columns that a program reads."""
WARPS = 8


def processed_scores(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    cuts: torch.Tensor,
    forced: torch.Tensor | None,
) -> torch.Tensor:
    """As at the door."""
    expect_reachable(processed_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    scores = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return scores
    num_pieces = -(-vocab // PIECE)
    pools, drafts = slots.pools, rows.drafts
    processed_kernel[(num_rows * num_pieces,)](
        # inputs
        logits,
        cuts if drafts is None else drafts,  # what is not there is never read
        cuts if forced is None else forced,
        slots.table,
        slots.slot_ids,
        cuts if pools is None else pools.bias,
        cuts if pools is None else pools.allowed,
        cuts if pools is None else pools.counts,
        cuts if pools is None else pools.seen,
        cuts,
        # output
        scores,
        # sizes
        rows.num_contexts,
        rows.width,
        vocab,
        num_pieces,
        0 if pools is None else pools.vocab_size,
        logits.stride(0),
        0 if drafts is None else drafts.stride(0),
        0 if forced is None else forced.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        # constants
        PIECE=PIECE,
        HAS_DRAFTS=drafts is not None,
        HAS_FORCED=forced is not None,
        HAS_EDITS=pools is not None,
        num_warps=WARPS,
        **pdl_options(logits.device),
    )
    return scores
