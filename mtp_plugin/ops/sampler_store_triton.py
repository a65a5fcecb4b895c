"""Triton implementation of `sampler_store`: one launch, one program per request (grid [R]).

With room for K drafts in the store and k drafts in the step, a program computes the 3K+4 columns of
its request's row at once, a value per lane:

1. Columns 0 to K: the output tokens; those after the step's k+1 are PAD_TOKEN.
2. The next K+1: the next inputs; those after the step's k+1 are NO_INPUT, a valid token id.
3. The next K: the next drafts; those after the step's k are PAD_TOKEN.
4. The last two: the number of output tokens, and the status (STATUS_OK if the step has none).
5. Store the row at the request's slot. Slots differ, so no two programs write the same row.

A lane loads only its own section. Rows of the inputs from R on are padding and have no program;
drafts and tokens beyond K have no column.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.launching import CachedLaunches, expect_reachable
from mtp_plugin.ops.sampler_store import ResultTensors
from mtp_plugin.ops.step import NO_INPUT, PAD_TOKEN, STATUS_OK


# types and constants alone decide which binary runs, see CachedLaunches
@triton.jit(
    do_not_specialize=[
        "store_stride",
        "token_row_stride",
        "token_stride",
        "following_row_stride",
        "following_stride",
        "draft_row_stride",
        "draft_stride",
        "len_stride",
        "status_stride",
    ],
    do_not_specialize_on_alignment=[
        "store_ptr",
        "slot_ptr",
        "token_ptr",
        "following_ptr",
        "draft_ptr",
        "len_ptr",
        "status_ptr",
    ],
)
def store_results_kernel(
    # output
    store_ptr,  # [S, 3 * MAX_DRAFT_LEN + 4] int32
    # inputs
    slot_ptr,  # [R] int64
    token_ptr,  # [>= R, k+1] integer: output tokens
    following_ptr,  # [>= R, k+1] integer: inputs of the next step
    draft_ptr,  # [>= R, k] integer: drafts of the next step
    len_ptr,  # [>= R] integer: number of output tokens
    status_ptr,  # HAS_STATUS: [>= R] integer
    # sizes
    store_stride,
    token_row_stride,
    token_stride,
    following_row_stride,
    following_stride,
    draft_row_stride,
    draft_stride,
    len_stride,
    status_stride,
    # constants
    MAX_DRAFT_LEN: tl.constexpr,  # K of the store
    DRAFT_LEN: tl.constexpr,  # the lower of k and K
    HAS_STATUS: tl.constexpr,
    OK: tl.constexpr,
    PAD: tl.constexpr,
    NO_INPUT: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two >= 3 * MAX_DRAFT_LEN + 4
):
    """One program per request: write its row of the store."""
    request = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    following = columns - (MAX_DRAFT_LEN + 1)
    draft = following - (MAX_DRAFT_LEN + 1)
    tokens = tl.load(
        token_ptr + request * token_row_stride + columns * token_stride,
        mask=columns <= DRAFT_LEN,
        other=PAD,
    ).to(tl.int32)
    values = tokens
    is_following = (following >= 0) & (following <= DRAFT_LEN)
    values = tl.where(
        following >= 0,
        tl.load(
            following_ptr + request * following_row_stride + following * following_stride,
            mask=is_following,
            other=NO_INPUT,
        ).to(tl.int32),
        values,
    )
    values = tl.where(
        draft >= 0,
        tl.load(
            draft_ptr + request * draft_row_stride + draft * draft_stride,
            mask=(draft >= 0) & (draft < DRAFT_LEN),
            other=PAD,
        ).to(tl.int32),
        values,
    )
    count = tl.load(len_ptr + request * len_stride).to(tl.int32)
    values = tl.where(draft == MAX_DRAFT_LEN, count, values)
    status = OK
    if HAS_STATUS:
        status = tl.load(status_ptr + request * status_stride).to(tl.int32)
    values = tl.where(draft == MAX_DRAFT_LEN + 1, status, values)
    row_ptr = store_ptr + tl.load(slot_ptr + request) * store_stride
    tl.store(row_ptr + columns, values, mask=draft <= MAX_DRAFT_LEN + 1)


_launches = CachedLaunches(store_results_kernel)


def store_results_triton(
    store: torch.Tensor, slots: torch.Tensor, results: ResultTensors, max_draft_len: int
) -> None:
    """One launch, one program per request."""
    expect_reachable(store_results_kernel, "store", store)
    slots = slots.contiguous()
    status = results.new_tokens_lens if results.status is None else results.status
    tensors = (
        store,
        slots,
        results.new_tokens,
        results.next_new_tokens,
        results.next_draft_tokens,
        results.new_tokens_lens,
        status,
    )
    constants = (
        max_draft_len,
        min(results.next_draft_tokens.shape[1], max_draft_len),
        results.status is not None,
        STATUS_OK,
        PAD_TOKEN,
        NO_INPUT,
        triton.next_power_of_2(3 * max_draft_len + 4),
    )
    _launches[(slots.shape[0],)](
        *tensors,
        store.stride(0),
        *results.new_tokens.stride(),
        *results.next_new_tokens.stride(),
        *results.next_draft_tokens.stride(),
        *results.new_tokens_lens.stride(),
        *status.stride(),
        *constants,
        num_warps=1,
    )
