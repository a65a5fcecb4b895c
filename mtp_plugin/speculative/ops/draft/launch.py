"""Grids of the draft-step kernels: two launches per draft, one per state window moved on."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.kernels.top_k import Top1Partials, split, top1_partials
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.logit_rows import DrawnRows, ThinkingRule
from mtp_plugin.speculative.ops.draft import reference
from mtp_plugin.speculative.ops.draft.edited_kernel import edited_top1_kernel
from mtp_plugin.speculative.ops.draft.kernel import local_kernel, merge_kernel, place_kernel
from mtp_plugin.speculative.ops.draft.states_kernel import place_states_kernel
from mtp_plugin.speculative.step import DraftOutput, SlotRows

UNBOUNDED = 2**62
APART, SHARED, COLUMNS = 32, 256, 64
"""Requests and columns of states that a program holds at a time: where outputs have memory of their
own, and where every program goes through all requests, chunk after chunk."""


def propose(logits: torch.Tensor, place: DraftOutput) -> None:
    """As at the door."""
    partials = top1_partials(logits)
    _place(partials.values, partials.ids, partials.num_pieces, place.vocab_ids, place)


def propose_edited(
    logits: torch.Tensor,
    place: DraftOutput,
    rows: DrawnRows,
    slots: SlotRows,
    behind: DrawnRows | None,
    thinking: ThinkingRule | None,
) -> None:
    """As at the door, in as many launches as :func:`propose`."""
    partials = _edited_partials(logits, place, rows, slots)
    _place(
        partials.values,
        partials.ids,
        partials.num_pieces,
        place.vocab_ids,
        place,
        behind=behind,
        slots=slots,
        thinking=thinking,
    )


def _edited_partials(
    logits: torch.Tensor, place: DraftOutput, rows: DrawnRows, slots: SlotRows
) -> Top1Partials:
    """As `top1_partials`, of edited logits."""
    pools = slots.as_drafts_read().pools
    if pools is None:
        return top1_partials(logits)
    expect_reachable(edited_top1_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    piece, pieces, block = split(num_rows, vocab)
    partials = Top1Partials.unwritten(num_rows, vocab, logits.device)
    drafts = rows.drafts
    edited_top1_kernel[(num_rows, pieces)](
        # inputs
        logits,
        slots.table,
        slots.slot_ids,
        pools.bias,
        pools.allowed,
        pools.counts,
        pools.seen,
        place.drafts if drafts is None else drafts,
        partials.ids if place.vocab_ids is None else place.vocab_ids,
        # outputs
        partials.values,
        partials.ids,
        # sizes
        logits.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        0 if drafts is None else drafts.stride(0),
        0 if drafts is None else rows.column,
        pools.vocab_size,
        vocab,
        piece,
        pieces,
        # constants
        HAS_VOCAB_IDS=place.vocab_ids is not None,
        BLOCK=block,
        num_warps=8,
        **pdl_options(logits.device),
    )
    return partials


def place_drafts(
    drafts: torch.Tensor,
    place: DraftOutput,
    behind: DrawnRows | None,
    slots: SlotRows | None,
    thinking: ThinkingRule | None,
) -> None:
    """As at the door, in one launch."""
    _place(
        drafts,
        drafts.contiguous(),
        1,
        None,
        place,
        is_drawn=True,
        behind=behind,
        slots=slots,
        thinking=thinking,
    )


def _place(
    values: torch.Tensor,
    ids: torch.Tensor,
    num_pieces: int,
    vocab_ids: torch.Tensor | None,
    place: DraftOutput,
    *,
    is_drawn: bool = False,
    behind: DrawnRows | None = None,
    slots: SlotRows | None = None,
    thinking: ThinkingRule | None = None,
) -> None:
    """Write the best of every row's pieces, or what was drawn or must come, where it is read, and
    ban what must not come behind it."""
    unused = ids
    bans = None if behind is None or slots is None else slots.bans
    pools = None if bans is None or slots is None else slots.pools
    length = 1 if thinking is None else thinking.end_ids.numel()
    ahead = None if behind is None else behind.ahead
    place_kernel[(ids.shape[0],)](
        values,
        ids,
        place.drafts,
        place.next_tokens,
        place.shifted_ids if place.shifted_ids is not None else unused,
        place.last_rows.contiguous() if place.last_rows is not None else unused,
        place.positions if place.positions is not None else unused,
        place.kv_lens if place.kv_lens is not None else unused,
        vocab_ids if vocab_ids is not None else unused,
        unused if behind is None else behind.positions,
        unused if ahead is None else ahead,
        unused if slots is None else slots.table,
        unused if slots is None else slots.slot_ids,
        unused if pools is None else pools.words,
        unused if bans is None else bans.allowed,
        unused if bans is None else bans.hidden,
        unused if thinking is None else thinking.end_ids,
        unused if thinking is None else thinking.next_places,
        num_pieces,
        place.drafts.stride(0),
        place.next_tokens.stride(0),
        place.column,
        UNBOUNDED if place.max_position is None else place.max_position,
        0 if behind is None else behind.positions.stride(0),
        0 if ahead is None else ahead.stride(0),
        0 if slots is None else slots.table.stride(0),
        0 if slots is None else slots.slot_ids.stride(0),
        0 if pools is None else pools.vocab_size,
        -1 if thinking is None else thinking.begin_token,
        -1 if thinking is None else thinking.end_token,
        length,
        PIECES=triton.next_power_of_2(num_pieces),
        SHIFT=place.shifted_ids is not None,
        ADVANCE=place.positions is not None,
        HAS_KV=place.kv_lens is not None,
        HAS_VOCAB_IDS=vocab_ids is not None,
        IS_DRAWN=is_drawn,
        HAS_BANS=bans is not None,
        HAS_THINKING=thinking is not None,
        LANES=triton.next_power_of_2(length),
        HAS_AHEAD=ahead is not None,
        STOPS=MAX_STOP_IDS,
        WORDS=MAX_BAD_WORDS,
        LENGTH=MAX_BAD_WORD_LEN,
        num_warps=1,
        **pdl_options(ids.device),
    )


def draft_argmax(logits: torch.Tensor) -> torch.Tensor:
    """As at the door."""
    drafts = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    _merge_pieces(top1_partials(logits), None, drafts, 0)
    return drafts


def local_top1(
    logits: torch.Tensor, first_id: int, num_ids: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As at the door."""
    rows, device = logits.shape[0], logits.device
    values = torch.empty(rows, dtype=torch.float32, device=device)
    ids = torch.empty(rows, dtype=torch.int32, device=device)
    _merge_pieces(top1_partials(logits[:, :num_ids]), values, ids, first_id)
    return values, ids


