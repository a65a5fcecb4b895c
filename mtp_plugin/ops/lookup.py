"""Propose drafts from a request's own tokens: what followed the last tokens earlier in the text."""

from __future__ import annotations

import torch

from mtp_plugin.errors import INT32_MAX, expect_int
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import INTEGERS, expect_tensor
from mtp_plugin.ops.step import PAD_TOKEN

MOST_DRAFTS = 1024
"""The kernel stores the drafts of a row as one block."""


def look_up_drafts(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    min_match: int = 2,
    max_match: int = 8,
    rows: torch.Tensor | None = None,
    drafts: torch.Tensor | None = None,
    matches: torch.Tensor | None = None,
    num_sampled: torch.Tensor | None = None,
    backend: Backend | str = "auto",
) -> torch.Tensor:
    """Return the K tokens after the longest earlier occurrence of each row's last tokens.

    The last m tokens of a row are searched in the tokens before them, for m from ``max_match``
    down to ``min_match``; occurrences may overlap the end, and of those with the same m the most
    recent is taken. If fewer than K tokens follow it, they repeat, as in a text that goes on
    periodically. Prompt lookup decoding, Saxena 2023.

    Args:
        tokens: [S, W] integer with contiguous rows; any values.
        lengths: [S] integer, any stride: valid tokens of each row, outside 0..W the nearest.
        k: number of drafts, 0..1024; with ``matches`` 1 or more.
        min_match: fewest tokens that must match, 1 or more.
        max_match: most tokens that are compared, ``min_match``..2**31-1.
        rows: [R] integer, any stride: rows to look up, outside 0..S-1 the nearest; None: all.
        drafts: [R, M] integer with contiguous rows: tokens that follow each row; M may be 0.
        matches: [S] bool, written at the rows that are looked up: whether one occurs earlier. Of a
            row that is looked up twice, either result stays.
        num_sampled: [R] integer, any stride: rows with 0 are written as False to ``matches``.

    Returns:
        [R, K] int32; -1 in rows without an occurrence.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout, or a number
            outside its range.
    """
    expect_tensor("tokens", tokens, dtype=INTEGERS, shape=("S", "W"), contiguous="rows")
    num_rows, width = tokens.shape
    device = tokens.device
    expect_tensor("lengths", lengths, dtype=INTEGERS, shape=(num_rows,), device=device)
    if rows is not None:
        expect_tensor("rows", rows, dtype=INTEGERS, shape=("R",), device=device)
    requests = num_rows if rows is None else len(rows)
    if drafts is not None:
        expect_tensor(
            "drafts",
            drafts,
            dtype=INTEGERS,
            shape=(requests, "M"),
            device=device,
            contiguous="rows",
        )
    if matches is not None:
        expect_tensor(
            "matches", matches, dtype=torch.bool, shape=(num_rows,), device=device, contiguous=True
        )
    if num_sampled is not None:
        expect_tensor("num_sampled", num_sampled, dtype=INTEGERS, shape=(requests,), device=device)
    least = 0 if matches is None else 1
    k = expect_int("k", k, least, MOST_DRAFTS)
    min_match = expect_int("min_match", min_match, 1, INT32_MAX)
    max_match = expect_int("max_match", max_match, min_match, INT32_MAX)
    backend = Backend.of(backend, device, "backend")
    has_tokens = width > 0 or (drafts is not None and drafts.shape[1] > 0)
    if not (requests and num_rows and has_tokens and k):
        if matches is not None and num_rows:
            matches[... if rows is None else rows.to(torch.int64).clamp(0, num_rows - 1)] = False
        return tokens.new_full((requests, k), PAD_TOKEN, dtype=torch.int32)
    run = backend.dispatch(look_up_drafts_reference)
    return run(tokens, lengths, k, min_match, max_match, rows, drafts, matches, num_sampled)


def look_up_drafts_reference(
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
    """Compare every column at once, token by token from the end of the match."""
    if rows is not None:
        rows = rows.to(torch.int64).clamp(0, len(tokens) - 1)
        tokens, lengths = tokens[rows], lengths[rows]
    width = tokens.shape[1]
    length = lengths.to(torch.int64).clamp(0, width).unsqueeze(1)
    if drafts is not None:
        count = drafts.shape[1]
        places = length + torch.arange(count, device=tokens.device)
        tokens = torch.nn.functional.pad(tokens.to(torch.int64), (0, count))
        tokens = tokens.scatter(1, places, drafts.to(torch.int64))
        width, length = width + count, length + count
    columns = torch.arange(width, device=tokens.device)  # of the last token of a match
    is_equal = columns < length - 1
    num_equal = torch.zeros_like(is_equal, dtype=torch.int64)
    for back in range(min(max_match, width)):
        token = tokens.gather(1, (length - 1 - back).clamp_min(0))
        is_equal = is_equal & (columns >= back) & (tokens.roll(back, dims=1) == token)
        num_equal += is_equal
    score = torch.where(num_equal >= min_match, num_equal * width + columns, -1)
    best = score.amax(dim=1, keepdim=True)
    if matches is not None:
        found_any = best[:, 0] >= 0
        if num_sampled is not None:
            found_any &= num_sampled != 0
        matches[... if rows is None else rows] = found_any
    first = best.remainder(width) + 1  # of the tokens that follow
    steps = torch.arange(k, device=tokens.device)
    found = first + steps.remainder((length - first).clamp_min(1))
    proposed = tokens.gather(1, found.clamp_max(width - 1)).to(torch.int32)
    return proposed.masked_fill(best < 0, PAD_TOKEN)
