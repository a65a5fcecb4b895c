"""Rewind the KV bookkeeping of rejected drafts."""

from __future__ import annotations

import torch

from mtp_plugin.errors import expect_int
from mtp_plugin.hosts.megatron.checks import (
    FLAG_DTYPES,
    INDEX_DTYPES,
    expect_active,
    expect_kv,
    expect_vector,
    outputs,
    released_shape,
)
from mtp_plugin.hosts.megatron.types import KVBlockState, RewoundBlocks
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import expect_tensor


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
    num_active_requests: int | torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: Backend,
) -> RewoundBlocks:
    """Remove the KV rows of rejected drafts from the bookkeeping, in place.

    A decode request loses S - accepted tokens. If that crosses into an earlier block, the blocks
    after it are released: their entries of ``kv_block_ids`` become -1. With S = 3, blocks of 4
    tokens ``[7, 9]``, the last token at offset 1 of block 9 and nothing accepted: the length falls
    by 3, the offset becomes 2 in block 7, block 9 is released. Prefill requests and padding do not
    change.

    Args:
        accepted_counts: [N] int32 or int64, accepted drafts, 0..S (read for decode requests).
        prefill_status: [>= N] int32, int64 or bool, 0 for a decode request.
        last_kv_block_offset: [>= N] offset of the last token in its block, updated.
        kv_length_offsets: [>= N] updated.
        kv_block_counts: [>= N] updated.
        last_kv_block_id: [>= N] updated.
        kv_block_ids: [>= N, maximum blocks of a request] updated. All five int32 or int64.
        num_speculative_tokens: S.
        block_size_tokens: B.
        num_active_requests: rows at or past it are padding; None: there is none. One integer on
            the device may change between replays of a CUDA graph.
        out: ``(blocks_to_release, remove_mask)`` to write into.

    Returns:
        ``(blocks_to_release, remove_mask)``, [N] while S <= B, else [N, ceil(S / B)], the newest
        block first. Each active row starts with its old last block id, released or not; entries
        of further blocks that are kept and of padding are 0.

    Raises:
        TensorContractError: another shape, dtype or device, or a number out of range.

    Source: Megatron-LM, ``mtp_utils_pytorch``; rewinds over several blocks are an addition.
    """
    num_drafts = expect_int("num_speculative_tokens", num_speculative_tokens, 0)
    block_size = expect_int("block_size_tokens", block_size_tokens, 1)
    counts = expect_tensor(
        "accepted_counts", accepted_counts, dtype=INDEX_DTYPES, shape=("N",), contiguous=True
    )
    device, num_requests = counts.device, int(counts.shape[0])
    expect_vector("prefill_status", prefill_status, num_requests, device, FLAG_DTYPES)
    kv = KVBlockState(
        last_kv_block_offset, kv_length_offsets, kv_block_counts, last_kv_block_id, kv_block_ids
    )
    expect_kv(kv, num_requests, device)
    active = expect_active(num_active_requests, num_requests, device)
    shape = released_shape(num_requests, num_drafts, block_size)
    rewound = RewoundBlocks(
        *outputs(
            out,
            (
                ("blocks_to_release", shape, last_kv_block_id.dtype),
                ("remove_mask", shape, torch.bool),
            ),
            device,
        )
    )
    if num_requests > 0:
        backend.dispatch(rewind_kv_cache_reference)(
            counts, prefill_status, kv, num_drafts, block_size, active, rewound
        )
    return rewound


def rewind_kv_cache_reference(
    accepted_counts: torch.Tensor,
    prefill_status: torch.Tensor,
    kv: KVBlockState,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor,
    rewound: RewoundBlocks,
) -> None:
    n = accepted_counts.shape[0]
    width = rewound.remove_mask[0].numel()
    device = accepted_counts.device
    requests = torch.arange(n, device=device)
    active = requests < num_active_requests
    decode = active & (prefill_status[:n] == 0)
    offset, old_count, old_last = (
        buffer[:n].to(torch.int64)
        for buffer in (kv.last_kv_block_offset, kv.kv_block_counts, kv.last_kv_block_id)
    )
    table = kv.kv_block_ids[:n]

    rejected = (num_speculative_tokens - accepted_counts).masked_fill(~decode, 0)
    new_offset = offset - rejected  # negative: in an earlier block
    block = torch.div(new_offset, block_size_tokens, rounding_mode="floor")
    crossed = (-block).clamp(0, width).masked_fill(~decode, 0)
    new_count = old_count - crossed

    columns = torch.arange(table.shape[1], device=device)
    earlier = table.gather(1, (new_count - 1).clamp(0, columns.shape[0] - 1).unsqueeze(1))
    entries = old_count.unsqueeze(1) - 1 - torch.arange(width, device=device)  # [N, W]
    marked = entries >= new_count.unsqueeze(1)
    inside = marked & (entries >= 0) & (entries < columns.shape[0])
    released = table.gather(1, entries.clamp(0, columns.shape[0] - 1)).masked_fill(~inside, 0)
    released[:, 0] = old_last.masked_fill(~active, 0)
    rewound.blocks_to_release.copy_(released.view_as(rewound.blocks_to_release))
    rewound.remove_mask.copy_(marked.view_as(rewound.remove_mask))

    # the old values are views of the buffers
    gone = (columns >= new_count.unsqueeze(1)) & (columns < old_count.unsqueeze(1))
    table.masked_fill_(gone, -1)
    kv.last_kv_block_offset[:n] = torch.where(
        decode, new_offset - block * block_size_tokens, offset
    )
    kv.kv_length_offsets[:n] -= rejected
    kv.kv_block_counts[:n] = new_count
    kv.last_kv_block_id[:n] = torch.where(crossed > 0, earlier.squeeze(1), old_last)
