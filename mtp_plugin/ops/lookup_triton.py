"""Triton implementation of `lookup`: one launch, one program per request (grid [R]).

1. For each block of columns, count how many tokens up to each column equal the last tokens of the
   row, up to ``max_match``; a column whose token differs is not compared further, and a block not
   after its last column has differed, so that most blocks load a few times.
2. Reduce the columns with at least ``min_match`` equal tokens to one: most equal tokens first, then
   the most recent.
3. Store the K tokens after it, repeated if fewer follow; -1 without one. Store whether there is one
   to the flag of its row.

The text of a request is its row of tokens, followed by its drafts. Each program reads and writes
its own row alone. The number of blocks is that of the row's length.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options

BLOCK = 1024


@triton.jit
def _load_text(row_ptr, pending_ptr, index, length, mask, NUM_PENDING: tl.constexpr):
    """Load tokens at ``index`` [...] of the text: the row up to ``length``, then the drafts."""
    x = tl.load(row_ptr + index, mask=mask & (index < length), other=0).to(tl.int64)
    if NUM_PENDING > 0:
        is_pending = index >= length
        y = tl.load(pending_ptr + index - length, mask=mask & is_pending, other=0)
        x = tl.where(is_pending, y.to(tl.int64), x)
    return x


@triton.jit(
    do_not_specialize=[
        "token_stride",
        "length_stride",
        "request_stride",
        "pending_stride",
        "count_stride",
        "num_rows",
        "width",
        "min_match",
        "max_match",
    ],
    do_not_specialize_on_alignment=[
        "token_ptr",
        "length_ptr",
        "request_ptr",
        "pending_ptr",
        "count_ptr",
        "match_ptr",
    ],
)
def look_up_drafts_kernel(
    # inputs
    token_ptr,  # [S, W] integer
    length_ptr,  # [S] integer
    request_ptr,  # [R] integer: row of each request
    pending_ptr,  # [R, M] integer: drafts that follow each row
    count_ptr,  # [R] integer: 0 for no match
    # output
    draft_ptr,  # [R, K] int32
    match_ptr,  # [S] bool
    # sizes
    token_stride,
    length_stride,
    request_stride,
    pending_stride,
    count_stride,
    num_rows,  # S
    width,  # W
    min_match,
    max_match,
    # constants
    HAS_ROWS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_MATCHES: tl.constexpr,
    NUM_PENDING: tl.constexpr,  # M
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two >= K
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per request: its longest match, and the tokens after it."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = request
    if HAS_ROWS:
        row = tl.load(request_ptr + request * request_stride).to(tl.int64)
        row = tl.minimum(tl.maximum(row, 0), num_rows - 1)
    row_ptr = token_ptr + row * token_stride
    pending_row_ptr = pending_ptr + request * pending_stride
    length = tl.load(length_ptr + row * length_stride).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), width)
    end = length + NUM_PENDING
    base = width + NUM_PENDING

    best = tl.full((), -1, tl.int64)
    for start in range(0, end - 1, BLOCK):
        columns = start + tl.arange(0, BLOCK).to(tl.int64)
        matches = columns < end - 1
        num_equal = tl.zeros((BLOCK,), tl.int64)
        back = tl.full((), 0, tl.int64)
        is_open = tl.full((), 1, tl.int32)
        while (back < tl.minimum(max_match, end)) & (is_open > 0):
            token = _load_text(row_ptr, pending_row_ptr, end - 1 - back, length, True, NUM_PENDING)
            matches = matches & (columns >= back)
            x = _load_text(row_ptr, pending_row_ptr, columns - back, length, matches, NUM_PENDING)
            matches = matches & (x == token)
            num_equal += matches.to(tl.int64)
            is_open = tl.max(matches.to(tl.int32), axis=0)
            back += 1
        score = tl.where(num_equal >= min_match, num_equal * base + columns, -1)
        best = tl.maximum(best, tl.max(score, axis=0))

    first = best % base + 1
    lanes = tl.arange(0, COLUMNS)
    following = first + lanes % tl.maximum(end - first, 1)
    is_found = (best >= 0) & (lanes < K)
    drafts = _load_text(row_ptr, pending_row_ptr, following, length, is_found, NUM_PENDING)
    drafts = tl.where(best >= 0, drafts, -1).to(tl.int32)
    tl.store(draft_ptr + request * K + lanes, drafts, mask=lanes < K)
    if HAS_MATCHES:
        is_match = best >= 0
        if HAS_COUNTS:
            is_match = is_match & (tl.load(count_ptr + request * count_stride) != 0)
        tl.store(match_ptr + row, is_match)


def look_up_drafts_triton(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    min_match: int,
    max_match: int,
    rows: torch.Tensor | None,
    drafts: torch.Tensor | None,
    matches: torch.Tensor | None,
    num_sampled: torch.Tensor | None,
) -> torch.Tensor:
    """One launch, one program per request."""
    expect_reachable(look_up_drafts_kernel, "tokens", tokens)
    num_rows, width = tokens.shape
    requests = num_rows if rows is None else len(rows)
    if drafts is not None and not drafts.shape[1]:
        drafts = None
    found = torch.empty(requests, k, dtype=torch.int32, device=tokens.device)
    look_up_drafts_kernel[(requests,)](
        # inputs
        tokens,
        lengths,
        lengths if rows is None else rows,
        tokens if drafts is None else drafts,
        lengths if num_sampled is None else num_sampled,
        # output
        found,
        found if matches is None else matches,
        # sizes
        tokens.stride(0),
        lengths.stride(0),
        0 if rows is None else rows.stride(0),
        0 if drafts is None else drafts.stride(0),
        0 if num_sampled is None else num_sampled.stride(0),
        num_rows,
        width,
        min_match,
        max_match,
        # constants
        HAS_ROWS=rows is not None,
        HAS_COUNTS=num_sampled is not None,
        HAS_MATCHES=matches is not None,
        NUM_PENDING=0 if drafts is None else drafts.shape[1],
        K=k,
        COLUMNS=triton.next_power_of_2(k),
        BLOCK=BLOCK,
        **pdl_options(tokens.device),
    )
    return found
