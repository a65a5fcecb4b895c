"""The door of the KV rewind; its letters stand in ``contract``."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.hosts.megatron.ops.kv_rewind import reference
from mtp_plugin.hosts.megatron.ops.kv_rewind.contract import RewoundBlocks, unwritten_result
from mtp_plugin.kernels.backend import Backend


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
    rows = (
        accepted_counts,
        prefill_status,
        last_kv_block_offset,
        kv_length_offsets,
        kv_block_counts,
        last_kv_block_id,
        kv_block_ids,
    )
    sizes = (num_speculative_tokens, block_size_tokens)
    rewound = unwritten_result(*rows, *sizes, num_active_requests, out)
    num_requests = accepted_counts.shape[0]
    if num_requests > 0:
        active = num_requests if num_active_requests is None else num_active_requests
        _side(backend).rewind_kv_cache(*rows, *sizes, active, rewound=rewound)
    return rewound


class _Side(Protocol):
    def rewind_kv_cache(
        self,
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
    ) -> None: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.hosts.megatron.ops.kv_rewind import launch

    return launch
