"""Logits processing in torch: bias, allowed ids, penalties and disallowed next tokens."""

from __future__ import annotations

import torch

from mtp_plugin.ops.logit_rows.rows import LogitRows
from mtp_plugin.ops.logits_processor_state import (
    MOST_COUNTED,
    WORD_BITS,
    LogitsProcessorState,
    bit_of,
)
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.options import OPTIONS

LOGITS_PROCESSING_OPTIONS = frozenset(
    name for name, option in OPTIONS.items() if option.edits_logits and not option.enabled_by
)
"""Options of a request that this module applies; the others need a config that enables them."""


def process_logits(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    *,
    vocab_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply bias, allowed ids and penalties to logits [N, V]; float32, NaN as -inf.

    Args:
        vocab_ids: [V] token id of each column; None: column i is id i.
    """
    values = _usable(logits.to(torch.float32))
    pools = slots.pools
    if pools is None:
        return values
    requests = slice(0, rows.num_requests)
    owners = rows.owners()[0]
    ids = torch.arange(values.shape[1], device=values.device) if vocab_ids is None else vocab_ids
    ids = ids.to(torch.int64)

    row = slots.read("bias_row", requests)[owners]
    bias = pools.bias[row.clamp_min(0).to(torch.int64)][:, ids]
    values = _usable(values + torch.where(row.unsqueeze(1) >= 0, bias, 0.0))

    row = slots.read("allowed_row", requests)[owners]
    is_allowed = _bits(pools.allowed, row, ids) | (row < 0).unsqueeze(1)
    values = values.masked_fill(~is_allowed, -torch.inf)
    return apply_penalties(values, ids, rows, slots, pools)


def apply_penalties(
    values: torch.Tensor,
    ids: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    pools: LogitsProcessorState,
    *,
    scales_last: bool = False,
) -> torch.Tensor:
    """Apply penalties to values [N, V] float32 of ids [V] int64; NaN of the result is -inf.

    Args:
        scales_last: the repetition penalty scales after the other two are subtracted.
    """
    requests = slice(0, rows.num_requests)
    owners, _, num_before = rows.owners()
    row = slots.read("count_row", requests)[owners]
    counts = pools.counts[row.clamp_min(0).to(torch.int64)][:, ids].to(torch.int32) & MOST_COUNTED
    seen = _bits(pools.seen, row, ids)
    if rows.drafts is not None and rows.drafts.numel():
        generation = (owners - rows.num_contexts).clamp_min(0)
        for column in range(rows.drafts.shape[1]):
            is_before = (column < num_before) & (owners >= rows.num_contexts)
            hit = (rows.drafts[generation, column].unsqueeze(1) == ids) & is_before.unsqueeze(1)
            counts += hit.to(torch.int32)
            seen |= hit
    repetition, presence, frequency = (
        slots.read(name, requests)[owners].unsqueeze(1)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)

    penalised = values if scales_last else scaled(values)
    penalised = penalised - torch.where(counts > 0, presence, 0.0)
    penalised = penalised - frequency * counts.clamp_max(MOST_COUNTED).to(torch.float32)
    penalised = _usable(scaled(penalised) if scales_last else penalised)
    return torch.where((row >= 0).unsqueeze(1), penalised, values)


def _usable(values: torch.Tensor) -> torch.Tensor:
    """Replace NaN by -inf: a masked value plus infinity is NaN and stays masked."""
    return values.masked_fill(torch.isnan(values), -torch.inf)


def _bits(pool: torch.Tensor, row: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Bits of ids in rows of a pool [N, V] bool; all False for a row below 0."""
    words = pool[row.clamp_min(0).to(torch.int64)][:, ids // WORD_BITS]
    return (words & bit_of(ids) != 0) & (row >= 0).unsqueeze(1)


def early_stops(rows: LogitRows, slots: SlotRows) -> torch.Tensor:
    """The stop ids that ``min_tokens`` disallows in every row [N, P] int64; -1: none."""
    requests = slice(0, rows.num_requests)
    owners, indices, _ = rows.owners()
    first = slots.read("prompt_len", requests).to(torch.int64) + slots.read("min_tokens", requests)
    early = indices < first[owners]
    stops = slots.read("stop_ids", requests).to(torch.int64)[owners]
    return torch.where(early.unsqueeze(1), stops, -1)


def disallowed_tokens(rows: LogitRows, slots: SlotRows) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that must not come next in every row; -1: none.

    Returns:
        The stop ids that ``min_tokens`` disallows [N, P], unless no allowed id would remain, and
        the ids that would complete a bad word [N, words].
    """
    requests = slice(0, rows.num_requests)
    owners, _, num_before = rows.owners()
    stops = early_stops(rows, slots)
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
    pool_row = row.clamp_min(0).to(torch.int64)
    ids = torch.cat([stops, words], dim=1)
    width = (pools.allowed.shape[1] - 1) * WORD_BITS
    known = ids.clamp(0, width - 1)
    bits = pools.allowed[pool_row].gather(1, known // WORD_BITS)
    taken = (bits & bit_of(known) != 0) & (ids >= 0) & (ids < width)
    left = pools.allowed[pool_row, -1] - (taken & _is_first(ids)).sum(dim=1)
    yields = (left <= 0) & (row >= 0)
    return torch.where(yields.unsqueeze(1), -1, stops), words


def update_draft_mask(rows: LogitRows, slots: SlotRows) -> None:
    """Update the draft masks for the drafts that these rows propose, one per request.

    Ids masked for the previous draft are allowed again. Requests without a row of allowed ids have
    no draft mask.
    """
    pools, draft_mask = slots.pools, slots.draft_mask
    if pools is None or draft_mask is None:
        return
    vocab = pools.vocab_size
    stops, words = disallowed_tokens(rows, slots)
    ids = torch.cat([stops, words], dim=1)
    row = slots.read("allowed_row", slice(0, rows.num_requests)).to(torch.int64)
    mine = (row >= 0).unsqueeze(1)
    pool_row = row.clamp_min(0)

    old = draft_mask.masked_ids[pool_row].to(torch.int64)
    _flip(draft_mask.allowed, pool_row, old, mine & (old >= 0))
    ids = torch.where(mine & (ids >= 0) & (ids < vocab), ids, -1)
    bits = draft_mask.allowed[pool_row].gather(1, ids.clamp_min(0) // WORD_BITS)
    is_set = (bits & bit_of(ids.clamp_min(0)) != 0) & (ids >= 0) & _is_first(ids)
    _flip(draft_mask.allowed, pool_row, ids, is_set)
    kept = torch.where(is_set, ids, -1).to(draft_mask.masked_ids.dtype)
    spare = draft_mask.masked_ids.shape[0] - 1  # takes the writes of the other requests
    draft_mask.masked_ids[torch.where(row >= 0, row, spare)] = kept


def _is_first(ids: torch.Tensor) -> torch.Tensor:
    """Whether each of the ids [N, M] is the first of its value in its row."""
    return ~(ids.unsqueeze(2) == ids.unsqueeze(1)).tril(-1).any(dim=2)


def _flip(words: torch.Tensor, row: torch.Tensor, ids: torch.Tensor, flips: torch.Tensor) -> None:
    """Flip the bits of distinct ids [N, M] in rows [N] of a pool of words."""
    known = ids.clamp_min(0)
    # bits of one word are distinct, so their sum is their union, also if it wraps
    turned = torch.zeros_like(words)
    where = row.unsqueeze(1).expand_as(ids), known // WORD_BITS
    turned.index_put_(where, torch.where(flips, bit_of(known), 0), accumulate=True)
    words.bitwise_xor_(turned)


def _tokens_before(
    rows: LogitRows,
    slots: SlotRows,
    owners: torch.Tensor,
    num_before: torch.Tensor,
    length: int,
) -> torch.Tensor:
    """The ``length`` tokens before each row's token [N, length] int64: the slot's recent tokens,
    then draft tokens; -1 where there is none."""
    recent = slots.read("recent", slice(0, rows.num_requests)).to(torch.int64)[owners]
    tokens = recent
    if rows.drafts is not None and rows.drafts.numel():
        generation = (owners - rows.num_contexts).clamp_min(0)
        tokens = torch.cat([recent, rows.drafts.to(torch.int64)[generation]], dim=1)
    ends = recent.shape[1] + num_before
    columns = ends.unsqueeze(1) + torch.arange(-length, 0, device=ends.device)
    missing = torch.full_like(tokens[:, :1], -1)
    tokens = torch.cat([tokens, missing], dim=1)
    return tokens.gather(1, columns.clamp_max(tokens.shape[1] - 1))
