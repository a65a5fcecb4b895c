"""Device code of token verification."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_decode", "num_requests", "num_tokens"])
def _verify_speculative_tokens_kernel(
    input_tokens_ptr,  # [T]
    output_tokens_ptr,  # [>= used]
    last_one_indices_ptr,  # [N] int64
    accepted_mask_ptr,  # [T] bool
    num_decode,
    num_requests,
    num_tokens,
    NUM_DRAFTS: tl.constexpr,
    LANES: tl.constexpr,
):
    # one lane per request; lanes behind the requests clear one padding token each
    request = tl.program_id(0) * LANES + tl.arange(0, LANES)
    decode = request < num_decode
    row = request.to(tl.int64)
    base = tl.where(decode, row * (NUM_DRAFTS + 1), row + num_decode * NUM_DRAFTS)

    standing = decode
    matches = tl.full([LANES], 0, tl.int64)
    for j in tl.static_range(NUM_DRAFTS):
        draft = tl.load(input_tokens_ptr + base + 1 + j, mask=decode, other=0)
        emitted = tl.load(output_tokens_ptr + base + j, mask=decode, other=0)
        standing = standing & (draft == emitted)
        matches += standing.to(tl.int64)

    is_request = request < num_requests
    tl.store(last_one_indices_ptr + request, base + matches, mask=is_request)
    tl.store(accepted_mask_ptr + base, is_request, mask=base < num_tokens)
    for j in tl.static_range(NUM_DRAFTS):
        tl.store(accepted_mask_ptr + base + 1 + j, j < matches, mask=decode)


@triton.jit
def _add(left, right):
    return left + right


@triton.jit(do_not_specialize=["num_requests", "num_entries"])
def _required_logit_indices_kernel(
    prefill_status_ptr,  # [N]
    query_lengths_ptr,  # [N]
    indices_ptr,  # [num_entries]
    num_requests,
    num_entries,
    REQUESTS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    # one program per request: it adds up what the requests before it have
    request = tl.program_id(0)
    rows = tl.full([REQUESTS], 0, tl.int32)
    entries = tl.full([REQUESTS], 0, tl.int32)
    for start in range(0, request, REQUESTS):
        other = start + tl.arange(0, REQUESTS)
        earlier = other < request
        length = tl.load(query_lengths_ptr + other, mask=earlier, other=0).to(tl.int32)
        status = tl.load(prefill_status_ptr + other, mask=earlier, other=0).to(tl.int32)
        rows += length
        entries += tl.where(status == 0, length, 1)
    first_row = tl.reduce(rows, 0, _add)
    first_entry = tl.reduce(entries, 0, _add)

    length = tl.load(query_lengths_ptr + request).to(tl.int32)
    status = tl.load(prefill_status_ptr + request).to(tl.int32)
    wanted = tl.where(status == 0, length, 1)
    first_wanted = first_row + length - wanted
    for start in range(0, wanted, ENTRIES):
        column = start + tl.arange(0, ENTRIES)
        inside = (column < wanted) & (first_entry + column < num_entries)
        # a prefill request without rows points at row 0 rather than before it
        index = tl.maximum(first_wanted + column, 0)
        tl.store(indices_ptr + first_entry + column, index, mask=inside)

    if request == num_requests - 1:
        for start in range(first_entry + wanted, num_entries, ENTRIES):
            surplus = start + tl.arange(0, ENTRIES)
            zero = tl.full([ENTRIES], 0, tl.int32)
            tl.store(indices_ptr + surplus, zero, mask=surplus < num_entries)
