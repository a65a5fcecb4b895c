"""Tokens as letters: `a` is 0, `b` is 1, and so on; `.` is the padding -1."""

from __future__ import annotations

import torch

from mtp_plugin.ops.step import PAD_TOKEN


def ids(letters: str) -> list[int]:
    """`"bd."` -> `[1, 3, -1]`; blanks only group."""
    return [PAD_TOKEN if c == "." else ord(c) - ord("a") for c in letters.replace(" ", "")]


def rows_with_top(letters: str, vocab: int = 26) -> torch.Tensor:
    """One row of logits per letter, which is its argmax; `.` gives a row without any value."""
    logits = torch.full((len(ids(letters)), vocab), -torch.inf)
    for row, token in enumerate(ids(letters)):
        if token != PAD_TOKEN:
            logits[row] = -100.0
            logits[row, token] = 0.0
    return logits
