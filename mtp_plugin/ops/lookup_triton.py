"""Triton implementation of `lookup`: one launch, one program per request (grid [R]).

1. For each block of columns, count how many tokens up to each column equal the last tokens of the
   row, up to ``max_match``; a column whose token differs is not compared further, so that most
   lanes load once.
2. Reduce the columns with at least ``min_match`` equal tokens to one: most equal tokens first, then
   the most recent.
3. Store the K tokens after it, repeated if fewer follow; -1 without one.

Each program reads and writes its own row alone. The number of blocks is that of the row's length.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options

BLOCK = 1024


@triton.jit(
    do_not_specialize=["token_stride", "length_stride", "width", "min_match", "max_match"],
    do_not_specialize_on_alignment=["token_ptr", "length_ptr"],
)
def look_up_drafts_kernel(
    # inputs
    token_ptr,  # [R, W] integer
    length_ptr,  # [R] integer
    # output
    draft_ptr,  # [R, K] int32
    # sizes
    token_stride,
    length_stride,
    width,  # W
    min_match,
    max_match,
    # constants
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two >= K
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per request: its longest match, and the tokens after it."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    row_ptr = token_ptr + request * token_stride
    length = tl.load(length_ptr + request * length_stride).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), width)

    best = tl.full((), -1, tl.int64)
    for start in range(0, length - 1, BLOCK):
        columns = start + tl.arange(0, BLOCK).to(tl.int64)
        matches = columns < length - 1
        num_equal = tl.zeros((BLOCK,), tl.int64)
        for back in range(0, tl.minimum(max_match, length)):
            token = tl.load(row_ptr + length - 1 - back)
            matches = matches & (columns >= back)
            x = tl.load(row_ptr + columns - back, mask=matches, other=0)
            matches = matches & (x == token)
            num_equal += matches.to(tl.int64)
        score = tl.where(num_equal >= min_match, num_equal * width + columns, -1)
        best = tl.maximum(best, tl.max(score, axis=0))

    first = best % width + 1
    lanes = tl.arange(0, COLUMNS)
    following = first + lanes % tl.maximum(length - first, 1)
    is_found = (best >= 0) & (lanes < K)
    drafts = tl.load(row_ptr + following, mask=is_found, other=-1).to(tl.int32)
    tl.store(draft_ptr + request * K + lanes, drafts, mask=lanes < K)


def look_up_drafts_triton(
    tokens: torch.Tensor, lengths: torch.Tensor, k: int, min_match: int, max_match: int
) -> torch.Tensor:
    """One launch, one program per request."""
    expect_reachable(look_up_drafts_kernel, "tokens", tokens)
    requests, width = tokens.shape
    drafts = torch.empty(requests, k, dtype=torch.int32, device=tokens.device)
    look_up_drafts_kernel[(requests,)](
        # inputs
        tokens,
        lengths,
        # output
        drafts,
        # sizes
        tokens.stride(0),
        lengths.stride(0),
        width,
        min_match,
        max_match,
        # constants
        K=k,
        COLUMNS=triton.next_power_of_2(k),
        BLOCK=BLOCK,
        **pdl_options(tokens.device),
    )
    return drafts
