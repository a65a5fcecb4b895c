"""What the bookkeeping of a whole batch takes and gives, and the checks at its door.

N requests, the D decode requests first; S drafts behind the base token of a decode request; T flat
tokens: S+1 per decode request, one per prefill request, then any padding; B tokens per KV block; W
blocks that one rewind can cross at most, ceil(S / B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from mtp_plugin.errors import TensorContractError

INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class NextForwardBuffers:
    """What the next forward reads; int32 or int64, allocated once, at least as long as said.

    Both records are checked when they first meet a size of batch, not again with every step.
    """

    sampled_tokens_buf: torch.Tensor  # [N] the output behind a request's last accepted token
    last_accepted_seq_buf: torch.Tensor  # [N] the packed row of that token
    accepted_tokens_per_request: torch.Tensor  # [D, S] accepted drafts, -1 behind them
    accepted_token_counts: torch.Tensor  # [D] how many drafts were accepted


@dataclass(frozen=True, eq=False)
class KVBlockState:
    """Where each request's KV ends, one row per request; int32 or int64, changed in place."""

    last_kv_block_offset: torch.Tensor  # [N] offset of the last token in its block
    kv_length_offsets: torch.Tensor  # [N]
    kv_block_counts: torch.Tensor  # [N]
    last_kv_block_id: torch.Tensor  # [N]
    kv_block_ids: torch.Tensor  # [N, most blocks of a request], -1 where there is none


_checked_sizes: WeakKeyDictionary[
    NextForwardBuffers | KVBlockState, set[tuple[int, int, int, torch.device]]
] = WeakKeyDictionary()


class AdvancedBatch(NamedTuple):
    """What the verification and the rewind of a batch found."""

    last_one_indices: torch.Tensor  # [N] int64: flat index of a request's last accepted token
    accepted_tokens_mask: torch.Tensor  # [T] bool: False on padding
    blocks_to_release: torch.Tensor  # [N], or [N, W] once S > B; type of ``last_kv_block_id``
    remove_mask: torch.Tensor  # bool, same shape: the block of the same entry is free now


def unwritten_result(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    buffers: NextForwardBuffers,
    kv: KVBlockState,
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor | None,
    out: AdvancedBatch | tuple[torch.Tensor, ...] | None,
) -> AdvancedBatch:
    """Check one call and give the tensors that it writes besides buffers and KV state.

    Raises:
        TensorContractError: naming the tensor, what was expected and what came.
    """
    _check_numbers(
        num_decode_requests, num_prefill_requests, num_speculative_tokens, block_size_tokens
    )
    device = input_tokens.device
    num_requests = num_decode_requests + num_prefill_requests
    num_tokens = num_decode_requests * (num_speculative_tokens + 1) + num_prefill_requests
    _check_vector("input_tokens", input_tokens, num_tokens, device)
    _check_vector("output_tokens", output_tokens, num_tokens, device)
    _check_vector("required_logit_indices", required_logit_indices, num_tokens, device)
    sizes = (num_requests, num_decode_requests, num_speculative_tokens, device)
    if sizes not in _checked_sizes.get(buffers, ()):
        _check_buffers(buffers, num_requests, num_decode_requests, num_speculative_tokens, device)
        _checked_sizes.setdefault(buffers, set()).add(sizes)
    if sizes not in _checked_sizes.get(kv, ()):
        _check_kv(kv, num_requests, device)
        _checked_sizes.setdefault(kv, set()).add(sizes)
    _check_active(num_active_requests, device)

    crossable = -(-num_speculative_tokens // block_size_tokens)
    blocks = (num_requests, crossable) if crossable > 1 else (num_requests,)
    ids = kv.last_kv_block_id.dtype
    result = (
        ("last_one_indices", (num_requests,), torch.int64),
        ("accepted_tokens_mask", (input_tokens.shape[0],), torch.bool),
        ("blocks_to_release", blocks, ids),
        ("remove_mask", blocks, torch.bool),
    )
    if out is None:
        return AdvancedBatch(
            *(torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in result)
        )
    for (name, shape, dtype), tensor in zip(result, out, strict=True):
        fits = tuple(tensor.shape) == shape and tensor.is_contiguous()
        if not (fits and tensor.dtype == dtype and tensor.device == device):
            raise TensorContractError(
                f"out, {name}: expected contiguous {dtype} {list(shape)} on {device}, got "
                f"{_described(tensor)}"
            )
    return AdvancedBatch(*out)


def _check_numbers(num_decode: int, num_prefill: int, num_drafts: int, block_size: int) -> None:
    if min(num_decode, num_prefill, num_drafts) < 0 or block_size < 1:
        raise TensorContractError(
            "expected num_decode_requests, num_prefill_requests and num_speculative_tokens >= 0 "
            f"and block_size_tokens >= 1, got {num_decode}, {num_prefill}, {num_drafts} and "
            f"{block_size}"
        )


def _check_buffers(
    buffers: NextForwardBuffers,
    num_requests: int,
    num_decode: int,
    num_drafts: int,
    device: torch.device,
) -> None:
    for name, entries in (
        ("sampled_tokens_buf", num_requests),
        ("last_accepted_seq_buf", num_requests),
        ("accepted_token_counts", num_decode),
    ):
        _check_vector(name, getattr(buffers, name), entries, device)
    rows = buffers.accepted_tokens_per_request
    width_fits = rows.dim() == 2 and rows.shape[1] == num_drafts
    _check_table("accepted_tokens_per_request", rows, num_decode, device, width_fits)


def _check_kv(kv: KVBlockState, num_requests: int, device: torch.device) -> None:
    for name in (
        "last_kv_block_offset",
        "kv_length_offsets",
        "kv_block_counts",
        "last_kv_block_id",
    ):
        _check_vector(name, getattr(kv, name), num_requests, device)
    table = kv.kv_block_ids
    width_fits = table.dim() == 2 and table.shape[1] >= 1
    _check_table("kv_block_ids", table, num_requests, device, width_fits)


def _check_vector(name: str, tensor: torch.Tensor, entries: int, device: torch.device) -> None:
    fits = tensor.dim() == 1 and tensor.shape[0] >= entries and tensor.is_contiguous()
    if not (fits and tensor.dtype in INDEX_DTYPES and tensor.device == device):
        raise TensorContractError(
            f"{name}: expected a contiguous int32 or int64 vector of at least {entries} "
            f"entries on {device}, got {_described(tensor)}"
        )


def _check_table(
    name: str, table: torch.Tensor, rows: int, device: torch.device, width_fits: bool
) -> None:
    fits = width_fits and table.shape[0] >= rows
    dense = fits and (table.shape[1] <= 1 or table.stride(1) == 1)
    if not (dense and table.dtype in INDEX_DTYPES and table.device == device):
        raise TensorContractError(
            f"{name}: expected an int32 or int64 table of at least {rows} dense rows of the right "
            f"width on {device}, got {_described(table)}"
        )


def _check_active(active: int | torch.Tensor | None, device: torch.device) -> None:
    if isinstance(active, torch.Tensor) and (
        active.numel() != 1 or active.dtype not in INDEX_DTYPES or active.device != device
    ):
        raise TensorContractError(
            f"num_active_requests: expected an int, or one int32 or int64 on {device}, got "
            f"{_described(active)}"
        )


def _described(tensor: torch.Tensor) -> str:
    return (
        f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on "
        f"{tensor.device}"
    )
