"""The bookkeeping of a batch on the device, in one launch."""

from __future__ import annotations

import torch

from mtp_plugin.hosts.megatron.ops.bookkeeping.contract import (
    AdvancedBatch,
    KVBlockState,
    NextForwardBuffers,
)
from mtp_plugin.hosts.megatron.ops.bookkeeping.kernel import _advance_decode_batch_kernel
from mtp_plugin.kernels.launching import CachedLaunches, expect_reachable

_LANES = 32  # one warp, a request per lane
_launches = CachedLaunches(_advance_decode_batch_kernel)


def advance_decode_batch(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    buffers: NextForwardBuffers,
    kv: KVBlockState,
    *,
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor,
    advanced: AdvancedBatch,
) -> None:
    """As at the door, in one launch."""
    num_requests = num_decode_requests + num_prefill_requests
    expect_reachable(_advance_decode_batch_kernel, "input_tokens", input_tokens)
    num_tokens = input_tokens.shape[0]
    lanes = num_tokens - num_decode_requests * num_speculative_tokens
    table = kv.kv_block_ids
    tensors = (
        input_tokens,
        output_tokens,
        required_logit_indices,
        *advanced[:2],
        buffers.sampled_tokens_buf,
        buffers.last_accepted_seq_buf,
        buffers.accepted_tokens_per_request,
        buffers.accepted_token_counts,
        kv.last_kv_block_offset,
        kv.kv_length_offsets,
        kv.kv_block_counts,
        kv.last_kv_block_id,
        table,
        *advanced[2:],
    )
    on_device = isinstance(num_active_requests, torch.Tensor)
    constants = (
        num_speculative_tokens,
        block_size_tokens,
        max(-(-num_speculative_tokens // block_size_tokens), 1),
        on_device,
        _LANES,
    )
    types = [tensor.dtype for tensor in tensors]
    if isinstance(num_active_requests, torch.Tensor):
        types.append(num_active_requests.dtype)
    _launches.launch(
        (input_tokens.device, *types, *constants),
        -(-lanes // _LANES),
        *tensors,
        buffers.accepted_tokens_per_request.stride(0),
        table.stride(0),
        table.shape[1],
        num_active_requests,
        num_decode_requests,
        num_requests,
        num_tokens,
        *constants,
        num_warps=1,
    )
