"""Triton implementation of `sampler_store`."""

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
        "emitted_row_stride",
        "emitted_stride",
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
        "emitted_ptr",
        "following_ptr",
        "draft_ptr",
        "len_ptr",
        "status_ptr",
    ],
)
def store_results_kernel(
    store_ptr,  # [S, 3 * MOST + 4]
    slot_ptr,  # [R]
    emitted_ptr,  # [R, DRAFTED + 1]
    following_ptr,  # [R, DRAFTED + 1]
    draft_ptr,  # [R, DRAFTED]
    len_ptr,  # [R]
    status_ptr,  # [R]
    store_stride,
    emitted_row_stride,
    emitted_stride,
    following_row_stride,
    following_stride,
    draft_row_stride,
    draft_stride,
    len_stride,
    status_stride,
    MOST: tl.constexpr,
    DRAFTED: tl.constexpr,
    HAS_STATUS: tl.constexpr,
    OK: tl.constexpr,
    PAD: tl.constexpr,
    NO_INPUT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per request: write its row of the store."""
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    following = column - (MOST + 1)
    draft = following - (MOST + 1)
    emitted = tl.load(
        emitted_ptr + request * emitted_row_stride + column * emitted_stride,
        mask=column <= DRAFTED,
        other=PAD,
    ).to(tl.int32)
    value = emitted
    is_following = (following >= 0) & (following <= DRAFTED)
    value = tl.where(
        following >= 0,
        tl.load(
            following_ptr + request * following_row_stride + following * following_stride,
            mask=is_following,
            other=NO_INPUT,
        ).to(tl.int32),
        value,
    )
    value = tl.where(
        draft >= 0,
        tl.load(
            draft_ptr + request * draft_row_stride + draft * draft_stride,
            mask=(draft >= 0) & (draft < DRAFTED),
            other=PAD,
        ).to(tl.int32),
        value,
    )
    count = tl.load(len_ptr + request * len_stride).to(tl.int32)
    value = tl.where(draft == MOST, count, value)
    status = OK
    if HAS_STATUS:
        status = tl.load(status_ptr + request * status_stride).to(tl.int32)
    value = tl.where(draft == MOST + 1, status, value)
    row = store_ptr + tl.load(slot_ptr + request) * store_stride
    tl.store(row + column, value, mask=draft <= MOST + 1)


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
    _launches.launch(
        (store.device, *(tensor.dtype for tensor in tensors), *constants),
        slots.shape[0],
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
