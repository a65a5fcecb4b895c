"""Judging by odds on the device: pieces of all rows, and a launch that finishes generations."""

from __future__ import annotations

from typing import Any

import torch
import triton

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.ops.sampling.contract import CHOICE_COLUMNS, STEP_COLUMN
from mtp_plugin.speculative.ops.sampling.residual.contract import Judgement
from mtp_plugin.speculative.ops.sampling.residual.drafts_kernel import FOUND
from mtp_plugin.speculative.ops.sampling.residual.kernel import (
    finish_kernel,
    keep_kernel,
    piece_kernel,
)
from mtp_plugin.speculative.step import SlotRows

PIECE = 2048
"""Columns that a program reads."""
WARPS = 8


def keep_draft_probs(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    cuts: torch.Tensor,
    draft_probs: torch.Tensor,
    *,
    vocab_ids: torch.Tensor | None,
) -> None:
    """As at the door."""
    expect_reachable(keep_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    num_pieces = -(-vocab // PIECE)
    drafts = rows.drafts
    keep_kernel[(num_rows * num_pieces,)](
        logits,
        cuts if vocab_ids is None else vocab_ids,  # what is not there is never read
        cuts if drafts is None else drafts,
        slots.table,
        slots.slot_ids,
        *_pools(slots, cuts),
        cuts,
        draft_probs,
        rows.column,
        slots.columns.offset(CHOICE_COLUMNS[1].name),
        vocab,
        num_pieces,
        0 if slots.pools is None else slots.pools.vocab_size,
        logits.stride(0),
        0 if drafts is None else drafts.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        draft_probs.shape[1],
        draft_probs.shape[2],
        PIECE=PIECE,
        HAS_IDS=vocab_ids is not None,
        HAS_DRAFTS=drafts is not None,
        HAS_EDITS=slots.pools is not None,
        num_warps=WARPS,
        **pdl_options(logits.device),
    )


def judge(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    cuts: torch.Tensor,
    choices: torch.Tensor,
    *,
    draft_lens: torch.Tensor | None,
    forced_ids: torch.Tensor | None,
    by_block: bool,
) -> Judgement:
    """As at the door."""
    expect_reachable(piece_kernel, "logits", logits)
    device, vocab = logits.device, logits.shape[1]
    count, width = rows.num_requests - rows.num_contexts, rows.width
    num_pieces = -(-vocab // PIECE)
    drafts = draft_tokens.reshape(count, width - 1)
    if width > 1 and drafts.stride(1) != 1:
        drafts = drafts.contiguous()
    float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    found = torch.empty(count * width * num_pieces, FOUND.value, **float32)
    odds = torch.empty(count * width, 2, **float32)
    matches = torch.empty(count, dtype=torch.int32, device=device)
    chosen = torch.empty(rows.num_rows, dtype=torch.int32, device=device)
    judged_at, drafted_at = (slots.columns.offset(column.name) for column in CHOICE_COLUMNS)
    step_at = slots.columns.offset(STEP_COLUMN.name)
    piece_kernel[(count * width * num_pieces,)](
        logits,
        rows.positions,
        drafts if drafts.numel() else choices,  # what is not there is never read
        choices if draft_lens is None else draft_lens,
        choices if forced_ids is None else forced_ids,
        slots.table,
        slots.slot_ids,
        *_pools(slots, cuts),
        cuts,
        cuts if draft_probs is None else draft_probs,
        # outputs
        found,
        odds,
        rows.num_contexts,
        width,
        judged_at,
        drafted_at,
        step_at,
        vocab,
        num_pieces,
        0 if slots.pools is None else slots.pools.vocab_size,
        logits.stride(0),
        rows.positions.stride(0),
        drafts.stride(0),
        0 if draft_lens is None else draft_lens.stride(0),
        0 if forced_ids is None else forced_ids.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        0 if draft_probs is None else draft_probs.shape[1],
        PIECE=PIECE,
        HAS_LENGTHS=draft_lens is not None,
        HAS_FORCED=forced_ids is not None,
        HAS_PROBS=draft_probs is not None,
        HAS_EDITS=slots.pools is not None,
        HAS_BLOCK=by_block,
        num_warps=WARPS,
        **pdl_options(device),
    )
    finish_kernel[(count,)](
        rows.positions,
        slots.slot_ids,
        choices,
        found,
        odds,
        slots.table,
        # outputs
        matches,
        chosen,
        rows.num_contexts,
        width,
        judged_at,
        step_at,
        num_pieces,
        rows.positions.stride(0),
        choices.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        ROWS=triton.next_power_of_2(width),
        PIECES=triton.next_power_of_2(num_pieces),
        HAS_BLOCK=by_block,
        num_warps=1,
        **pdl_options(device),
    )
    return Judgement(matches, chosen)


def _pools(slots: SlotRows, missing: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What edits read; ``missing`` where there is none."""
    pools = slots.pools
    if pools is None:
        return (missing,) * 4
    return pools.bias, pools.allowed, pools.counts, pools.seen
