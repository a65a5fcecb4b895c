"""Triton implementation of `step_inputs`: one launch, one program per generation (grid [G]).

1. Load the generation's row of the table: length, KV capacity, K+1 inputs.
2. With a store, if the last result is only there, take the inputs from it and add its number of
   tokens to the length.
3. The number of drafts is limited by the row's limit and by the room in the KV. Inputs after them
   are 0, a token that an embedding takes, and so are inputs of absent drafts (-1).
4. Write ids, drafts, positions (limited to the last one), lengths, limits and the state slot.

A padding row is computed like others, from the dummy row that the table holds for it; its writes of
KV are limited by its own capacity. Each program writes to its own generation alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mtp_plugin.hosts.embedded.row_table import UploadedRows
from mtp_plugin.hosts.embedded.step_inputs import LastResults, StepInputs
from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options


@triton.jit
def generation_inputs_kernel(
    # rows of the table, all int32 with one stride
    token_ptr,  # [G, >= WIDTH]: inputs
    length_ptr,  # [G] committed tokens before the inputs
    limit_ptr,  # [G] drafts that may be verified
    capacity_ptr,  # [G] KV rows that the request may use
    pending_ptr,  # [G] 1: the last result is only in the store
    seq_slot_ptr,  # [G] index in the store
    state_slot_ptr,  # [G]
    # store, with HAS_STORE
    next_ptr,  # [>= WIDTH, S] int32: next inputs
    num_new_ptr,  # [S] int32: number of tokens of the last step
    # outputs
    id_out_ptr,  # [G, WIDTH] int32
    draft_out_ptr,  # [G, WIDTH - 1] int32
    position_out_ptr,  # [G, WIDTH] int64
    draft_len_out_ptr,  # [G] int32
    seq_len_out_ptr,  # [G] int32
    kv_len_out_ptr,  # [G] int32
    write_limit_out_ptr,  # [G] int32
    capacity_out_ptr,  # [G] int32
    state_slot_out_ptr,  # [G] int64
    # sizes
    row_stride,
    next_column_stride,
    next_slot_stride,
    num_new_stride,
    max_position,
    # constants
    WIDTH: tl.constexpr,  # K+1
    COLUMNS: tl.constexpr,  # a power of two >= WIDTH
    HAS_STORE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per generation: its K+1 inputs, their positions, its lengths and limits."""
    grid_dependency_synchronize(PDL)
    generation = tl.program_id(0).to(tl.int64)
    row = generation * row_stride
    columns = tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    length = tl.load(length_ptr + row)
    capacity = tl.load(capacity_ptr + row)
    ids = tl.load(token_ptr + row + columns, mask=inside, other=0)
    if HAS_STORE:
        slot = tl.load(seq_slot_ptr + row).to(tl.int64)
        is_pending = tl.load(pending_ptr + row) > 0
        following = tl.load(
            next_ptr + slot * next_slot_stride + columns * next_column_stride, mask=inside, other=0
        )
        ids = tl.where(is_pending, following, ids)
        length += tl.where(is_pending, tl.load(num_new_ptr + slot * num_new_stride), 0)
    room = tl.maximum(capacity - 1 - length, 0)
    draft_len = tl.minimum(tl.load(limit_ptr + row), room)
    ids = tl.where(columns > draft_len, 0, ids)
    tl.store(id_out_ptr + generation * WIDTH + columns, tl.maximum(ids, 0), mask=inside)
    is_draft = inside & (columns > 0)
    tl.store(draft_out_ptr + generation * (WIDTH - 1) + columns - 1, ids, mask=is_draft)
    positions = tl.minimum(length + columns, max_position).to(tl.int64)
    tl.store(position_out_ptr + generation * WIDTH + columns, positions, mask=inside)
    tl.store(draft_len_out_ptr + generation, draft_len)
    tl.store(seq_len_out_ptr + generation, WIDTH)
    tl.store(kv_len_out_ptr + generation, length + WIDTH)
    tl.store(write_limit_out_ptr + generation, tl.minimum(length + draft_len + 1, capacity))
    tl.store(capacity_out_ptr + generation, capacity)
    tl.store(state_slot_out_ptr + generation, tl.load(state_slot_ptr + row).to(tl.int64))


def generation_inputs_triton(
    rows: UploadedRows, previous: LastResults | None, *, draft_len: int, max_seq_len: int
) -> StepInputs:
    """One launch, one program per generation."""
    expect_reachable(generation_inputs_kernel, "rows", rows.tokens)
    count, width = rows.tokens.shape[0], draft_len + 1
    int32: dict[str, Any] = {"dtype": torch.int32, "device": rows.tokens.device}
    int64: dict[str, Any] = {"dtype": torch.int64, "device": rows.tokens.device}
    inputs = StepInputs(
        input_ids=torch.empty(count * width, **int32),
        positions=torch.empty(count * width, **int64),
        seq_lens=torch.empty(count, **int32),
        kv_lens=torch.empty(count, **int32),
        write_limit=torch.empty(count, **int32),
        capacity=torch.empty(count, **int32),
        draft_tokens=torch.empty(count * draft_len, **int32),
        draft_lens=torch.empty(count, **int32),
        state_slot=torch.empty(count, **int64),
    )
    next_tokens = inputs.input_ids if previous is None else previous.new_tokens
    num_new = inputs.draft_lens if previous is None else previous.new_tokens_lens
    if count:
        generation_inputs_kernel[(count,)](
            rows.tokens,
            rows.length,
            rows.draft_limit,
            rows.capacity,
            rows.is_pending,
            rows.seq_slot,
            rows.state_slot,
            next_tokens,
            num_new,
            inputs.input_ids,
            inputs.draft_tokens,
            inputs.positions,
            inputs.draft_lens,
            inputs.seq_lens,
            inputs.kv_lens,
            inputs.write_limit,
            inputs.capacity,
            inputs.state_slot,
            rows.tokens.stride(0),
            width if previous is None else next_tokens.stride(0),
            1 if previous is None else next_tokens.stride(1),
            num_new.stride(0),
            max_seq_len - 1,
            WIDTH=width,
            COLUMNS=triton.next_power_of_2(width),
            HAS_STORE=previous is not None,
            num_warps=1,
            **pdl_options(rows.tokens.device),
        )
    return inputs
