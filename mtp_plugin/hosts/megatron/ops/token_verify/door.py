"""The doors of token verification; their letters stand in ``contract``."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.hosts.megatron.ops.token_verify import reference
from mtp_plugin.hosts.megatron.ops.token_verify.contract import (
    VerifiedTokens,
    unwritten_indices,
    unwritten_result,
)
from mtp_plugin.kernels.backend import Backend


def verify_speculative_tokens(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: Backend,
) -> VerifiedTokens:
    """Find the drafts that the target would have emitted itself.

    A decode request reads its base token and S drafts. The base always stands; a draft stands
    while the output one row before it is the same token and every draft before it stands. With
    S = 3, inputs ``a b c d`` and outputs ``b c x y``: ``a b c`` stand. The one token of a prefill
    request stands.

    Args:
        input_tokens: [T] or [1, T] int32 or int64, the S+1 tokens of every decode request, then
            one token per prefill request, then any padding.
        output_tokens: int32 or int64, the target's token behind each of them; padding not needed.
        num_decode_requests: decode requests, which come first.
        num_prefill_requests: prefill requests.
        num_speculative_tokens: S.
        out: ``(last_one_indices [N] int64, accepted_tokens_mask [T] bool)`` to write into.

    Returns:
        ``(last_one_indices, accepted_tokens_mask, input_tokens [T])``.

    Raises:
        TensorContractError: a tensor of another shape, dtype, layout or device.

    Source: Megatron-LM, ``mtp_utils_pytorch``; ``out`` and unmarked padding are additions.
    """
    sizes = (num_decode_requests, num_prefill_requests, num_speculative_tokens)
    verified = unwritten_result(input_tokens, output_tokens, *sizes, out)
    last_one_indices, mask, tokens = verified
    if num_decode_requests + num_prefill_requests == 0:
        mask.zero_()
        return verified
    _side(backend).verify_speculative_tokens(
        tokens, output_tokens, *sizes, last_one_indices=last_one_indices, mask=mask
    )
    return verified


def required_logit_indices(
    prefill_status: torch.Tensor,
    query_lengths: torch.Tensor,
    num_decode: int,
    num_prefill: int,
    *,
    num_speculative_tokens: int | None = None,
    out: torch.Tensor | None = None,
    backend: Backend,
) -> torch.Tensor:
    """The flat rows whose logits a step needs: all of a decode request, the last of a prefill.

    With decode requests of 2 rows each and prompts of 3 and 1 rows, ``0 1 | 2 3 | 4 5 6 | 7``
    gives ``0 1 2 3 6 7``.

    Args:
        prefill_status: [N] int32, int64 or bool, 0 for a decode request.
        query_lengths: [N] int32 or int64, rows per request.
        num_decode: requests with status 0. num_prefill: all others.
        num_speculative_tokens: S, where every decode request has S+1 rows. With it or ``out``
            nothing is read back from the device; a CUDA graph needs one of the two.
        out: int32 or int64, one entry per index or more; surplus entries become 0.

    Returns:
        ``out``, or int64 of as many entries as there are indices.

    Raises:
        TensorContractError: a tensor of another shape, dtype, layout or device; or a CUDA graph
            without ``num_speculative_tokens`` and ``out``.

    Source: the row selection in Megatron-LM's dynamic context, as a function of its own.
    """
    indices = unwritten_indices(
        prefill_status, query_lengths, num_decode, num_prefill, num_speculative_tokens, out
    )
    num_requests = num_decode + num_prefill
    if num_requests == 0:
        return indices.zero_()
    _side(backend).required_logit_indices(
        prefill_status, query_lengths, num_requests, indices=indices
    )
    return indices


class _Side(Protocol):
    def verify_speculative_tokens(
        self,
        input_tokens: torch.Tensor,
        output_tokens: torch.Tensor,
        num_decode_requests: int,
        num_prefill_requests: int,
        num_speculative_tokens: int,
        *,
        last_one_indices: torch.Tensor,
        mask: torch.Tensor,
    ) -> None: ...

    def required_logit_indices(
        self,
        prefill_status: torch.Tensor,
        query_lengths: torch.Tensor,
        num_requests: int,
        *,
        indices: torch.Tensor,
    ) -> None: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.hosts.megatron.ops.token_verify import launch

    return launch
