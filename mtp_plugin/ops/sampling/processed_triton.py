"""Triton implementation of `processed`: one launch, after `sample_tokens`.

`processed_scores_kernel`, grid [N * blocks]:

1. Find the row's request. Rows whose request returns no log-probabilities are skipped, and their
   scores stay unwritten.
2. Load the row's truncation, as `sample_tokens` wrote it, and its forced id.
3. Process the values of the block.
4. Write the scores: -(maximum - x) / T of kept tokens and -inf of others; 0 at a forced id alone;
   x - maximum of a greedy row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logit_rows.processing_triton import Pools
from mtp_plugin.ops.logit_rows.rows_triton import GREEDY_BELOW, locate_row
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.sampling.row_triton import (
    LOGPROBS,
    Batch,
    load_forced_id,
    load_truncated_row,
    load_values,
    truncated_scores,
)
from mtp_plugin.ops.step import SlotRows

BLOCK = 2048
"""Columns per program."""
WARPS = 8
UNSPECIALIZED = ["num_contexts", "width", "num_blocks", "pool_vocab", "draft_stride"]
UNSPECIALIZED += ["forced_stride", "table_stride", "slot_stride", "num_slots"]
UNALIGNED = ["draft_ptr", "forced_ptr", "table_ptr", "slot_ptr"]
"""Arguments that differ between batches: no binary is specialized on them."""


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def processed_scores_kernel(
    # inputs
    logits_ptr,  # [N, V] floating
    draft_ptr,  # HAS_DRAFTS: [R - C, >= width - 1] integer
    forced_ptr,  # HAS_FORCED: [N] integer: forced ids, -1: none
    table_ptr,  # [S, W] int32
    slot_ptr,  # [>= R] integer: each request's row of the table
    bias_ptr,  # HAS_PROCESSING: [P, pool_vocab] float32
    allowed_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab) + 1] int32: a bit per id, then a count
    count_ptr,  # HAS_PROCESSING: [P, pool_vocab] int16, unsigned: token counts
    seen_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab)] int32: a bit per id
    truncation_ptr,  # [N, TRUNCATION_SIZE] float32
    # output
    score_ptr,  # [N, V] float32
    # sizes
    num_contexts,  # C
    width,  # rows per generation
    vocab,  # V
    num_blocks,  # of a row
    pool_vocab,  # vocabulary of the pools
    row_stride,
    draft_stride,
    forced_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    # constants
    BLOCK: tl.constexpr,  # columns per program
    HAS_DRAFTS: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (row, block); rows whose request returns no log-probabilities are skipped."""
    grid_dependency_synchronize(PDL)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    block = tl.program_id(0) % num_blocks
    request, offset, slot_row_ptr = locate_row(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride, num_slots
    )
    if tl.load(slot_row_ptr + LOGPROBS) >= 0:
        batch = Batch(
            logits_ptr,
            row_stride,
            vocab,
            logits_ptr,
            truncation_ptr,
            Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab),
        )
        generation = tl.maximum(request - num_contexts, 0).to(tl.int64)
        request_drafts_ptr = draft_ptr + generation * draft_stride
        forced_id = load_forced_id(forced_ptr, row, forced_stride, HAS_FORCED)
        truncated = load_truncated_row(
            batch, row, slot_row_ptr, request_drafts_ptr, offset if HAS_DRAFTS else 0, forced_id
        )
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocab
        is_finite = (truncated.row_max > float("-inf")) & (truncated.row_max < float("inf"))
        if (truncated.temperature < GREEDY_BELOW) & is_finite & (forced_id < 0):
            score = (
                load_values(truncated.logit_row, columns, inside, False, HAS_PROCESSING)
                - truncated.row_max
            )
        else:
            score = truncated_scores(truncated, columns, inside, False, HAS_PROCESSING)
        tl.store(score_ptr + row * vocab + columns, score, mask=inside)


def processed_scores_triton(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    truncation: torch.Tensor,
    forced: torch.Tensor | None,
) -> torch.Tensor:
    """One launch, one program per row and block."""
    expect_reachable(processed_scores_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    scores = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return scores
    num_blocks = -(-vocab // BLOCK)
    pools, drafts = slots.pools, rows.drafts
    processed_scores_kernel[(num_rows * num_blocks,)](
        # inputs
        logits,
        truncation if drafts is None else drafts,  # absent tensors are never read
        truncation if forced is None else forced,
        slots.table,
        slots.slot_ids,
        truncation if pools is None else pools.bias,
        truncation if pools is None else pools.allowed,
        truncation if pools is None else pools.counts,
        truncation if pools is None else pools.seen,
        truncation,
        # output
        scores,
        # sizes
        rows.num_contexts,
        rows.width,
        vocab,
        num_blocks,
        0 if pools is None else pools.vocab_size,
        logits.stride(0),
        0 if drafts is None else drafts.stride(0),
        0 if forced is None else forced.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        slots.table.shape[0],
        # constants
        BLOCK=BLOCK,
        HAS_DRAFTS=drafts is not None,
        HAS_FORCED=forced is not None,
        HAS_PROCESSING=pools is not None,
        num_warps=WARPS,
        **pdl_options(logits.device),
    )
    return scores
