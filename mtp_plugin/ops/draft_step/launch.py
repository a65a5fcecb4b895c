"""Grids of the draft-step kernels: two launches per draft."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.batch import DraftColumn
from mtp_plugin.ops.draft_step.kernel import local_kernel, merge_kernel, place_kernel
from mtp_plugin.vocab_reduce import top1_partials

UNBOUNDED = 2**62


def propose(logits: torch.Tensor, place: DraftColumn) -> None:
    """The draft of each row of ``logits`` [R, V], written to every place that reads it."""
    partials = top1_partials(logits)
    requests = logits.shape[0]
    if requests == 0:
        return
    unused = partials.ids
    place_kernel[(requests,)](
        partials.values,
        partials.ids,
        place.drafts,
        place.next_tokens,
        place.shifted_ids if place.shifted_ids is not None else unused,
        place.last_rows if place.last_rows is not None else unused,
        place.positions if place.positions is not None else unused,
        place.kv_lens if place.kv_lens is not None else unused,
        partials.num_pieces,
        place.drafts.stride(0),
        place.next_tokens.stride(0),
        place.column,
        UNBOUNDED if place.max_position is None else place.max_position,
        PIECES=triton.next_power_of_2(partials.num_pieces),
        SHIFT=place.shifted_ids is not None,
        ADVANCE=place.positions is not None,
        HAS_KV=place.kv_lens is not None,
        num_warps=1,
    )


def draft_argmax(logits: torch.Tensor) -> torch.Tensor:
    """As the reference: [N] int32."""
    requests = logits.shape[0]
    drafts = torch.empty(requests, 1, dtype=torch.int32, device=logits.device)
    spare = torch.empty(requests, 2, dtype=torch.int32, device=logits.device)
    propose(logits, DraftColumn(drafts, spare, 0))
    return drafts.squeeze(1)


def local_top1(
    logits: torch.Tensor, first_id: int, num_ids: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference; padding columns are never read."""
    rows = logits.shape[0]
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if num_ids == 0:
        return values.fill_(-torch.inf), ids.fill_(first_id)
    partials = top1_partials(logits[:, :num_ids])
    if rows:
        local_kernel[(rows,)](
            partials.values,
            partials.ids,
            values,
            ids,
            partials.num_pieces,
            first_id,
            PIECES=triton.next_power_of_2(partials.num_pieces),
            num_warps=1,
        )
    return values, ids


def merge_top1(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As the reference, one launch after the ranks' pairs were gathered."""
    ranks, rows = values.shape
    drafts = torch.empty(rows, dtype=torch.int32, device=values.device)
    if rows:
        merge_kernel[(rows,)](
            values,
            ids,
            drafts,
            rows,
            ranks,
            RANKS=triton.next_power_of_2(ranks),
            num_warps=1,
        )
    return drafts
