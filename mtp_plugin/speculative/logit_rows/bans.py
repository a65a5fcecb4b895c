"""Which ids must not come next, in torch: the CPU path and the oracle of the kernels."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.edit_pools import WORD_BITS, bit_of
from mtp_plugin.speculative.logit_rows.contract import DrawnRows
from mtp_plugin.speculative.step import SlotRows


def banned(rows: DrawnRows, slots: SlotRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every row the stop ids that would come too early [N, P], unless no allowed id would be
    left, and the last tokens of bad words that would be completed [N, words]; -1 where there is
    none."""
    requests = slice(0, rows.num_requests)
    owners, indices, num_before = rows.owners()
    first = slots.read("prompt_len", requests).to(torch.int64) + slots.read("min_tokens", requests)
    early = indices < first[owners]
    stops = slots.read("stop_ids", requests).to(torch.int64)[owners]
    stops = torch.where(early.unsqueeze(1), stops, -1)
    pools = slots.pools
    if pools is None:
        return stops, stops[:, :0]
    row = slots.read("words_row", requests)[owners]
    listed = pools.words[row.clamp_min(0).to(torch.int64)].to(torch.int64)  # [N, words, length]
    before = _tokens_before(rows, slots, owners, num_before, listed.shape[2] - 1)
    parts = listed[:, :, :-1]
    begins = ((parts < 0) | (parts == before.unsqueeze(1))).all(dim=2)
    words = torch.where(begins & (row >= 0).unsqueeze(1), listed[:, :, -1], -1)

    row = slots.read("allowed_row", requests)[owners]
    place = row.clamp_min(0).to(torch.int64)
    ids = torch.cat([stops, words], dim=1)
    width = (pools.allowed.shape[1] - 1) * WORD_BITS
    known = ids.clamp(0, width - 1)
    bits = pools.allowed[place].gather(1, known // WORD_BITS)
    taken = (bits & bit_of(known) != 0) & (ids >= 0) & (ids < width)
    left = pools.allowed[place, -1] - (taken & _is_first(ids)).sum(dim=1)
    yields = (left <= 0) & (row >= 0)
    return torch.where(yields.unsqueeze(1), -1, stops), words


def ban_next(rows: DrawnRows, slots: SlotRows) -> None:
    """Let drafts that these rows propose, one of each request, be no ids that must not come there;
    what was banned before them no longer is. Of requests without a row of allowed ids nothing is
    kept."""
    pools, bans = slots.pools, slots.bans
    if pools is None or bans is None:
        return
    vocab = pools.vocab_size
    stops, words = banned(rows, slots)
    ids = torch.cat([stops, words], dim=1)
    row = slots.read("allowed_row", slice(0, rows.num_requests)).to(torch.int64)
    mine = (row >= 0).unsqueeze(1)
    place = row.clamp_min(0)

    old = bans.hidden[place].to(torch.int64)
    _flip(bans.allowed, place, old, mine & (old >= 0))
    ids = torch.where(mine & (ids >= 0) & (ids < vocab), ids, -1)
    bits = bans.allowed[place].gather(1, ids.clamp_min(0) // WORD_BITS)
    is_set = (bits & bit_of(ids.clamp_min(0)) != 0) & (ids >= 0) & _is_first(ids)
    _flip(bans.allowed, place, ids, is_set)
    kept = torch.where(is_set, ids, -1).to(bans.hidden.dtype)
    spare = bans.hidden.shape[0] - 1  # nobody reads what others leave there
    bans.hidden[torch.where(row >= 0, row, spare)] = kept


def _is_first(ids: torch.Tensor) -> torch.Tensor:
    """Which ids [N, M] stand for the first time in their row."""
    return ~(ids.unsqueeze(2) == ids.unsqueeze(1)).tril(-1).any(dim=2)


def _flip(words: torch.Tensor, row: torch.Tensor, ids: torch.Tensor, flips: torch.Tensor) -> None:
    """Turn the bits of some ids [N, M] over in rows [N] of a pool of words; no id stands twice."""
    known = ids.clamp_min(0)
    # the bits of one word are apart: their sum is all of them, whatever wraps
    turned = torch.zeros_like(words)
    where = row.unsqueeze(1).expand_as(ids), known // WORD_BITS
    turned.index_put_(where, torch.where(flips, bit_of(known), 0), accumulate=True)
    words.bitwise_xor_(turned)


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
