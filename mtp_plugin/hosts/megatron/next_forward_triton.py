"""Triton implementation of `next_forward`: one launch, a request per lane of a warp.

N requests, the D decode requests first; T flat tokens. Grid [N / 32]; a program:

1. Load the flat index of each request's last accepted token.
2. For decode requests load the drafts and the accepted mask as a tile [LANES, COLUMNS], and count
   the accepted ones.
3. Write the output after the last accepted token, its packed row, and for decode requests the
   accepted drafts (then -1) and their number.

Lanes past the last request are masked; rows of prefill requests in the last two buffers are not
written. Padding after the last request has no lane.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.hosts.megatron.types import NextForwardBuffers
from mtp_plugin.ops.launching import expect_reachable

_LANES = 32  # one warp, a request per lane


@triton.jit(do_not_specialize=["accepted_tokens_stride", "num_decode", "num_requests"])
def _prepare_next_forward_pass_kernel(
    # inputs; int32 or int64 unless stated
    output_tokens_ptr,  # [>= T]
    required_logit_indices_ptr,  # [>= T]
    last_one_indices_ptr,  # [N]
    accepted_mask_ptr,  # [>= T] bool
    input_tokens_ptr,  # [>= T]
    # outputs; int32 or int64
    sampled_tokens_ptr,  # [>= N]
    last_accepted_seq_ptr,  # [>= N]
    accepted_tokens_ptr,  # [>= D, NUM_DRAFTS]
    accepted_counts_ptr,  # [>= D]
    # sizes
    accepted_tokens_stride,
    num_decode,  # D
    num_requests,  # N
    # constants
    NUM_DRAFTS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two >= NUM_DRAFTS
    LANES: tl.constexpr,  # requests per program
):
    """One lane per request; the accepted drafts as a tile."""
    request = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_request = request < num_requests
    is_decode = request < num_decode
    row = request.to(tl.int64)
    last = tl.load(last_one_indices_ptr + request, mask=is_request, other=0).to(tl.int64)

    first_draft = row * (NUM_DRAFTS + 1) + 1
    columns = tl.arange(0, COLUMNS)
    is_draft = is_decode[:, None] & (columns < NUM_DRAFTS)[None, :]
    draft_indices = first_draft[:, None] + columns[None, :]
    accepted = tl.load(accepted_mask_ptr + draft_indices, mask=is_draft, other=0) != 0
    drafts = tl.load(input_tokens_ptr + draft_indices, mask=is_draft, other=0)

    count = tl.full([LANES], 0, tl.int32)
    for j in tl.static_range(NUM_DRAFTS):
        is_accepted = tl.load(accepted_mask_ptr + first_draft + j, mask=is_decode, other=0) != 0
        count += is_accepted.to(tl.int32)

    sampled = tl.load(output_tokens_ptr + last, mask=is_request, other=0)
    tl.store(sampled_tokens_ptr + request, sampled, mask=is_request)
    packed_rows = tl.load(required_logit_indices_ptr + last, mask=is_request, other=0)
    tl.store(last_accepted_seq_ptr + request, packed_rows, mask=is_request)
    target_ptrs = accepted_tokens_ptr + row[:, None] * accepted_tokens_stride + columns[None, :]
    tl.store(target_ptrs, tl.where(accepted, drafts, -1), mask=is_draft)
    tl.store(accepted_counts_ptr + request, count, mask=is_decode)


def prepare_next_forward_pass_triton(
    num_decode_requests: int,
    output_tokens: torch.Tensor,
    required_logit_indices: torch.Tensor,
    last_one_indices: torch.Tensor,
    accepted_tokens_mask: torch.Tensor,
    input_tokens: torch.Tensor,
    buffers: NextForwardBuffers,
    num_speculative_tokens: int,
) -> None:
    """One launch."""
    num_requests = last_one_indices.shape[0]
    expect_reachable(_prepare_next_forward_pass_kernel, "output_tokens", output_tokens)
    _prepare_next_forward_pass_kernel[(triton.cdiv(num_requests, _LANES),)](
        output_tokens_ptr=output_tokens,
        required_logit_indices_ptr=required_logit_indices,
        last_one_indices_ptr=last_one_indices,
        accepted_mask_ptr=accepted_tokens_mask,
        input_tokens_ptr=input_tokens,
        sampled_tokens_ptr=buffers.sampled_tokens_buf,
        last_accepted_seq_ptr=buffers.last_accepted_seq_buf,
        accepted_tokens_ptr=buffers.accepted_tokens_per_request,
        accepted_counts_ptr=buffers.accepted_token_counts,
        accepted_tokens_stride=buffers.accepted_tokens_per_request.stride(0),
        num_decode=num_decode_requests,
        num_requests=num_requests,
        NUM_DRAFTS=num_speculative_tokens,
        COLUMNS=triton.next_power_of_2(max(num_speculative_tokens, 1)),
        LANES=_LANES,
        num_warps=1,
    )
