"""Device code of the next forward's preparation."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["accepted_tokens_stride", "num_decode", "num_requests"])
def _prepare_next_forward_pass_kernel(
    output_tokens_ptr,  # [T]
    required_logit_indices_ptr,  # [T]
    last_one_indices_ptr,  # [N]
    accepted_mask_ptr,  # [T] bool
    input_tokens_ptr,  # [T]
    sampled_tokens_ptr,  # [N]
    last_accepted_seq_ptr,  # [N]
    accepted_tokens_ptr,  # [D, NUM_DRAFTS]
    accepted_counts_ptr,  # [D]
    accepted_tokens_stride,
    num_decode,
    num_requests,
    NUM_DRAFTS: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two >= NUM_DRAFTS
    LANES: tl.constexpr,
):
    # one lane per request; the accepted drafts as a tile
    request = tl.program_id(0) * LANES + tl.arange(0, LANES)
    is_request = request < num_requests
    decode = request < num_decode
    row = request.to(tl.int64)
    last = tl.load(last_one_indices_ptr + request, mask=is_request, other=0).to(tl.int64)

    first_draft = row * (NUM_DRAFTS + 1) + 1
    column = tl.arange(0, COLUMNS)
    is_draft = decode[:, None] & (column < NUM_DRAFTS)[None, :]
    position = first_draft[:, None] + column[None, :]
    accepted = tl.load(accepted_mask_ptr + position, mask=is_draft, other=0) != 0
    drafts = tl.load(input_tokens_ptr + position, mask=is_draft, other=0)

    count = tl.full([LANES], 0, tl.int32)
    for j in tl.static_range(NUM_DRAFTS):
        stands = tl.load(accepted_mask_ptr + first_draft + j, mask=decode, other=0) != 0
        count += stands.to(tl.int32)

    sampled = tl.load(output_tokens_ptr + last, mask=is_request, other=0)
    tl.store(sampled_tokens_ptr + request, sampled, mask=is_request)
    sequence = tl.load(required_logit_indices_ptr + last, mask=is_request, other=0)
    tl.store(last_accepted_seq_ptr + request, sequence, mask=is_request)
    target = accepted_tokens_ptr + row[:, None] * accepted_tokens_stride + column[None, :]
    tl.store(target, tl.where(accepted, drafts, -1), mask=is_draft)
    tl.store(accepted_counts_ptr + request, count, mask=decode)
