"""Prepare the inputs of the next forward pass from verified tokens."""

from __future__ import annotations

import torch

from mtp_plugin.errors import expect_int
from mtp_plugin.hosts.megatron.checks import expect_table, expect_vector
from mtp_plugin.hosts.megatron.types import NextForwardBuffers
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import expect_tensor
from mtp_plugin.ops.step import PAD_TOKEN


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
    """Write the inputs of the next forward pass into the caller's buffers.

    For every request: the output after its last accepted token, and the row of that token in the
    packed sequence. For every decode request: its accepted drafts and their number. With S = 3,
    inputs ``a b c d`` and outputs ``b c x y`` of which ``a b c`` are accepted: sampled ``x``,
    drafts ``b c -1``, count 2. Rows of the last two buffers past the decode requests do not change.

    Args:
        num_decode_requests: D, which come first.
        output_tokens: [>= T] int32 or int64, the target's token after every input.
        required_logit_indices: [>= T] int32 or int64, the packed row of every input.
        last_one_indices: [N] int32 or int64, of the verification; 0 <= index < T.
        accepted_tokens_mask: [>= T] bool, of the verification.
        input_tokens: [>= T] int32 or int64.
        sampled_tokens_buf: [>= N] int32 or int64, written.
        last_accepted_seq_buf: [>= N] int32 or int64, written.
        accepted_tokens_per_request: [>= D, S] int32 or int64, written; -1 after the drafts.
        accepted_token_counts: [>= D] int32 or int64, written.
        num_speculative_tokens: S.

    Raises:
        TensorContractError: another shape, dtype or device, or a number out of range.

    Source: Megatron-LM, ``mtp_utils_pytorch``.
    """
    num_drafts = expect_int("num_speculative_tokens", num_speculative_tokens, 0)
    last = expect_tensor("last_one_indices", last_one_indices, shape=("N",))
    device, num_requests = last.device, int(last.shape[0])
    num_decode = expect_int("num_decode_requests", num_decode_requests, 0, num_requests)
    tokens = num_decode * num_drafts + num_requests
    for name, value, entries in (
        ("last_one_indices", last_one_indices, num_requests),
        ("output_tokens", output_tokens, tokens),
        ("required_logit_indices", required_logit_indices, tokens),
        ("input_tokens", input_tokens, tokens),
        ("sampled_tokens_buf", sampled_tokens_buf, num_requests),
        ("last_accepted_seq_buf", last_accepted_seq_buf, num_requests),
        ("accepted_token_counts", accepted_token_counts, num_decode),
    ):
        expect_vector(name, value, entries, device)
    flags = frozenset({torch.bool})
    expect_vector("accepted_tokens_mask", accepted_tokens_mask, tokens, device, flags)
    rows = accepted_tokens_per_request
    expect_table("accepted_tokens_per_request", rows, num_decode, num_drafts, device)
    if num_requests == 0:
        return
    buffers = NextForwardBuffers(
        sampled_tokens_buf, last_accepted_seq_buf, rows, accepted_token_counts
    )
    backend.dispatch(prepare_next_forward_pass_reference)(
        num_decode,
        output_tokens,
        required_logit_indices,
        last,
        accepted_tokens_mask,
        input_tokens,
        buffers,
        num_drafts,
    )


def prepare_next_forward_pass_reference(
    num_decode_requests: int,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    last_one_indices: torch.Tensor,
    accepted_tokens_mask: torch.Tensor,
    input_tokens: torch.Tensor,
    buffers: NextForwardBuffers,
    num_speculative_tokens: int,
) -> None:
    num_requests = last_one_indices.shape[0]
    buffers.sampled_tokens_buf[:num_requests] = output_tokens[last_one_indices]
    buffers.last_accepted_seq_buf[:num_requests] = required_logit_indices[last_one_indices]

    width = num_speculative_tokens + 1
    decode_len = num_decode_requests * width
    drafts = input_tokens[:decode_len].view(num_decode_requests, width)[:, 1:]
    accepted = accepted_tokens_mask[:decode_len].view(num_decode_requests, width)[:, 1:]
    kept = drafts.masked_fill(~accepted, PAD_TOKEN)
    buffers.accepted_tokens_per_request[:num_decode_requests] = kept
    buffers.accepted_token_counts[:num_decode_requests] = accepted.sum(dim=1)
