"""What requests want done to their logits, in torch: the CPU path and the oracle."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.edit_pools import MOST_COUNTED, WORD_BITS, EditPools, bit_of
from mtp_plugin.speculative.logit_rows.contract import DrawnRows
from mtp_plugin.speculative.step import SlotRows

EDITED_OPTIONS = frozenset(
    {
        "min_tokens",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "bad_token_ids",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "prompt_ignore_length",
    }
)
"""Options of a request for which logits are edited here."""


def edited(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    *,
    vocab_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits [N, V] as float32, NaN as -inf, as bias, allowed ids and penalties change them.

    Args:
        vocab_ids: [V] ids that the columns stand for; None: each for itself.
    """
    values = _usable(logits.to(torch.float32))
    pools = slots.pools
    if pools is None:
        return values
    requests = slice(0, rows.num_requests)
    owners, _, num_before = rows.owners()
    ids = torch.arange(values.shape[1], device=values.device) if vocab_ids is None else vocab_ids
    ids = ids.to(torch.int64)

    row = slots.read("bias_row", requests)[owners]
    bias = pools.bias[row.clamp_min(0).to(torch.int64)][:, ids]
    values = _usable(values + torch.where(row.unsqueeze(1) >= 0, bias, 0.0))

    row = slots.read("allowed_row", requests)[owners]
    is_allowed = _bits(pools.allowed, row, ids) | (row < 0).unsqueeze(1)
    values = values.masked_fill(~is_allowed, -torch.inf)
    return _penalised(values, ids, rows, slots, pools, owners, num_before)


def _penalised(
    values: torch.Tensor,
    ids: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    pools: EditPools,
    owners: torch.Tensor,
    num_before: torch.Tensor,
) -> torch.Tensor:
    requests = slice(0, rows.num_requests)
    row = slots.read("count_row", requests)[owners]
    counts = pools.counts[row.clamp_min(0).to(torch.int64)][:, ids].to(torch.int32) & MOST_COUNTED
    seen = _bits(pools.seen, row, ids)
    if rows.drafts is not None and rows.drafts.numel():
        generation = (owners - rows.num_contexts).clamp_min(0)
        for place in range(rows.drafts.shape[1]):
            is_before = (place < num_before) & (owners >= rows.num_contexts)
            hit = (rows.drafts[generation, place].unsqueeze(1) == ids) & is_before.unsqueeze(1)
            counts += hit.to(torch.int32)
            seen |= hit
    repetition, presence, frequency = (
        slots.read(name, requests)[owners].unsqueeze(1)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    penalised = torch.where(seen, repeated, values)
    penalised = penalised - torch.where(counts > 0, presence, 0.0)
    penalised = penalised - frequency * counts.clamp_max(MOST_COUNTED).to(torch.float32)
    return torch.where((row >= 0).unsqueeze(1), _usable(penalised), values)


def _usable(values: torch.Tensor) -> torch.Tensor:
    """NaN as -inf: what is masked is no number, whatever infinity is added to it."""
    return values.masked_fill(torch.isnan(values), -torch.inf)


def _bits(pool: torch.Tensor, row: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Bits of ids in rows of a pool [N, V] bool; of a row below 0 no bit counts."""
    words = pool[row.clamp_min(0).to(torch.int64)][:, ids // WORD_BITS]
    return (words & bit_of(ids) != 0) & (row >= 0).unsqueeze(1)
