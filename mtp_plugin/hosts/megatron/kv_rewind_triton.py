"""Triton implementation of `kv_rewind`: one launch, a request per lane of a warp (grid [N / 32]).

N requests; S drafts each; blocks of B tokens; a rewind crosses at most WIDTH = ceil(S / B) blocks.

1. Load the state of active decode requests, and the last block of active ones.
2. The last token moves back by the number of rejected drafts: compute its offset, and how many
   blocks it crosses. Only positive numbers are divided.
3. Load the block that becomes the last one, before any entry is cleared.
4. For each of WIDTH blocks, newest first: list it, mark it if it is released, and clear its entry.
5. Write offset, length, block count and last block.

Prefill requests and requests at or past ``num_active`` (padding) cross no block and are not
written; their rows of the result mark nothing. Each lane touches the rows of its own request alone.
"""

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
    # inputs
    accepted_counts_ptr,  # [N] int32 or int64: accepted drafts
    prefill_status_ptr,  # [>= N] int32, int64 or bool: 0 for a decode request
    # updated in place; int32 or int64
    last_offset_ptr,  # [>= N] offset of the last token in its block
    kv_length_ptr,  # [>= N]
    block_count_ptr,  # [>= N]
    last_block_ptr,  # [>= N]
    block_ids_ptr,  # [>= N, max_blocks], -1 where there is none
    # outputs
    blocks_to_release_ptr,  # [N, WIDTH], as the last blocks
    remove_mask_ptr,  # [N, WIDTH] bool
    # sizes
    block_ids_stride,
    max_blocks,  # of a request
    num_active,  # a number, or with ACTIVE_ON_DEVICE a pointer to one, [1] int32 or int64
    num_requests,  # N
    # constants
    NUM_DRAFTS: tl.constexpr,  # S
    BLOCK_TOKENS: tl.constexpr,  # B
    WIDTH: tl.constexpr,  # blocks that a rewind can cross
    ACTIVE_ON_DEVICE: tl.constexpr,
    LANES: tl.constexpr,  # requests per program
):
    """One lane per request: rewind its KV by its rejected drafts."""
    request = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_request = request < num_requests
    if ACTIVE_ON_DEVICE:
        is_active = is_request & (request < tl.load(num_active))
    else:
        is_active = is_request & (request < num_active)
    row = request.to(tl.int64)
    status = tl.load(prefill_status_ptr + request, mask=is_active, other=1).to(tl.int32)
    is_decode = is_active & (status == 0)
    accepted = tl.load(accepted_counts_ptr + request, mask=is_decode, other=0).to(tl.int64)
    offset = tl.load(last_offset_ptr + request, mask=is_decode, other=0).to(tl.int64)
    length = tl.load(kv_length_ptr + request, mask=is_decode, other=0).to(tl.int64)
    old_count = tl.load(block_count_ptr + request, mask=is_decode, other=0).to(tl.int64)
    old_last = tl.load(last_block_ptr + request, mask=is_active, other=0)

    rejected = NUM_DRAFTS - accepted
    moved = offset - rejected
    # division truncates: only the distance is divided, which is positive
    blocks_back = tl.where(moved < 0, (BLOCK_TOKENS - 1 - moved) // BLOCK_TOKENS, 0)
    new_offset = tl.where(moved < 0, moved + blocks_back * BLOCK_TOKENS, moved % BLOCK_TOKENS)
    crossed = tl.where(is_decode, tl.minimum(blocks_back, WIDTH), 0)
    new_count = old_count - crossed

    block_ids_row_ptr = block_ids_ptr + row * block_ids_stride
    new_entries = tl.minimum(tl.maximum(new_count - 1, 0), max_blocks - 1)
    new_last = tl.load(block_ids_row_ptr + new_entries, mask=crossed > 0, other=0)
    for j in tl.static_range(WIDTH):
        entries = old_count - 1 - j
        inside = (j < crossed) & (entries >= 0) & (entries < max_blocks)
        released = old_last
        if j > 0:
            released = tl.load(block_ids_row_ptr + entries, mask=inside, other=0)
        tl.store(blocks_to_release_ptr + row * WIDTH + j, released, mask=is_request)
        tl.store(remove_mask_ptr + row * WIDTH + j, j < crossed, mask=is_request)
        tl.store(block_ids_row_ptr + entries, -1, mask=inside)

    tl.store(last_offset_ptr + request, new_offset, mask=is_decode)
    tl.store(kv_length_ptr + request, length - rejected, mask=is_decode)
    tl.store(block_count_ptr + request, new_count, mask=is_decode)
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
