"""The bookkeeping of a batch on the device, in one launch."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.ops.bookkeeping.contract import (
    AdvancedBatch,
    KVBlockState,
    NextForwardBuffers,
    unwritten_result,
)
from mtp_plugin.ops.bookkeeping.kernel import _advance_decode_batch_kernel
from mtp_plugin.triton_device import expect_reachable

_LANES = 32  # one warp, a request per lane


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
    num_active_requests: int | torch.Tensor | None = None,
    out: AdvancedBatch | tuple[torch.Tensor, ...] | None = None,
) -> AdvancedBatch:
    """As the reference of the same name, in one launch."""
    advanced = unwritten_result(
        input_tokens,
        output_tokens,
        required_logit_indices,
        buffers,
        kv,
        num_decode_requests,
        num_prefill_requests,
        num_speculative_tokens,
        block_size_tokens,
        num_active_requests,
        out,
    )
    num_requests = num_decode_requests + num_prefill_requests
    if num_requests == 0:
        advanced.accepted_tokens_mask.zero_()
        return advanced
    expect_reachable(_advance_decode_batch_kernel, "input_tokens", input_tokens)
    num_tokens = input_tokens.shape[0]
    lanes = num_tokens - num_decode_requests * num_speculative_tokens
    _advance_decode_batch_kernel[(triton.cdiv(lanes, _LANES),)](
        input_tokens_ptr=input_tokens,
        output_tokens_ptr=output_tokens,
        required_logit_indices_ptr=required_logit_indices,
        last_one_indices_ptr=advanced.last_one_indices,
        accepted_mask_ptr=advanced.accepted_tokens_mask,
        sampled_tokens_ptr=buffers.sampled_tokens_buf,
        last_accepted_seq_ptr=buffers.last_accepted_seq_buf,
        accepted_tokens_ptr=buffers.accepted_tokens_per_request,
        accepted_counts_ptr=buffers.accepted_token_counts,
        last_offset_ptr=kv.last_kv_block_offset,
        kv_length_ptr=kv.kv_length_offsets,
        block_count_ptr=kv.kv_block_counts,
        last_block_ptr=kv.last_kv_block_id,
        block_ids_ptr=kv.kv_block_ids,
        blocks_to_release_ptr=advanced.blocks_to_release,
        remove_mask_ptr=advanced.remove_mask,
        accepted_tokens_stride=buffers.accepted_tokens_per_request.stride(0),
        block_ids_stride=kv.kv_block_ids.stride(0),
        max_blocks=kv.kv_block_ids.shape[1],
        num_active=num_requests if num_active_requests is None else num_active_requests,
        num_decode=num_decode_requests,
        num_requests=num_requests,
        num_tokens=num_tokens,
        NUM_DRAFTS=num_speculative_tokens,
        BLOCK_TOKENS=block_size_tokens,
        WIDTH=max(triton.cdiv(num_speculative_tokens, block_size_tokens), 1),
        ACTIVE_ON_DEVICE=isinstance(num_active_requests, torch.Tensor),
        LANES=_LANES,
        num_warps=1,
    )
    return advanced
