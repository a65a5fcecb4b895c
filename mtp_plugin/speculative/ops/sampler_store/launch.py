"""The result store on the device, in one launch."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.kernels.launching import CachedLaunches, expect_reachable
from mtp_plugin.speculative.ops.sampler_store.kernel import store_results_kernel
from mtp_plugin.speculative.step import NO_INPUT, PAD_TOKEN, STATUS_OK

_launches = CachedLaunches(store_results_kernel)


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
    """As at the door, in one launch."""
    expect_reachable(store_results_kernel, "store", store)
    slots = slots.contiguous()
    has_status = status is not None
    if status is None:
        status = new_tokens_lens
    tensors = (
        store,
        slots,
        new_tokens,
        next_new_tokens,
        next_draft_tokens,
        new_tokens_lens,
        status,
    )
    constants = (
        max_draft_len,
        min(next_draft_tokens.shape[1], max_draft_len),
        has_status,
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
        *new_tokens.stride(),
        *next_new_tokens.stride(),
        *next_draft_tokens.stride(),
        *new_tokens_lens.stride(),
        *status.stride(),
        *constants,
        num_warps=1,
    )
