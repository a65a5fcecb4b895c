"""The door of the next forward's preparation.

N requests, the D decode requests first; S drafts behind the base token of each; T flat tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.hosts.megatron.ops.next_forward import reference
from mtp_plugin.kernels.backend import Backend

INDEX_DTYPES = (torch.int32, torch.int64)


def prepare_next_forward_pass(
    num_decode_requests: int,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    last_one_indices: torch.Tensor,
    accepted_tokens_mask: torch.Tensor,
    input_tokens: torch.Tensor,
    sampled_tokens_buf: torch.Tensor,
    last_accepted_seq_buf: torch.Tensor,
    accepted_tokens_per_request: torch.Tensor,
    accepted_token_counts: torch.Tensor,
    num_speculative_tokens: int,
    *,
    backend: Backend,
) -> None:
    """Write what a step leaves to the next forward into the caller's buffers.

    Every request: the output behind its last accepted token, and where in the packed sequence that
    token was. Every decode request: its accepted drafts and their number. With S = 3, inputs
    ``a b c d`` and outputs ``b c x y`` of which ``a b c`` stand: sampled ``x``, drafts ``b c -1``,
    count 2. Rows of the two last buffers that belong to no decode request stay as they are.

    Args:
        num_decode_requests: D, which come first.
        output_tokens: [>= T] int32 or int64, the target's token behind every input.
        required_logit_indices: [>= T] int32 or int64, the packed row of every input.
        last_one_indices: [N] int32 or int64, from the verification; 0 <= index < T.
        accepted_tokens_mask: [>= T] bool, from the verification.
        input_tokens: [>= T] int32 or int64.
        sampled_tokens_buf: [>= N] int32 or int64, written.
        last_accepted_seq_buf: [>= N] int32 or int64, written.
        accepted_tokens_per_request: [>= D, S] int32 or int64, written; -1 behind the drafts.
        accepted_token_counts: [>= D] int32 or int64, written.
        num_speculative_tokens: S.

    Raises:
        TensorContractError: a tensor of another shape, dtype, layout or device.

    Source: Megatron-LM, ``mtp_utils_pytorch``.
    """
    arguments = (
        num_decode_requests,
        output_tokens,
        required_logit_indices,
        last_one_indices,
        accepted_tokens_mask,
        input_tokens,
        sampled_tokens_buf,
        last_accepted_seq_buf,
        accepted_tokens_per_request,
        accepted_token_counts,
        num_speculative_tokens,
    )
    num_requests = _check(*arguments)
    if num_requests > 0:
        _side(backend).prepare_next_forward_pass(*arguments, num_requests=num_requests)


class _Side(Protocol):
    def prepare_next_forward_pass(
        self,
        num_decode_requests: int,
        output_tokens: torch.Tensor,
        required_logit_indices: torch.Tensor,
        last_one_indices: torch.Tensor,
        accepted_tokens_mask: torch.Tensor,
        input_tokens: torch.Tensor,
        sampled_tokens_buf: torch.Tensor,
        last_accepted_seq_buf: torch.Tensor,
        accepted_tokens_per_request: torch.Tensor,
        accepted_token_counts: torch.Tensor,
        num_speculative_tokens: int,
        *,
        num_requests: int,
    ) -> None: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.hosts.megatron.ops.next_forward import launch

    return launch


def _check(
    num_decode_requests: int,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    last_one_indices: torch.Tensor,
    accepted_tokens_mask: torch.Tensor,
    input_tokens: torch.Tensor,
    sampled_tokens_buf: torch.Tensor,
    last_accepted_seq_buf: torch.Tensor,
    accepted_tokens_per_request: torch.Tensor,
    accepted_token_counts: torch.Tensor,
    num_speculative_tokens: int,
) -> int:
    """Check one call and return N, the length of ``last_one_indices``."""
    device = last_one_indices.device
    num_requests = last_one_indices.shape[0] if last_one_indices.dim() == 1 else -1
    if not 0 <= num_decode_requests <= max(num_requests, 0) or num_speculative_tokens < 0:
        raise TensorContractError(
            f"last_one_indices: expected a vector of at least num_decode_requests = "
            f"{num_decode_requests} >= 0 entries and num_speculative_tokens >= 0, got "
            f"{list(last_one_indices.shape)} and {num_speculative_tokens}"
        )
    num_prefill = num_requests - num_decode_requests
    tokens = num_decode_requests * (num_speculative_tokens + 1) + num_prefill
    for name, tensor, entries in (
        ("last_one_indices", last_one_indices, num_requests),
        ("output_tokens", output_tokens, tokens),
        ("required_logit_indices", required_logit_indices, tokens),
        ("input_tokens", input_tokens, tokens),
        ("sampled_tokens_buf", sampled_tokens_buf, num_requests),
        ("last_accepted_seq_buf", last_accepted_seq_buf, num_requests),
        ("accepted_token_counts", accepted_token_counts, num_decode_requests),
    ):
        fits = tensor.dim() == 1 and tensor.shape[0] >= entries and tensor.is_contiguous()
        if not (fits and tensor.dtype in INDEX_DTYPES and tensor.device == device):
            raise TensorContractError(
                f"{name}: expected a contiguous int32 or int64 vector of at least {entries} "
                f"entries on {device}, got {_described(tensor)}"
            )
    _check_mask(accepted_tokens_mask, tokens, device)
    _check_rows(accepted_tokens_per_request, num_decode_requests, num_speculative_tokens, device)
    return num_requests


def _check_mask(mask: torch.Tensor, tokens: int, device: torch.device) -> None:
    fits = mask.dim() == 1 and mask.shape[0] >= tokens and mask.is_contiguous()
    if not (fits and mask.dtype == torch.bool and mask.device == device):
        raise TensorContractError(
            f"accepted_tokens_mask: expected a contiguous bool vector of at least {tokens} entries "
            f"on {device}, got {_described(mask)}"
        )


def _check_rows(rows: torch.Tensor, num_decode: int, width: int, device: torch.device) -> None:
    fits = rows.dim() == 2 and rows.shape[0] >= num_decode and rows.shape[1] == width
    dense = fits and (width <= 1 or rows.stride(1) == 1)
    if not (dense and rows.dtype in INDEX_DTYPES and rows.device == device):
        raise TensorContractError(
            f"accepted_tokens_per_request: expected int32 or int64 [at least {num_decode}, "
            f"{width}] with dense rows on {device}, got {_described(rows)}"
        )


def _described(tensor: torch.Tensor) -> str:
    return (
        f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on "
        f"{tensor.device}"
    )
