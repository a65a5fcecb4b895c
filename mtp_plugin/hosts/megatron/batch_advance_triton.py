"""Triton implementation of `batch_advance`: one launch, a request or padding token per lane.

N requests, the D decode requests first; S drafts each; T flat tokens: S+1 per decode request, one
per prefill request, then padding. Blocks of B tokens; a rewind crosses at most WIDTH = ceil(S / B).
Grid [(T - D*S) / 32]; the phases are those of `token_verify`, `next_forward` and `kv_rewind`:

1. Load the KV state of active decode requests first: it arrives while the drafts are compared.
2. Verify: count the leading drafts that equal the output one row before them.
3. Load all else that depends on the count: the next token, its packed row, the block that becomes
   the last one. No entry is written before.
4. Write the last accepted index, the accepted mask, the buffers of the next forward pass, and the
   KV state.
5. For each of WIDTH blocks, newest first: list it, mark it if it is released, and clear its entry.

Lanes of prefill requests accept their only token and rewind nothing; so do decode requests at or
past ``num_active``, except that their drafts are verified. Lanes past the requests clear the mask
of one padding token each. Each lane touches the rows of its own request alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.hosts.megatron.types import AdvancedBatch, KVBlockState, NextForwardBuffers
from mtp_plugin.ops.launching import CachedLaunches, expect_reachable

_LANES = 32  # one warp, a request per lane


# types and constants alone decide which binary runs, see CachedLaunches
@triton.jit(
    do_not_specialize=[
        "accepted_tokens_stride",
        "block_ids_stride",
        "max_blocks",
        "num_active",
        "num_decode",
        "num_requests",
        "num_tokens",
    ],
    do_not_specialize_on_alignment=[
        "input_tokens_ptr",
        "output_tokens_ptr",
        "required_logit_indices_ptr",
        "last_one_indices_ptr",
        "accepted_mask_ptr",
        "sampled_tokens_ptr",
        "last_accepted_seq_ptr",
        "accepted_tokens_ptr",
        "accepted_counts_ptr",
        "last_offset_ptr",
        "kv_length_ptr",
        "block_count_ptr",
        "last_block_ptr",
        "block_ids_ptr",
        "blocks_to_release_ptr",
        "remove_mask_ptr",
        "num_active",
    ],
)
def _advance_decode_batch_kernel(
    # inputs; int32 or int64
    input_tokens_ptr,  # [T]
    output_tokens_ptr,  # [>= T without padding]
    required_logit_indices_ptr,  # [>= T without padding]
    # outputs of the verification
    last_one_indices_ptr,  # [N] int64
    accepted_mask_ptr,  # [T] bool
    # outputs for the next forward pass; int32 or int64
    sampled_tokens_ptr,  # [>= N]
    last_accepted_seq_ptr,  # [>= N]
    accepted_tokens_ptr,  # [>= D, NUM_DRAFTS]
    accepted_counts_ptr,  # [>= D]
    # KV state, updated in place; int32 or int64
    last_offset_ptr,  # [>= N] offset of the last token in its block
    kv_length_ptr,  # [>= N]
    block_count_ptr,  # [>= N]
    last_block_ptr,  # [>= N]
    block_ids_ptr,  # [>= N, max_blocks], -1 where there is none
    # outputs of the rewind
    blocks_to_release_ptr,  # [N, WIDTH], as the last blocks
    remove_mask_ptr,  # [N, WIDTH] bool
    # sizes
    accepted_tokens_stride,
    block_ids_stride,
    max_blocks,  # of a request
    num_active,  # a number, or with ACTIVE_ON_DEVICE a pointer to one, [1] int32 or int64
    num_decode,  # D
    num_requests,  # N
    num_tokens,  # T
    # constants
    NUM_DRAFTS: tl.constexpr,  # S
    BLOCK_TOKENS: tl.constexpr,  # B
    WIDTH: tl.constexpr,  # blocks that a rewind can cross
    ACTIVE_ON_DEVICE: tl.constexpr,
    LANES: tl.constexpr,  # requests per program
):
    """One lane per request; lanes past the requests clear one padding token each."""
    request = tl.program_id(0) * LANES + tl.arange(0, LANES)
    row = request.to(tl.int64)
    is_request = request < num_requests
    is_decode = request < num_decode
    if ACTIVE_ON_DEVICE:
        is_active = is_request & (request < tl.load(num_active))
    else:
        is_active = is_request & (request < num_active)
    rewinds = is_active & is_decode

    # the KV state is loaded first: it arrives while the drafts are compared
    offset = tl.load(last_offset_ptr + request, mask=rewinds, other=0).to(tl.int64)
    length = tl.load(kv_length_ptr + request, mask=rewinds, other=0).to(tl.int64)
    old_count = tl.load(block_count_ptr + request, mask=rewinds, other=0).to(tl.int64)
    old_last = tl.load(last_block_ptr + request, mask=is_active, other=0)

    # verify
    base = tl.where(is_decode, row * (NUM_DRAFTS + 1), row + num_decode * NUM_DRAFTS)
    accepted = is_decode
    matches = tl.full([LANES], 0, tl.int64)
    for j in tl.static_range(NUM_DRAFTS):
        draft = tl.load(input_tokens_ptr + base + 1 + j, mask=is_decode, other=0)
        output = tl.load(output_tokens_ptr + base + j, mask=is_decode, other=0)
        accepted = accepted & (draft == output)
        matches += accepted.to(tl.int64)
    last = base + matches

    # everything else that is read
    sampled = tl.load(output_tokens_ptr + last, mask=is_request, other=0)
    packed_rows = tl.load(required_logit_indices_ptr + last, mask=is_request, other=0)
    rejected = NUM_DRAFTS - matches
    moved = offset - rejected
    # division truncates: only the distance is divided, which is positive
    blocks_back = tl.where(moved < 0, (BLOCK_TOKENS - 1 - moved) // BLOCK_TOKENS, 0)
    new_offset = tl.where(moved < 0, moved + blocks_back * BLOCK_TOKENS, moved % BLOCK_TOKENS)
    crossed = tl.where(rewinds, tl.minimum(blocks_back, WIDTH), 0)
    new_count = old_count - crossed
    block_ids_row_ptr = block_ids_ptr + row * block_ids_stride
    new_entries = tl.minimum(tl.maximum(new_count - 1, 0), max_blocks - 1)
    new_last = tl.load(block_ids_row_ptr + new_entries, mask=crossed > 0, other=0)

    tl.store(last_one_indices_ptr + request, last, mask=is_request)
    tl.store(accepted_mask_ptr + base, is_request, mask=base < num_tokens)
    tl.store(sampled_tokens_ptr + request, sampled, mask=is_request)
    tl.store(last_accepted_seq_ptr + request, packed_rows, mask=is_request)
    tl.store(accepted_counts_ptr + request, matches, mask=is_decode)
    tl.store(last_offset_ptr + request, new_offset, mask=rewinds)
    tl.store(kv_length_ptr + request, length - rejected, mask=rewinds)
    tl.store(block_count_ptr + request, new_count, mask=rewinds)
    tl.store(last_block_ptr + request, new_last, mask=crossed > 0)
    for j in tl.static_range(NUM_DRAFTS):
        tl.store(accepted_mask_ptr + base + 1 + j, j < matches, mask=is_decode)
        # a second read of the draft: the cache still has it
        draft = tl.load(input_tokens_ptr + base + 1 + j, mask=is_decode, other=0)
        target_ptrs = accepted_tokens_ptr + row * accepted_tokens_stride + j
        tl.store(target_ptrs, tl.where(j < matches, draft, -1), mask=is_decode)
    for j in tl.static_range(WIDTH):
        entries = old_count - 1 - j
        inside = (j < crossed) & (entries >= 0) & (entries < max_blocks)
        released = old_last
        if j > 0:
            released = tl.load(block_ids_row_ptr + entries, mask=inside, other=0)
        tl.store(blocks_to_release_ptr + row * WIDTH + j, released, mask=is_request)
        tl.store(remove_mask_ptr + row * WIDTH + j, j < crossed, mask=is_request)
        tl.store(block_ids_row_ptr + entries, -1, mask=inside)


_launches = CachedLaunches(_advance_decode_batch_kernel)


def advance_decode_batch_triton(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    buffers: NextForwardBuffers,
    kv: KVBlockState,
    num_decode_requests: int,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor,
    advanced: AdvancedBatch,
) -> None:
    """One launch."""
    num_requests = advanced.last_one_indices.shape[0]
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
    _launches[(-(-lanes // _LANES),)](
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
