"""The KV rewind in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch

from mtp_plugin.hosts.megatron.ops.kv_rewind.contract import RewoundBlocks


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
    """As at the door."""
    n = accepted_counts.shape[0]
    width = rewound.remove_mask[0].numel()
    device = accepted_counts.device
    requests = torch.arange(n, device=device)
    active = requests < num_active_requests
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
