"""What a rewind of the KV bookkeeping takes and gives, and the checks at its door.

N requests; S drafts behind the base token of a decode request; B tokens per block; W blocks that
one rewind can cross at most, ceil(S / B).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mtp_plugin.errors import TensorContractError

INDEX_DTYPES = (torch.int32, torch.int64)


class RewoundBlocks(NamedTuple):
    """The blocks that requests gave back; [N] while S <= B, else [N, W], newest block first."""

    blocks_to_release: torch.Tensor  # the type of ``last_kv_block_id``
    remove_mask: torch.Tensor  # bool: the block of the same entry is free now


def unwritten_result(
    accepted_counts: torch.Tensor,
    prefill_status: torch.Tensor,
    last_kv_block_offset: torch.Tensor,
    kv_length_offsets: torch.Tensor,
    kv_block_counts: torch.Tensor,
    last_kv_block_id: torch.Tensor,
    kv_block_ids: torch.Tensor,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor | None,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> RewoundBlocks:
    """Check one rewind and give the tensors that it writes besides the bookkeeping.

    Raises:
        TensorContractError: naming the tensor, what was expected and what came.
    """
    num_requests = accepted_counts.shape[0] if accepted_counts.dim() == 1 else 0
    device = accepted_counts.device
    for name, tensor in (
        ("accepted_counts", accepted_counts),
        ("prefill_status", prefill_status),
        ("last_kv_block_offset", last_kv_block_offset),
        ("kv_length_offsets", kv_length_offsets),
        ("kv_block_counts", kv_block_counts),
        ("last_kv_block_id", last_kv_block_id),
    ):
        fits = tensor.dim() == 1 and tensor.shape[0] >= num_requests and tensor.is_contiguous()
        is_flag = tensor is prefill_status and tensor.dtype == torch.bool
        typed = tensor.dtype in INDEX_DTYPES or is_flag
        if not (fits and typed and tensor.device == device):
            raise TensorContractError(
                f"{name}: expected a contiguous int32 or int64 vector of at least {num_requests} "
                f"entries on {device}, got {_described(tensor)}"
            )
    _check_table(kv_block_ids, num_requests, device)
    _check_numbers(num_speculative_tokens, block_size_tokens, num_active_requests, device)

    width = -(-num_speculative_tokens // block_size_tokens)
    shape = (num_requests, width) if width > 1 else (num_requests,)
    if out is None:
        return RewoundBlocks(
            torch.empty(shape, dtype=last_kv_block_id.dtype, device=device),
            torch.empty(shape, dtype=torch.bool, device=device),
        )
    for name, tensor, dtype in (
        ("blocks_to_release", out[0], last_kv_block_id.dtype),
        ("remove_mask", out[1], torch.bool),
    ):
        fits = tuple(tensor.shape) == shape and tensor.is_contiguous()
        if not (fits and tensor.dtype == dtype and tensor.device == device):
            raise TensorContractError(
                f"out, {name}: expected contiguous {dtype} {list(shape)} on {device}, got "
                f"{_described(tensor)}"
            )
    return RewoundBlocks(*out)


def _check_table(table: torch.Tensor, num_requests: int, device: torch.device) -> None:
    fits = table.dim() == 2 and table.shape[0] >= num_requests and table.shape[1] >= 1
    dense = fits and (table.shape[1] == 1 or table.stride(1) == 1)
    if not (dense and table.dtype in INDEX_DTYPES and table.device == device):
        raise TensorContractError(
            f"kv_block_ids: expected int32 or int64 [at least {num_requests}, at least 1] with "
            f"dense rows on {device}, got {_described(table)}"
        )


def _check_numbers(
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor | None,
    device: torch.device,
) -> None:
    if num_speculative_tokens < 0 or block_size_tokens < 1:
        raise TensorContractError(
            "expected num_speculative_tokens >= 0 and block_size_tokens >= 1, got "
            f"{num_speculative_tokens} and {block_size_tokens}"
        )
    if isinstance(num_active_requests, torch.Tensor):
        active = num_active_requests
        if active.numel() != 1 or active.dtype not in INDEX_DTYPES or active.device != device:
            raise TensorContractError(
                f"num_active_requests: expected an int, or one int32 or int64 on {device}, got "
                f"{_described(active)}"
            )


def _described(tensor: torch.Tensor) -> str:
    return (
        f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on "
        f"{tensor.device}"
    )
