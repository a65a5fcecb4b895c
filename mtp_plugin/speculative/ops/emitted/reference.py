"""What follows from emitted tokens, in torch: the CPU path and the oracle."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.edit_pools import MOST_COUNTED, WORD_BITS, bit_of
from mtp_plugin.speculative.logit_rows import DrawnRows, ban_next
from mtp_plugin.speculative.step import Accepted, SlotRows


def note_emitted(accepted: Accepted, slots: SlotRows, rows: DrawnRows | None) -> None:
    """As at the door; ``rows``: that propose the first drafts behind."""
    requests = slice(0, accepted.num_accepted.shape[0])
    _shift_recent(accepted, slots, requests)
    pools = slots.pools
    if pools is None:
        return
    if rows is not None:
        ban_next(rows, slots)
    row = slots.read("count_row", requests).to(torch.int64)
    for column in range(accepted.tokens.shape[1]):
        token = accepted.tokens[:, column].to(torch.int64)
        counts = (column < accepted.num_accepted) & (row >= 0)
        counts = counts & (token >= 0) & (token < pools.vocab_size)
        # who does not count adds nothing, at any place
        place, at = torch.where(counts, row, 0), torch.where(counts, token, 0)
        old = pools.counts[place, at].to(torch.int32) & MOST_COUNTED
        more = (counts & (old < MOST_COUNTED)).to(torch.int16)
        pools.counts.index_put_((place, at), more, accumulate=True)
        word = at // WORD_BITS
        new = torch.where(counts, bit_of(at) & ~pools.seen[place, word], 0)
        pools.seen.index_put_((place, word), new, accumulate=True)


def _shift_recent(accepted: Accepted, slots: SlotRows, requests: slice) -> None:
    first = slots.columns.offset("recent")
    width = slots.columns["recent"].width
    recent = slots.read("recent", requests)
    tokens = torch.cat([recent, accepted.tokens], dim=1)
    places = torch.arange(width, device=recent.device) + accepted.num_accepted.unsqueeze(1)
    moved = tokens.gather(1, places.to(torch.int64))
    slots.table[slots.of(requests), first : first + width] = moved
