"""The KV rewind in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch

from mtp_plugin.hosts.megatron.ops.kv_rewind.contract import RewoundBlocks, unwritten_result


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
) -> RewoundBlocks:
    """Give the KV rows of rejected drafts back, in place.

    A decode request gives back S - accepted tokens. Crossing into an earlier block, it loses the
    blocks behind it: their entries of ``kv_block_ids`` become -1 and are handed out. With S = 3,
    blocks of 4 tokens ``[7, 9]``, the last token at offset 1 of block 9 and nothing accepted: the
    length falls by 3, the offset becomes 2 in block 7, block 9 is released. Prefill requests and
    padding stay as they are.

    Args:
        accepted_counts: [N] int32 or int64, accepted drafts, 0..S (read for decode requests).
        prefill_status: [>= N] int32, int64 or bool, 0 for a decode request.
        last_kv_block_offset: [>= N] offset of the last token in its block, changed.
        kv_length_offsets: [>= N] changed.
        kv_block_counts: [>= N] changed.
        last_kv_block_id: [>= N] changed.
        kv_block_ids: [>= N, most blocks of a request] changed. All five int32 or int64.
        num_speculative_tokens: S.
        block_size_tokens: B.
        num_active_requests: rows at or past it are padding; None: there are none. One integer on
            the device may change between replays of a CUDA graph.
        out: ``(blocks_to_release, remove_mask)`` to write into.

    Returns:
        ``(blocks_to_release, remove_mask)``, [N] while S <= B, else [N, ceil(S / B)], the newest
        block first. Each active row starts with its old last block id, released or not; entries
        of further blocks that stay and of padding are 0.

    Raises:
        TensorContractError: a tensor of another shape, dtype, layout or device.

    Source: Megatron-LM, ``mtp_utils_pytorch``; rewinds over several blocks are an addition.
    """
    rewound = unwritten_result(
        accepted_counts,
        prefill_status,
        last_kv_block_offset,
        kv_length_offsets,
        kv_block_counts,
        last_kv_block_id,
        kv_block_ids,
        num_speculative_tokens,
        block_size_tokens,
        num_active_requests,
        out,
    )
    n = accepted_counts.shape[0]
    if n == 0:
        return rewound
    width = rewound.remove_mask[0].numel()
    device = accepted_counts.device
    requests = torch.arange(n, device=device)
    active = requests < (n if num_active_requests is None else num_active_requests)
    decode = active & (prefill_status[:n] == 0)
    offset, old_count, old_last = (
        buffer[:n].to(torch.int64)
        for buffer in (last_kv_block_offset, kv_block_counts, last_kv_block_id)
    )
    table = kv_block_ids[:n]

    rejected = (num_speculative_tokens - accepted_counts).masked_fill(~decode, 0)
    behind = offset - rejected  # negative: in an earlier block
    block = torch.div(behind, block_size_tokens, rounding_mode="floor")
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
    last_kv_block_offset[:n] = torch.where(decode, behind - block * block_size_tokens, offset)
    kv_length_offsets[:n] -= rejected
    kv_block_counts[:n] = new_count
    last_kv_block_id[:n] = torch.where(crossed > 0, earlier.squeeze(1), old_last)
    return rewound
