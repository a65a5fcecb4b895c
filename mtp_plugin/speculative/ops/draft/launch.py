"""Grids of the draft-step kernels: two launches per draft."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.kernels.checks import expect_output
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.kernels.top_k import Top1Partials, top1_partials
from mtp_plugin.speculative.ops.draft.kernel import local_kernel, merge_kernel, place_kernel
from mtp_plugin.speculative.step import DraftColumn, expect_vocab

UNBOUNDED = 2**62


def propose(logits: torch.Tensor, place: DraftColumn, scratch: Top1Partials | None = None) -> None:
    """As the reference."""
    if place.vocab_ids is not None:
        expect_vocab(logits, place.vocab_ids)
    partials = top1_partials(logits, scratch)
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
        place.vocab_ids if place.vocab_ids is not None else unused,
        partials.num_pieces,
        place.drafts.stride(0),
        place.next_tokens.stride(0),
        place.column,
        UNBOUNDED if place.max_position is None else place.max_position,
        PIECES=triton.next_power_of_2(partials.num_pieces),
        SHIFT=place.shifted_ids is not None,
        ADVANCE=place.positions is not None,
        HAS_KV=place.kv_lens is not None,
        HAS_VOCAB_IDS=place.vocab_ids is not None,
        num_warps=1,
        **pdl_options(logits.device),
    )


def draft_argmax(
    logits: torch.Tensor, out: torch.Tensor | None = None, scratch: Top1Partials | None = None
) -> torch.Tensor:
    """As the reference: [N] int32."""
    drafts = _drafts(logits.shape[0], logits.device, out)
    _merge_pieces(top1_partials(logits, scratch), None, drafts, 0)
    return drafts


def local_top1(
    logits: torch.Tensor,
    first_id: int,
    num_ids: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    scratch: Top1Partials | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference; padding columns are never read."""
    rows, device = logits.shape[0], logits.device
    if out is None:
        values = torch.empty(rows, dtype=torch.float32, device=device)
        ids = torch.empty(rows, dtype=torch.int32, device=device)
    else:
        values, ids = out
        expect_output("top1, values", values, (rows,), torch.float32, device)
        expect_output("top1, ids", ids, (rows,), torch.int32, device)
    if num_ids == 0:
        return values.fill_(-torch.inf), ids.fill_(first_id)
    _merge_pieces(top1_partials(logits[:, :num_ids], scratch), values, ids, first_id)
    return values, ids


def merge_top1(
    values: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As the reference, one launch after the ranks' pairs were gathered."""
    ranks, rows = values.shape
    drafts = _drafts(rows, values.device, out)
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


def _drafts(rows: int, device: torch.device, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return torch.empty(rows, dtype=torch.int32, device=device)
    expect_output("drafts", out, (rows,), torch.int32, device)
    return out


def _merge_pieces(
    partials: Top1Partials, values: torch.Tensor | None, ids: torch.Tensor, first_id: int
) -> None:
    """The best of each row's pieces: its id, counted from ``first_id``, and its value."""
    if ids.shape[0] == 0:
        return
    local_kernel[(ids.shape[0],)](
        partials.values,
        partials.ids,
        partials.values if values is None else values,
        ids,
        partials.num_pieces,
        first_id,
        PIECES=triton.next_power_of_2(partials.num_pieces),
        HAS_VALUES=values is not None,
        num_warps=1,
        **pdl_options(ids.device),
    )
