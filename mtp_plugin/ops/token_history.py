"""Update what the slots and pools of requests keep of their generated tokens."""

from __future__ import annotations

import torch

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import INTEGERS, AtLeast, expect_tensor
from mtp_plugin.ops.logit_rows import LogitRows, update_draft_mask
from mtp_plugin.ops.logits_processor_state import MOST_COUNTED, WORD_BITS, bit_of
from mtp_plugin.ops.step import Accepted, SlotRows, check_slots


def update_token_history(
    accepted: Accepted,
    slots: SlotRows,
    positions: torch.Tensor | None = None,
    *,
    backend: Backend | str = "auto",
) -> None:
    """Append a step's accepted tokens to each request's history, in place.

    Column ``recent`` shifts in the request's last tokens. A request with a ``count_row`` also gets
    its tokens counted (up to 65535 times) and marked as seen. Rejected drafts change nothing.

    With ``positions`` and ``slots.draft_mask``, tokens that must not follow the accepted ones (bad
    words, stop ids before ``min_tokens``) are masked for the first draft.

    Without pools no request has logits processing, and nothing is written.

    Args:
        accepted: tokens [R, K+1] int32 with contiguous rows, and how many of each row count [R]
            integer, any stride.
        slots: of the requests; two requests that count do not share a row.
        positions: [R] integer, any stride: of the token that precedes each request's tokens.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout.
    """
    tokens, num_accepted = accepted.tokens, accepted.num_accepted
    expect_tensor(
        "accepted tokens", tokens, dtype=torch.int32, shape=("R", AtLeast(1)), contiguous="rows"
    )
    requests = int(tokens.shape[0])
    device = tokens.device
    expect_tensor("num_accepted", num_accepted, dtype=INTEGERS, shape=(requests,), device=device)
    check_slots(slots, requests, device)
    rows = None
    if positions is not None:
        rows = LogitRows(0, 1, positions, num_accepted)
        rows.check(device)
    if slots.pools is None:
        return
    slots.pools.check(device)
    if slots.draft_mask is None:
        rows = None
    else:
        slots.draft_mask.check(slots.pools)
    if requests:
        backend = Backend.of(backend, device, "backend")
        backend.dispatch(update_token_history_reference)(accepted, slots, rows)


def update_token_history_reference(
    accepted: Accepted, slots: SlotRows, rows: LogitRows | None
) -> None:
    """``rows``: the rows that propose the next step's first drafts; None: drafts are not masked."""
    requests = slice(0, accepted.num_accepted.shape[0])
    _shift_recent(accepted, slots, requests)
    pools = slots.pools
    if pools is None:
        return
    if rows is not None:
        update_draft_mask(rows, slots)
    row = slots.read("count_row", requests).to(torch.int64)
    for column in range(accepted.tokens.shape[1]):
        token = accepted.tokens[:, column].to(torch.int64)
        counts = (column < accepted.num_accepted) & (row >= 0)
        counts = counts & (token >= 0) & (token < pools.vocab_size)
        # a request that does not count adds 0 at a valid index
        index, at = torch.where(counts, row, 0), torch.where(counts, token, 0)
        old = pools.counts[index, at].to(torch.int32) & MOST_COUNTED
        more = (counts & (old < MOST_COUNTED)).to(torch.int16)
        pools.counts.index_put_((index, at), more, accumulate=True)
        word = at // WORD_BITS
        new = torch.where(counts, bit_of(at) & ~pools.seen[index, word], 0)
        pools.seen.index_put_((index, word), new, accumulate=True)


def _shift_recent(accepted: Accepted, slots: SlotRows, requests: slice) -> None:
    first = slots.columns.offset("recent")
    width = slots.columns["recent"].width
    recent = slots.read("recent", requests)
    tokens = torch.cat([recent, accepted.tokens], dim=1)
    indices = torch.arange(width, device=recent.device) + accepted.num_accepted.unsqueeze(1)
    moved = tokens.gather(1, indices.to(torch.int64))
    slots.table[slots.of(requests), first : first + width] = moved
