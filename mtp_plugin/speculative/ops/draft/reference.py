"""What happens between two passes of the draft loop, in torch."""

from __future__ import annotations

from typing import Any

import torch

from mtp_plugin.kernels.checks import expect_output
from mtp_plugin.speculative.step import DraftColumn, expect_vocab


def propose(logits: torch.Tensor, place: DraftColumn, scratch: Any | None = None) -> None:  # noqa: ARG001
    """The draft of each row of ``logits`` [R, V], written to every place that reads it.

    Where the place has ``vocab_ids``, the logits are those of a cut vocabulary [R, V'] and a draft
    is the id of its column: columns of ``b d`` propose ``d`` where the second is the highest.

    Args:
        scratch: for implementations that reduce in two launches: ``Top1Partials.unwritten`` of
            :mod:`mtp_plugin.kernels.top_k` for the logits' sizes. With it, and with outputs handed
            in, the ops of this module allocate nothing there.

    Raises:
        TensorContractError: logits whose columns are not one per id of ``vocab_ids``.
    """
    if place.vocab_ids is None:
        place.write(draft_argmax(logits))
        return
    expect_vocab(logits, place.vocab_ids)
    place.write(place.vocab_ids.index_select(0, draft_argmax(logits)))


def draft_argmax(
    logits: torch.Tensor,
    out: torch.Tensor | None = None,
    scratch: Any | None = None,  # noqa: ARG001
) -> torch.Tensor:
    """The draft of each row [N] int32: highest value, lowest id on ties, NaN as -inf.

    Args:
        out: takes the drafts, and is given back. None: a new tensor. scratch: as :func:`propose`.

    Raises:
        TensorContractError: ``out`` of another size, type or device.
    """
    if out is not None:
        expect_output("drafts", out, (logits.shape[0],), torch.int32, logits.device)
    drafts = logits.masked_fill(torch.isnan(logits), -torch.inf).argmax(dim=-1).to(torch.int32)
    return drafts if out is None else out.copy_(drafts)


def local_top1(
    logits: torch.Tensor,
    first_id: int,
    num_ids: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    scratch: Any | None = None,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's best (value, global id) of each row, for a vocabulary split over ranks.

    Args:
        logits: [R, V_local] this rank's columns; those at or past ``num_ids`` are padding.
        first_id: global id of the first column. num_ids: real columns of this rank.
        out: values and ids, which take the result and are given back. None: new tensors.
        scratch: as :func:`propose`, for ``num_ids`` columns.

    Returns:
        values [R] float32 and ids [R] int32; ties go to the lowest id, a rank without columns gives
        -inf.

    Raises:
        TensorContractError: ``out`` of another size, type or device.
    """
    rows = logits.shape[0]
    if out is None:
        values = torch.empty(rows, dtype=torch.float32, device=logits.device)
        ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    else:
        values, ids = out
        expect_output("top1, values", values, (rows,), torch.float32, logits.device)
        expect_output("top1, ids", ids, (rows,), torch.int32, logits.device)
    if num_ids == 0:
        return values.fill_(-torch.inf), ids.fill_(first_id)
    real = logits[:, :num_ids]
    best = draft_argmax(real)
    of_best = real.gather(1, best.to(torch.int64).unsqueeze(1)).squeeze(1).to(torch.float32)
    values.copy_(of_best.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf))
    return values, ids.copy_(best + first_id)


def merge_top1(
    values: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The drafts of a split vocabulary [R] int32: highest value over ranks, lowest id on ties.

    Args:
        values: [ranks, R] float32, ids: [ranks, R] int32, of every rank's :func:`local_top1`.
        out: takes the drafts, and is given back. None: a new tensor.

    Raises:
        TensorContractError: ``out`` of another size, type or device.
    """
    if out is not None:
        expect_output("drafts", out, (values.shape[1],), torch.int32, values.device)
    best = values.amax(dim=0, keepdim=True)
    candidates = ids.masked_fill(values != best, torch.iinfo(torch.int32).max)
    drafts = candidates.amin(dim=0)
    return drafts if out is None else out.copy_(drafts)


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
