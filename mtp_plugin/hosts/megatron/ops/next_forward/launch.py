"""The next forward's inputs on the device, in one launch."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.hosts.megatron.ops.next_forward.kernel import _prepare_next_forward_pass_kernel
from mtp_plugin.kernels.launching import expect_reachable

_LANES = 32  # one warp, a request per lane


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
    num_requests: int,
) -> None:
    """As at the door, in one launch."""
    expect_reachable(_prepare_next_forward_pass_kernel, "output_tokens", output_tokens)
    _prepare_next_forward_pass_kernel[(triton.cdiv(num_requests, _LANES),)](
        output_tokens_ptr=output_tokens,
        required_logit_indices_ptr=required_logit_indices,
        last_one_indices_ptr=last_one_indices,
        accepted_mask_ptr=accepted_tokens_mask,
        input_tokens_ptr=input_tokens,
        sampled_tokens_ptr=sampled_tokens_buf,
        last_accepted_seq_ptr=last_accepted_seq_buf,
        accepted_tokens_ptr=accepted_tokens_per_request,
        accepted_counts_ptr=accepted_token_counts,
        accepted_tokens_stride=accepted_tokens_per_request.stride(0),
        num_decode=num_decode_requests,
        num_requests=num_requests,
        NUM_DRAFTS=num_speculative_tokens,
        COLUMNS=triton.next_power_of_2(max(num_speculative_tokens, 1)),
        LANES=_LANES,
        num_warps=1,
    )
