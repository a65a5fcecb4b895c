"""Triton implementation of `kv_rewind`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.hosts.megatron.types import KVBlockState, RewoundBlocks
from mtp_plugin.ops.launching import expect_reachable

_LANES = 32  # one warp, a request per lane


@triton.jit(do_not_specialize=["block_ids_stride", "max_blocks", "num_active", "num_requests"])
def _rewind_kv_cache_kernel(
    accepted_counts_ptr,  # [N]
    prefill_status_ptr,  # [N]
    last_offset_ptr,  # [N] changed
    kv_length_ptr,  # [N] changed
    block_count_ptr,  # [N] changed
    last_block_ptr,  # [N] changed
    block_ids_ptr,  # [N, max_blocks] changed
    blocks_to_release_ptr,  # [N, WIDTH]
    remove_mask_ptr,  # [N, WIDTH] bool
    block_ids_stride,
    max_blocks,
    num_active,  # a number, or with ACTIVE_ON_DEVICE a pointer to one
    num_requests,
    NUM_DRAFTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,  # blocks that a rewind can cross
    ACTIVE_ON_DEVICE: tl.constexpr,
    LANES: tl.constexpr,
):
    # one lane per request
    request = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_request = request < num_requests
    if ACTIVE_ON_DEVICE:
        active = is_request & (request < tl.load(num_active))
    else:
        active = is_request & (request < num_active)
    row = request.to(tl.int64)
    status = tl.load(prefill_status_ptr + request, mask=active, other=1).to(tl.int32)
    decode = active & (status == 0)
    accepted = tl.load(accepted_counts_ptr + request, mask=decode, other=0).to(tl.int64)
    offset = tl.load(last_offset_ptr + request, mask=decode, other=0).to(tl.int64)
    length = tl.load(kv_length_ptr + request, mask=decode, other=0).to(tl.int64)
    old_count = tl.load(block_count_ptr + request, mask=decode, other=0).to(tl.int64)
    old_last = tl.load(last_block_ptr + request, mask=active, other=0)

    rejected = NUM_DRAFTS - accepted
    moved = offset - rejected
    # division truncates: only the distance is divided, which is positive
    blocks_back = tl.where(moved < 0, (BLOCK_TOKENS - 1 - moved) // BLOCK_TOKENS, 0)
    new_offset = tl.where(moved < 0, moved + blocks_back * BLOCK_TOKENS, moved % BLOCK_TOKENS)
    crossed = tl.where(decode, tl.minimum(blocks_back, WIDTH), 0)
    new_count = old_count - crossed

    block_ids_row = block_ids_ptr + row * block_ids_stride
    new_entry = tl.minimum(tl.maximum(new_count - 1, 0), max_blocks - 1)
    new_last = tl.load(block_ids_row + new_entry, mask=crossed > 0, other=0)
    for j in tl.static_range(WIDTH):
        entry = old_count - 1 - j
        inside = (j < crossed) & (entry >= 0) & (entry < max_blocks)
        released = old_last
        if j > 0:
            released = tl.load(block_ids_row + entry, mask=inside, other=0)
        tl.store(blocks_to_release_ptr + row * WIDTH + j, released, mask=is_request)
        tl.store(remove_mask_ptr + row * WIDTH + j, j < crossed, mask=is_request)
        tl.store(block_ids_row + entry, -1, mask=inside)

    tl.store(last_offset_ptr + request, new_offset, mask=decode)
    tl.store(kv_length_ptr + request, length - rejected, mask=decode)
    tl.store(block_count_ptr + request, new_count, mask=decode)
    tl.store(last_block_ptr + request, new_last, mask=crossed > 0)


def rewind_kv_cache_triton(
    accepted_counts: torch.Tensor,
    prefill_status: torch.Tensor,
    kv: KVBlockState,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor,
    rewound: RewoundBlocks,
) -> None:
    """One launch."""
    num_requests = accepted_counts.shape[0]
    expect_reachable(_rewind_kv_cache_kernel, "accepted_counts", accepted_counts)
    _rewind_kv_cache_kernel[(triton.cdiv(num_requests, _LANES),)](
        accepted_counts_ptr=accepted_counts,
        prefill_status_ptr=prefill_status,
        last_offset_ptr=kv.last_kv_block_offset,
        kv_length_ptr=kv.kv_length_offsets,
        block_count_ptr=kv.kv_block_counts,
        last_block_ptr=kv.last_kv_block_id,
        block_ids_ptr=kv.kv_block_ids,
        blocks_to_release_ptr=rewound.blocks_to_release,
        remove_mask_ptr=rewound.remove_mask,
        block_ids_stride=kv.kv_block_ids.stride(0),
        max_blocks=kv.kv_block_ids.shape[1],
        num_active=num_active_requests,
        num_requests=num_requests,
        NUM_DRAFTS=num_speculative_tokens,
        BLOCK_TOKENS=block_size_tokens,
        WIDTH=max(triton.cdiv(num_speculative_tokens, block_size_tokens), 1),
        ACTIVE_ON_DEVICE=isinstance(num_active_requests, torch.Tensor),
        LANES=_LANES,
        num_warps=1,
    )
