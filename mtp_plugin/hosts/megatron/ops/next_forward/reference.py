"""The next forward's inputs in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch

from mtp_plugin.hosts.megatron.ops.next_forward.contract import check_buffers
from mtp_plugin.speculative.step import PAD_TOKEN


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
    num_requests = check_buffers(
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
    if num_requests == 0:
        return
    sampled_tokens_buf[:num_requests] = output_tokens[last_one_indices]
    last_accepted_seq_buf[:num_requests] = required_logit_indices[last_one_indices]

    width = num_speculative_tokens + 1
    decode_len = num_decode_requests * width
    drafts = input_tokens[:decode_len].view(num_decode_requests, width)[:, 1:]
    accepted = accepted_tokens_mask[:decode_len].view(num_decode_requests, width)[:, 1:]
    accepted_tokens_per_request[:num_decode_requests] = drafts.masked_fill(~accepted, PAD_TOKEN)
    accepted_token_counts[:num_decode_requests] = accepted.sum(dim=1)
