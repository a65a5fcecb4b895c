"""The next forward's inputs in torch: the CPU path and the oracle of the kernel."""

from __future__ import annotations

import torch

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
    *,
    num_requests: int,
) -> None:
    """As at the door."""
    sampled_tokens_buf[:num_requests] = output_tokens[last_one_indices]
    last_accepted_seq_buf[:num_requests] = required_logit_indices[last_one_indices]

    width = num_speculative_tokens + 1
    decode_len = num_decode_requests * width
    drafts = input_tokens[:decode_len].view(num_decode_requests, width)[:, 1:]
    accepted = accepted_tokens_mask[:decode_len].view(num_decode_requests, width)[:, 1:]
    accepted_tokens_per_request[:num_decode_requests] = drafts.masked_fill(~accepted, PAD_TOKEN)
    accepted_token_counts[:num_decode_requests] = accepted.sum(dim=1)
