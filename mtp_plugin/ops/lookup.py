"""Propose drafts from a request's own tokens: what followed the last tokens earlier in the text."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError, expect_int
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import INTEGERS, expect_tensor
from mtp_plugin.ops.step import PAD_TOKEN


def look_up_drafts(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    min_match: int = 2,
    max_match: int = 8,
    backend: Backend | str = "auto",
) -> torch.Tensor:
    """Return the K tokens after the longest earlier occurrence of each row's last tokens.

    The last m tokens of a row are searched in the tokens before them, for m from ``max_match``
    down to ``min_match``; occurrences may overlap the end, and of those with the same m the most
    recent is taken. If fewer than K tokens follow it, they repeat, as in a text that goes on
    periodically. Prompt lookup decoding, Saxena 2023.

    Args:
        tokens: [R, W] integer with contiguous rows; any values.
        lengths: [R] integer, any stride: valid tokens of each row, outside 0..W the nearest.
        k: number of drafts, 0 or more.
        min_match: fewest tokens that must match, 1 or more.
        max_match: most tokens that are compared, at least ``min_match``.

    Returns:
        [R, K] int32; -1 in rows without an occurrence.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout, or a number
            outside its range.
    """
    expect_tensor("tokens", tokens, dtype=INTEGERS, shape=("R", "W"), contiguous="rows")
    requests, width = tokens.shape
    expect_tensor("lengths", lengths, dtype=INTEGERS, shape=(requests,), device=tokens.device)
    k = expect_int("k", k, 0, error=TensorContractError)
    min_match = expect_int("min_match", min_match, 1, error=TensorContractError)
    max_match = expect_int("max_match", max_match, min_match, error=TensorContractError)
    backend = Backend.of(backend, tokens.device, "backend")
    if not (requests and width and k):
        return tokens.new_full((requests, k), PAD_TOKEN, dtype=torch.int32)
    return backend.dispatch(look_up_drafts_reference)(tokens, lengths, k, min_match, max_match)


def look_up_drafts_reference(
    tokens: torch.Tensor, lengths: torch.Tensor, k: int, min_match: int, max_match: int
) -> torch.Tensor:
    """Compare every column at once, token by token from the end of the match."""
    width = tokens.shape[1]
    length = lengths.to(torch.int64).clamp(0, width).unsqueeze(1)
    columns = torch.arange(width, device=tokens.device)  # of the last token of a match
    matches = columns < length - 1
    num_equal = torch.zeros_like(matches, dtype=torch.int64)
    for back in range(min(max_match, width)):
        token = tokens.gather(1, (length - 1 - back).clamp_min(0))
        matches = matches & (columns >= back) & (tokens.roll(back, dims=1) == token)
        num_equal += matches
    score = torch.where(num_equal >= min_match, num_equal * width + columns, -1)
    best = score.amax(dim=1, keepdim=True)
    first = best.remainder(width) + 1  # of the tokens that follow
    steps = torch.arange(k, device=tokens.device)
    found = first + steps.remainder((length - first).clamp_min(1))
    drafts = tokens.gather(1, found.clamp_max(width - 1)).to(torch.int32)
    return drafts.masked_fill(best < 0, PAD_TOKEN)
