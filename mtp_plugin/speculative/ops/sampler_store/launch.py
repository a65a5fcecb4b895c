"""The result store on the device, in one launch."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.kernels.launching import CachedLaunches, expect_reachable
from mtp_plugin.speculative.ops.sampler_store.contract import check_results
from mtp_plugin.speculative.ops.sampler_store.kernel import store_results_kernel
from mtp_plugin.speculative.step import PAD_TOKEN, STATUS_OK

_launches = CachedLaunches(store_results_kernel)


def store_results(
    store: torch.Tensor,
    slots: torch.Tensor,
    new_tokens: torch.Tensor,
    next_new_tokens: torch.Tensor,
    next_draft_tokens: torch.Tensor,
    new_tokens_lens: torch.Tensor,
    status: torch.Tensor | None,
) -> None:
    """As the reference, in one launch."""
    results = (new_tokens, next_new_tokens, next_draft_tokens, new_tokens_lens, status)
    most, drafted = check_results(store, slots, *results)
    expect_reachable(store_results_kernel, "store", store)
    if slots.shape[0] == 0:
        return
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
        most,
        drafted,
        has_status,
        STATUS_OK,
        PAD_TOKEN,
        triton.next_power_of_2(3 * most + 4),
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
