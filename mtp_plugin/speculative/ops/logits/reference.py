"""Which ids must not come next, in torch: the CPU path and the oracle."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.step import WORD_BITS, SlotRows, bit_of


def banned_masked(
    logits: torch.Tensor, rows: DrawnRows, slots: SlotRows
) -> AbstractContextManager[torch.Tensor]:
    """As at the door, in a copy."""
    words, stops, yields = _banned(rows, slots)
    vocab = logits.shape[1]
    stops = torch.where(yields.unsqueeze(1), -1, stops)
    banned = torch.cat([stops, words], dim=1)
    is_there = (banned >= 0) & (banned < vocab)
    ceiling = torch.where(is_there, -torch.inf, torch.inf).to(logits.dtype)
    # the minimum leaves entries of padded ids alone, whatever id they were clamped to
    return nullcontext(
        logits.scatter_reduce(
            1, banned.clamp(0, vocab - 1), ceiling, reduce="amin", include_self=True
        )
    )


def _banned(rows: DrawnRows, slots: SlotRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of every row the last tokens of bad words that would be completed [N, words], the stop ids
    that would come too early [N, P], both -1 where there is none, and whether the stop ids yield
    [N]: no allowed id would be left."""
    requests = slice(0, rows.num_requests)
    owners, indices, num_before = rows.owners()
    first = slots.read("prompt_len", requests).to(torch.int64) + slots.read("min_tokens", requests)
    early = indices < first[owners]
    stops = slots.read("stop_ids", requests).to(torch.int64)[owners]
    stops = torch.where(early.unsqueeze(1), stops, -1)
    pools = slots.pools
    none = torch.zeros(len(owners), dtype=torch.bool, device=stops.device)
    if pools is None:
        return stops[:, :0], stops, none
    row = slots.read("words_row", requests)[owners]
    listed = pools.words[row.clamp_min(0).to(torch.int64)].to(torch.int64)  # [N, words, length]
    before = _tokens_before(rows, slots, owners, num_before, listed.shape[2] - 1)
    parts = listed[:, :, :-1]
    begins = ((parts < 0) | (parts == before.unsqueeze(1))).all(dim=2)
    words = torch.where(begins & (row >= 0).unsqueeze(1), listed[:, :, -1], -1)

    row = slots.read("allowed_row", requests)[owners]
    place = row.clamp_min(0).to(torch.int64)
    banned = torch.cat([stops, words], dim=1)
    width = (pools.allowed.shape[1] - 1) * WORD_BITS
    known = banned.clamp(0, width - 1)
    bits = pools.allowed[place].gather(1, known // WORD_BITS)
    taken = (bits & bit_of(known) != 0) & (banned >= 0)
    taken &= banned < width
    # an id that stands twice is taken once
    twice = (banned.unsqueeze(2) == banned.unsqueeze(1)).tril(-1).any(dim=2)
    left = pools.allowed[place, -1] - (taken & ~twice).sum(dim=1)
    return words, stops, (left <= 0) & (row >= 0)


def _tokens_before(
    rows: DrawnRows,
    slots: SlotRows,
    owners: torch.Tensor,
    num_before: torch.Tensor,
    length: int,
) -> torch.Tensor:
    """The last ``length`` tokens in front of what each row draws [N, length] int64, -1 where there
    are none, or nobody told them: those of the slot, and drafts behind them."""
    recent = slots.read("recent", slice(0, rows.num_requests)).to(torch.int64)[owners]
    tokens = recent
    if rows.drafts is not None and rows.drafts.numel():
        generation = (owners - rows.num_contexts).clamp_min(0)
        tokens = torch.cat([recent, rows.drafts.to(torch.int64)[generation]], dim=1)
    ends = recent.shape[1] + num_before
    places = ends.unsqueeze(1) + torch.arange(-length, 0, device=ends.device)
    untold = torch.full_like(tokens[:, :1], -1)
    tokens = torch.cat([tokens, untold], dim=1)
    return tokens.gather(1, places.clamp_max(tokens.shape[1] - 1))
