"""The KV rewind on the device, in one launch."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.hosts.megatron.ops.kv_rewind.contract import RewoundBlocks
from mtp_plugin.hosts.megatron.ops.kv_rewind.kernel import _rewind_kv_cache_kernel
from mtp_plugin.kernels.launching import expect_reachable

_LANES = 32  # one warp, a request per lane


def rewind_kv_cache(
    accepted_counts: torch.Tensor,
    prefill_status: torch.Tensor,
    last_kv_block_offset: torch.Tensor,
    kv_length_offsets: torch.Tensor,
    kv_block_counts: torch.Tensor,
    last_kv_block_id: torch.Tensor,
    kv_block_ids: torch.Tensor,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor,
    *,
    rewound: RewoundBlocks,
) -> None:
    """As at the door, in one launch."""
    num_requests = accepted_counts.shape[0]
    expect_reachable(_rewind_kv_cache_kernel, "accepted_counts", accepted_counts)
    _rewind_kv_cache_kernel[(triton.cdiv(num_requests, _LANES),)](
        accepted_counts_ptr=accepted_counts,
        prefill_status_ptr=prefill_status,
        last_offset_ptr=last_kv_block_offset,
        kv_length_ptr=kv_length_offsets,
        block_count_ptr=kv_block_counts,
        last_block_ptr=last_kv_block_id,
        block_ids_ptr=kv_block_ids,
        blocks_to_release_ptr=rewound.blocks_to_release,
        remove_mask_ptr=rewound.remove_mask,
        block_ids_stride=kv_block_ids.stride(0),
        max_blocks=kv_block_ids.shape[1],
        num_active=num_active_requests,
        num_requests=num_requests,
        NUM_DRAFTS=num_speculative_tokens,
        BLOCK_TOKENS=block_size_tokens,
        WIDTH=max(triton.cdiv(num_speculative_tokens, block_size_tokens), 1),
        ACTIVE_ON_DEVICE=isinstance(num_active_requests, torch.Tensor),
        LANES=_LANES,
        num_warps=1,
    )
