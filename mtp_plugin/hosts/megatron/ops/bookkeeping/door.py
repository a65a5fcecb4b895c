"""The door of a batch's bookkeeping; its letters stand in ``contract``."""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.hosts.megatron.ops.bookkeeping import reference
from mtp_plugin.hosts.megatron.ops.bookkeeping.contract import (
    AdvancedBatch,
    KVBlockState,
    NextForwardBuffers,
    unwritten_result,
)
from mtp_plugin.kernels.backend import Backend


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
    num_active_requests: int | torch.Tensor | None = None,
    out: AdvancedBatch | tuple[torch.Tensor, ...] | None = None,
    backend: Backend,
) -> AdvancedBatch:
    """Verify the drafts of a batch, prepare its next forward and rewind its KV.

    The same as ``verify_speculative_tokens``, ``prepare_next_forward_pass`` and
    ``rewind_kv_cache`` one after the other, for requests in one order: decode requests first. With
    S = 3, blocks of 4 tokens, inputs ``a b c d`` and outputs ``b x y z``: ``b`` is the only draft
    that stands, ``x`` is sampled, and two tokens of KV go back.

    Args:
        input_tokens: [T] int32 or int64, the S+1 tokens of every decode request, then one token
            per prefill request, then any padding.
        output_tokens: [>= T without padding] int32 or int64, the target's token behind each.
        required_logit_indices: likewise, the packed row of each.
        buffers: what the next forward reads, written.
        kv: where the KV of each request ends, changed for decode requests.
        num_decode_requests: D. num_prefill_requests: N - D. num_speculative_tokens: S.
        block_size_tokens: B.
        num_active_requests: the KV of requests at or past it is padding, which stays as it is;
            None: there are none. One integer on the device may change between graph replays.
        out: the four tensors of the result to write into.

    Raises:
        TensorContractError: a tensor of another shape, dtype, layout or device.

    Source: the composition of three functions of Megatron-LM's ``mtp_utils_pytorch``.
    """
    advanced = unwritten_result(
        input_tokens,
        output_tokens,
        required_logit_indices,
        buffers,
        kv,
        num_decode_requests,
        num_prefill_requests,
        num_speculative_tokens,
        block_size_tokens,
        num_active_requests,
        out,
    )
    num_requests = num_decode_requests + num_prefill_requests
    if num_requests == 0:
        advanced.accepted_tokens_mask.zero_()
        return advanced
    _side(backend).advance_decode_batch(
        input_tokens,
        output_tokens,
        required_logit_indices,
        buffers,
        kv,
        num_decode_requests=num_decode_requests,
        num_prefill_requests=num_prefill_requests,
        num_speculative_tokens=num_speculative_tokens,
        block_size_tokens=block_size_tokens,
        num_active_requests=num_requests if num_active_requests is None else num_active_requests,
        advanced=advanced,
    )
    return advanced


class _Side(Protocol):
    def advance_decode_batch(
        self,
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
    ) -> None: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.hosts.megatron.ops.bookkeeping import launch

    return launch
