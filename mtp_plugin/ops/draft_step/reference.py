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


def local_top1(
    logits: torch.Tensor, first_id: int, num_ids: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's best (value, global id) of each row, for a vocabulary split over ranks.

    Args:
        logits: [R, V_local] this rank's columns; those at or past ``num_ids`` are padding.
        first_id: global id of the first column. num_ids: real columns of this rank.

    Returns:
        values [R] float32 and ids [R] int32; ties go to the lowest id, a rank without columns gives
        -inf.
    """
    rows = logits.shape[0]
    if num_ids == 0:
        values = logits.new_full((rows,), -torch.inf, dtype=torch.float32)
        return values, torch.full_like(values, first_id, dtype=torch.int32)
    real = logits[:, :num_ids]
    ids = draft_argmax(real)
    values = real.gather(1, ids.to(torch.int64).unsqueeze(1)).squeeze(1).to(torch.float32)
    return values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), ids + first_id


def merge_top1(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The drafts of a split vocabulary [R] int32: highest value over ranks, lowest id on ties.

    Args:
        values: [ranks, R] float32, ids: [ranks, R] int32, of every rank's :func:`local_top1`.
    """
    best = values.amax(dim=0, keepdim=True)
    candidates = ids.masked_fill(values != best, torch.iinfo(torch.int32).max)
    return candidates.amin(dim=0)


def place_last_states(
    states: torch.Tensor, outputs: torch.Tensor, last_rows: torch.Tensor, offset: int
) -> None:
    """Move every sequence's state window on by one: an offset into a buffer with spare rows.

    The pass before read rows [offset - 1, ...); the next one reads rows [offset, ...), in which
    only the last row of each sequence is new: the pass's last output. All of them are read before
    any is written, since a layer may return its input.

    Args:
        states: [T' + K-1, H], written in place. outputs: [T', H], possibly a view of ``states``.
        last_rows: [R] int64. offset: passes done.
    """
    last = outputs[last_rows]
    states[last_rows + offset] = last.to(states.dtype)
