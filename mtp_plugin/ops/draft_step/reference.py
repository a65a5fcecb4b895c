"""What happens between two passes of the draft loop, in plain torch."""

from __future__ import annotations

import torch

from mtp_plugin.batch import DraftColumn


def propose(logits: torch.Tensor, place: DraftColumn) -> None:
    """The draft of each row of ``logits`` [R, V], written to every place that reads it."""
    place.write(draft_argmax(logits))


def draft_argmax(logits: torch.Tensor) -> torch.Tensor:
    """The draft of each row [N] int32: highest value, lowest id on ties, NaN as -inf."""
    return logits.masked_fill(torch.isnan(logits), -torch.inf).argmax(dim=-1).to(torch.int32)


def shift_ids(
    input_ids: torch.Tensor, last_rows: torch.Tensor, drafts: torch.Tensor
) -> torch.Tensor:
    """Move every sequence's token window on by one, its draft last.

    ``q r s t`` with draft ``u`` becomes ``r s t u``.

    Args:
        input_ids: [T] int32. last_rows: [R] int64, the last row of each sequence. drafts: [R]
            int32.
    """
    moved = input_ids.roll(-1)  # what crosses into the next sequence is overwritten here
    moved[last_rows] = drafts.to(moved.dtype)
    return moved


def shift_states(
    states: torch.Tensor, outputs: torch.Tensor, last_rows: torch.Tensor
) -> torch.Tensor:
    """Move every sequence's state window on by one, its last row filled with the pass's last
    output.

    Args:
        states: [T, H] what the pass read. outputs: [T, H] what it returned, possibly the same
            tensor.
        last_rows: [R] int64.
    """
    moved = states.roll(-1, dims=0)
    moved[last_rows] = outputs[last_rows].to(moved.dtype)
    return moved
