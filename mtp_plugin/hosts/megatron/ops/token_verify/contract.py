"""What the verification of drafted tokens takes and gives, and the checks at its door.

N requests, the decode requests first; S drafts behind the base token of a decode request; T flat
tokens: S+1 per decode request, one per prefill request, then any padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from mtp_plugin.errors import TensorContractError, expect

INDEX_DTYPES = (torch.int32, torch.int64)


class VerifiedTokens(NamedTuple):
    """Which tokens of a batch stand; a plain tuple for hosts that unpack it."""

    last_one_indices: torch.Tensor  # [N] int64: flat index of a request's last accepted token
    accepted_tokens_mask: torch.Tensor  # [T] bool: False on padding
    input_tokens: torch.Tensor  # [T], as given


def unwritten_result(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> VerifiedTokens:
    """Check one verification and give the tensors that it writes: ``out``, or new ones.

    Raises:
        TensorContractError: naming the tensor, what was expected and what came.
    """
    _expect_counts(
        num_decode_requests=num_decode_requests,
        num_prefill_requests=num_prefill_requests,
        num_speculative_tokens=num_speculative_tokens,
    )
    if input_tokens.dim() == 2 and input_tokens.shape[0] == 1:
        input_tokens = input_tokens[0]
    device = input_tokens.device
    needed = num_decode_requests * (num_speculative_tokens + 1) + num_prefill_requests
    _expect_vector("input_tokens", input_tokens, needed, device)
    _expect_vector("output_tokens", output_tokens, needed, device)

    num_requests = num_decode_requests + num_prefill_requests
    num_tokens = input_tokens.shape[0]
    if out is None:
        last = torch.empty(num_requests, dtype=torch.int64, device=device)
        mask = torch.empty(num_tokens, dtype=torch.bool, device=device)
    else:
        last, mask = out
        _expect_out("last_one_indices", last, num_requests, torch.int64, device)
        _expect_out("accepted_tokens_mask", mask, num_tokens, torch.bool, device)
    return VerifiedTokens(last, mask, input_tokens)


def unwritten_indices(
    prefill_status: torch.Tensor,
    query_lengths: torch.Tensor,
    num_decode: int,
    num_prefill: int,
    num_speculative_tokens: int | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Check one call of ``required_logit_indices`` and give the tensor that it writes.

    Without ``out`` and ``num_speculative_tokens`` only ``query_lengths`` tells how many rows the
    decode requests have: their sum is read back, and refused inside a CUDA graph.

    Raises:
        TensorContractError: naming the tensor, what was expected and what came.
    """
    _expect_counts(
        num_decode=num_decode,
        num_prefill=num_prefill,
        num_speculative_tokens=num_speculative_tokens or 0,
    )
    num_requests = num_decode + num_prefill
    device = query_lengths.device
    _expect_vector("query_lengths", query_lengths, num_requests, device)
    _expect_vector("prefill_status", prefill_status, num_requests, device, allow_bool=True)
    if num_speculative_tokens is not None:
        decode_rows = num_decode * (num_speculative_tokens + 1)
    elif out is None:
        decode_rows = _read_decode_rows(prefill_status, query_lengths, num_decode, num_prefill)
    else:
        decode_rows = 0  # the buffer says how many entries the caller wants

    if out is None:
        return torch.empty(decode_rows + num_prefill, dtype=torch.int64, device=device)
    _expect_vector("out", out, decode_rows + num_prefill, device)
    return out


def _read_decode_rows(
    prefill_status: torch.Tensor, query_lengths: torch.Tensor, num_decode: int, num_prefill: int
) -> int:
    if num_decode == 0:
        return 0
    expect(
        not (query_lengths.is_cuda and torch.cuda.is_current_stream_capturing()),
        TensorContractError,
        "required_logit_indices: inside a CUDA graph the number of decode rows has to come from "
        "the host: expected num_speculative_tokens or out, got neither",
    )
    num_requests = num_decode + num_prefill
    decode_lengths = query_lengths[:num_requests] * (prefill_status[:num_requests] == 0)
    return int(decode_lengths.sum().item())


def _expect_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise TensorContractError(f"{name}: expected 0 or more, got {count}")


def _expect_vector(
    name: str,
    tensor: torch.Tensor,
    entries: int,
    device: torch.device,
    *,
    allow_bool: bool = False,
) -> None:
    fits = tensor.dim() == 1 and tensor.shape[0] >= entries and tensor.is_contiguous()
    typed = tensor.dtype in INDEX_DTYPES or (allow_bool and tensor.dtype == torch.bool)
    if not (fits and typed and tensor.device == device):
        raise TensorContractError(
            f"{name}: expected a contiguous int32 or int64 vector of at least {entries} entries on "
            f"{device}, got {tensor.dtype} {list(tensor.shape)} with strides "
            f"{list(tensor.stride())} on {tensor.device}"
        )


def _expect_out(
    name: str, tensor: torch.Tensor, entries: int, dtype: torch.dtype, device: torch.device
) -> None:
    fits = tuple(tensor.shape) == (entries,) and tensor.is_contiguous()
    if not (fits and tensor.dtype == dtype and tensor.device == device):
        raise TensorContractError(
            f"out, {name}: expected contiguous {dtype} [{entries}] on {device}, got "
            f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on "
            f"{tensor.device}"
        )