def merge_top1(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As at the door, one launch after the ranks' pairs were gathered."""
    ranks, rows = values.shape
    drafts = torch.empty(rows, dtype=torch.int32, device=values.device)
    merge_kernel[(rows,)](
        values.contiguous(),
        ids.contiguous(),
        drafts,
        rows,
        ranks,
        RANKS=triton.next_power_of_2(ranks),
        num_warps=1,
    )
    return drafts


def _merge_pieces(
    partials: Top1Partials, values: torch.Tensor | None, ids: torch.Tensor, first_id: int
) -> None:
    """The best of each row's pieces: its id, counted from ``first_id``, and its value."""
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


def place_last_states(
    states: torch.Tensor, outputs: torch.Tensor, last_rows: torch.Tensor, offset: int
) -> None:
    """As at the door, in one launch; memory that overlaps in other ways than a window does, and
    rows with gaps, are left to torch."""
    expect_reachable(place_states_kernel, "states", states)
    requests, hidden = last_rows.shape[0], states.shape[1]
    shares = _share_memory(states, outputs)
    if (shares and not _is_window(states, outputs, offset)) or not _has_plain_rows(states, outputs):
        reference.place_last_states(states, outputs, last_rows, offset)
        return
    rows = min(SHARED if shares else APART, triton.next_power_of_2(requests))
    chunks = triton.cdiv(requests, rows)
    block = min(COLUMNS, triton.next_power_of_2(hidden))
    # chunk after chunk it runs long enough that an overlapping launch costs more than it saves
    timing = {"PDL": False} if shares else pdl_options(states.device)
    place_states_kernel[(triton.cdiv(hidden, block), 1 if shares else chunks)](
        # inputs
        outputs,
        last_rows.contiguous(),
        # outputs
        states,
        # sizes
        requests,
        hidden,
        outputs.stride(0),
        states.stride(0),
        offset,
        chunks if shares else 1,
        # constants
        REQUESTS=rows,
        BLOCK=block,
        num_warps=8,
        **timing,
    )


def _share_memory(states: torch.Tensor, outputs: torch.Tensor) -> bool:
    return states.untyped_storage().data_ptr() == outputs.untyped_storage().data_ptr()


def _is_window(states: torch.Tensor, outputs: torch.Tensor, offset: int) -> bool:
    """Whether ``outputs`` are rows of ``states`` from at most row ``offset`` on."""
    ahead = outputs.storage_offset() - states.storage_offset()
    return (
        outputs.dtype == states.dtype
        and outputs.stride() == states.stride()
        and ahead % states.stride(0) == 0
        and 0 <= ahead // states.stride(0) <= offset
    )


def _has_plain_rows(states: torch.Tensor, outputs: torch.Tensor) -> bool:
    """Whether both are rows of neighbouring elements, and no two rows of states are one."""
    return states.stride(1) == outputs.stride(1) == 1 and states.stride(0) >= states.shape[1]
