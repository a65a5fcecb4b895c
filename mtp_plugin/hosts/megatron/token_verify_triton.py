"""Triton implementation of `token_verify`: one launch per function.

N requests, the D decode requests first; S drafts each; T flat tokens: S+1 per decode request, one
per prefill request, then padding.

`_verify_speculative_tokens_kernel`, grid [(T - D*S) / 32], a request or a padding token per lane:

1. Compute the flat index of the lane's base token: decode requests have S+1 tokens, all others one.
2. Count the leading drafts that equal the output one row before them.
3. Write the index of the last accepted token, and the mask of the lane's own tokens: the base token
   is accepted, padding is not. Every token has exactly one lane.

`_required_logit_indices_kernel`, grid [N]:

1. Each program adds up the rows, and the needed rows, of the requests before its own. It reads the
   lengths again instead of waiting for other programs.
2. It writes the flat indices of its request: all rows of a decode request, the last of a prefill.
3. The last program fills the entries after all requests with 0, a row that exists.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.launching import expect_reachable

_LANES = 32  # one warp, a request per lane
_MAX_REQUESTS_AT_ONCE = 1024


@triton.jit(do_not_specialize=["num_decode", "num_requests", "num_tokens"])
def _verify_speculative_tokens_kernel(
    # inputs
    input_tokens_ptr,  # [T] int32 or int64
    output_tokens_ptr,  # [>= T without padding] int32 or int64
    # outputs
    last_one_indices_ptr,  # [N] int64
    accepted_mask_ptr,  # [T] bool
    # sizes
    num_decode,  # D
    num_requests,  # N
    num_tokens,  # T
    # constants
    NUM_DRAFTS: tl.constexpr,  # S
    LANES: tl.constexpr,  # requests per program
):
    """One lane per request; lanes past the requests clear one padding token each."""
    request = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_decode = request < num_decode
    row = request.to(tl.int64)
    base = tl.where(is_decode, row * (NUM_DRAFTS + 1), row + num_decode * NUM_DRAFTS)

    accepted = is_decode
    matches = tl.full([LANES], 0, tl.int64)
    for j in tl.static_range(NUM_DRAFTS):
        draft = tl.load(input_tokens_ptr + base + 1 + j, mask=is_decode, other=0)
        output = tl.load(output_tokens_ptr + base + j, mask=is_decode, other=0)
        accepted = accepted & (draft == output)
        matches += accepted.to(tl.int64)

    is_request = request < num_requests
    tl.store(last_one_indices_ptr + request, base + matches, mask=is_request)
    tl.store(accepted_mask_ptr + base, is_request, mask=base < num_tokens)
    for j in tl.static_range(NUM_DRAFTS):
        tl.store(accepted_mask_ptr + base + 1 + j, j < matches, mask=is_decode)


@triton.jit
def _add(left, right):
    return left + right


@triton.jit(do_not_specialize=["num_requests", "num_entries"])
def _required_logit_indices_kernel(
    # inputs
    prefill_status_ptr,  # [>= N] int32, int64 or bool: 0 for a decode request
    query_lengths_ptr,  # [>= N] int32 or int64: rows per request
    # output
    indices_ptr,  # [num_entries] int32 or int64: flat rows
    # sizes
    num_requests,  # N
    num_entries,
    # constants
    REQUESTS: tl.constexpr,  # added up per iteration
    ENTRIES: tl.constexpr,  # written per iteration
):
    """One program per request: write the rows of its request whose logits are needed."""
    request = tl.program_id(0)
    rows = tl.full([REQUESTS], 0, tl.int32)
    entries = tl.full([REQUESTS], 0, tl.int32)
    for start in range(0, request, REQUESTS):
        others = start + tl.arange(0, REQUESTS)
        is_earlier = others < request
        length = tl.load(query_lengths_ptr + others, mask=is_earlier, other=0).to(tl.int32)
        status = tl.load(prefill_status_ptr + others, mask=is_earlier, other=0).to(tl.int32)
        rows += length
        entries += tl.where(status == 0, length, 1)
    first_row = tl.reduce(rows, 0, _add)
    first_entry = tl.reduce(entries, 0, _add)

    length = tl.load(query_lengths_ptr + request).to(tl.int32)
    status = tl.load(prefill_status_ptr + request).to(tl.int32)
    num_needed = tl.where(status == 0, length, 1)
    first_needed = first_row + length - num_needed
    for start in range(0, num_needed, ENTRIES):
        offsets = start + tl.arange(0, ENTRIES)
        inside = (offsets < num_needed) & (first_entry + offsets < num_entries)
        # a prefill request without rows points at row 0 rather than before it
        indices = tl.maximum(first_needed + offsets, 0)
        tl.store(indices_ptr + first_entry + offsets, indices, mask=inside)

    if request == num_requests - 1:
        for start in range(first_entry + num_needed, num_entries, ENTRIES):
            surplus = start + tl.arange(0, ENTRIES)
            zero = tl.full([ENTRIES], 0, tl.int32)
            tl.store(indices_ptr + surplus, zero, mask=surplus < num_entries)


def verify_speculative_tokens_triton(
    input_tokens: torch.Tensor,
    output_tokens: torch.Tensor,
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    last_one_indices: torch.Tensor,
    mask: torch.Tensor,
) -> None:
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


def required_logit_indices_triton(
    prefill_status: torch.Tensor,
    query_lengths: torch.Tensor,
    num_requests: int,
    indices: torch.Tensor,
) -> None:
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
