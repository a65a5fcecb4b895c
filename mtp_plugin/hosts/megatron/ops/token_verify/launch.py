"""Verification on the device: one launch each."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.hosts.megatron.ops.token_verify.kernel import (
    _required_logit_indices_kernel,
    _verify_speculative_tokens_kernel,
)
from mtp_plugin.kernels.launching import expect_reachable

_LANES = 32  # one warp, a request per lane
_MAX_REQUESTS_AT_ONCE = 1024


def verify_speculative_tokens(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    *,
    last_one_indices: torch.Tensor,
    mask: torch.Tensor,
) -> None:
    """As at the door, in one launch."""
    expect_reachable(_verify_speculative_tokens_kernel, "input_tokens", input_tokens)
    lanes = input_tokens.shape[0] - num_decode_requests * num_speculative_tokens
    _verify_speculative_tokens_kernel[(triton.cdiv(lanes, _LANES),)](
        input_tokens_ptr=input_tokens,
        output_tokens_ptr=output_tokens,
        last_one_indices_ptr=last_one_indices,
        accepted_mask_ptr=mask,
        num_decode=num_decode_requests,
        num_requests=num_decode_requests + num_prefill_requests,
        num_tokens=input_tokens.shape[0],
        NUM_DRAFTS=num_speculative_tokens,
        LANES=_LANES,
        num_warps=1,
    )


def required_logit_indices(
    prefill_status: torch.Tensor,
    query_lengths: torch.Tensor,
    num_requests: int,
    *,
    indices: torch.Tensor,
) -> None:
    """As at the door, in one launch."""
    expect_reachable(_required_logit_indices_kernel, "query_lengths", query_lengths)
    _required_logit_indices_kernel[(num_requests,)](
        prefill_status_ptr=prefill_status,
        query_lengths_ptr=query_lengths,
        indices_ptr=indices,
        num_requests=num_requests,
        num_entries=indices.shape[0],
        REQUESTS=min(triton.next_power_of_2(num_requests), _MAX_REQUESTS_AT_ONCE),
        ENTRIES=32,
        num_warps=1,
    )
