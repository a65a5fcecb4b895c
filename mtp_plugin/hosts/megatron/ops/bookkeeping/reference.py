"""The bookkeeping of a batch in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch

from mtp_plugin.hosts.megatron.ops.bookkeeping.contract import (
    AdvancedBatch,
    KVBlockState,
    NextForwardBuffers,
)
from mtp_plugin.speculative.step import PAD_TOKEN


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
    """As at the door."""
    num_requests = num_decode_requests + num_prefill_requests
    active = torch.arange(num_requests, device=input_tokens.device) < num_active_requests
    width = num_speculative_tokens + 1
    decode_len = num_decode_requests * width
    read = input_tokens[:decode_len].view(num_decode_requests, width)
    emitted = output_tokens[:decode_len].view(num_decode_requests, width)
    stands = (read[:, 1:] == emitted[:, :-1]).to(torch.int64).cumprod(dim=1)  # [D, S]
    matches = stands.sum(dim=1)

    _write_verified(advanced, stands, matches)
    last = advanced.last_one_indices
    buffers.sampled_tokens_buf[:num_requests] = output_tokens[last]
    buffers.last_accepted_seq_buf[:num_requests] = required_logit_indices[last]
    drafts = read[:, 1:].masked_fill(stands == 0, PAD_TOKEN)
    buffers.accepted_tokens_per_request[:num_decode_requests] = drafts
    buffers.accepted_token_counts[:num_decode_requests] = matches
    _rewind(advanced, kv, num_speculative_tokens - matches, active, block_size_tokens)


def _write_verified(advanced: AdvancedBatch, stands: torch.Tensor, matches: torch.Tensor) -> None:
    """The mask and the last accepted index of every request; stands [D, S], matches [D]."""
    last, mask = advanced.last_one_indices, advanced.accepted_tokens_mask
    num_decode, width = stands.shape[0], stands.shape[1] + 1
    decode_len = num_decode * width
    used = decode_len + last.shape[0] - num_decode
    decode_mask = mask[:decode_len].view(num_decode, width)
    decode_mask[:, 0] = True
    decode_mask[:, 1:] = stands
    mask[decode_len:used] = True
    mask[used:] = False
    flat = torch.arange(used, device=last.device)
    last[:num_decode] = flat[:decode_len:width] + matches
    last[num_decode:] = flat[decode_len:]


def _rewind(
    advanced: AdvancedBatch,
    kv: KVBlockState,
    rejected: torch.Tensor,
    active: torch.Tensor,
    block_size_tokens: int,
) -> None:
    """Take ``rejected`` [D] tokens off the KV of the active [N] decode requests."""
    release, removed = advanced.blocks_to_release, advanced.remove_mask
    release.zero_()
    removed.zero_()
    num_requests, num_decode = active.shape[0], rejected.shape[0]
    newest = release if release.dim() == 1 else release[:, 0]
    newest.copy_(kv.last_kv_block_id[:num_requests].masked_fill(~active, 0))
    if num_decode == 0:
        return
    release, removed = (result[:num_decode].view(num_decode, -1) for result in (release, removed))
    rejected = rejected.masked_fill(~active[:num_decode], 0)
    table = kv.kv_block_ids[:num_decode]
    last_column = table.shape[1] - 1
    old_count = kv.kv_block_counts[:num_decode].to(torch.int64)

    behind = kv.last_kv_block_offset[:num_decode].to(torch.int64) - rejected
    block = torch.div(behind, block_size_tokens, rounding_mode="floor")
    crossed = (-block).clamp(0, release.shape[1]).masked_fill(~active[:num_decode], 0)
    new_count = old_count - crossed
    entries = old_count.unsqueeze(1) - 1 - torch.arange(release.shape[1], device=table.device)
    removed.copy_(entries >= new_count.unsqueeze(1))
    inside = removed & (entries >= 0) & (entries <= last_column)
    blocks = table.gather(1, entries.clamp(0, last_column)).masked_fill(~inside, 0)
    release[:, 1:] = blocks[:, 1:]

    earlier = table.gather(1, (new_count - 1).clamp(0, last_column).unsqueeze(1)).squeeze(1)
    columns = torch.arange(table.shape[1], device=table.device)
    # the old values are views of the buffers
    gone = (columns >= new_count.unsqueeze(1)) & (columns < old_count.unsqueeze(1))
    table.masked_fill_(gone, -1)
    kept = kv.last_kv_block_id[:num_decode]
    kv.last_kv_block_id[:num_decode] = torch.where(crossed > 0, earlier, kept)
    offset = torch.where(active[:num_decode], behind - block * block_size_tokens, behind)
    kv.last_kv_block_offset[:num_decode] = offset
    kv.kv_length_offsets[:num_decode] -= rejected
    kv.kv_block_counts[:num_decode] = new_count
