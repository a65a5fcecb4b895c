"""Apply penalties and the minimum number of tokens to logits in memory."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import expect_tensor
from mtp_plugin.ops.logit_rows import LogitRows, apply_penalties, early_stops
from mtp_plugin.ops.step import SlotRows, check_slots


def penalize_logits(
    logits: torch.Tensor, rows: LogitRows, slots: SlotRows, *, backend: Backend | str = "auto"
) -> None:
    """Penalize the tokens of the output in place, for an engine that edits logits by itself.

    The order is that of SGLang: the presence penalty and the frequency penalty are subtracted, then
    the repetition penalty scales. Ops that process logits as they load them scale first; the
    results are equal without a repetition penalty, or with it alone. With ``min_tokens`` above 0,
    stop ids become -inf in rows that sample a token before index ``prompt_len + min_tokens``. Draft
    tokens before a row count as output. A request without ``count_row`` has no penalties; nothing
    else is written.

    Args:
        logits: [N, V] float32, updated in place; rows do not overlap.
        rows: of the target, whose draft tokens precede later rows.
        slots: of the requests, with pools; reads ``count_row``, the three penalties,
            ``prompt_len``, ``min_tokens`` and ``stop_ids``, and of the pools counts and seen ids.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout, slots without
            pools, or rows of drafts.
    """
    expect_tensor("logits", logits, dtype=torch.float32)
    rows.check_logits(logits)
    if rows.ahead is not None or rows.column:
        raise TensorContractError("rows: expected those of the target, got rows of drafts")
    check_slots(slots, rows.num_requests, logits.device)
    if slots.pools is None:
        raise TensorContractError("penalize_logits: expected slots with pools, got None")
    slots.pools.check(logits.device, logits.shape[1])
    if logits.shape[0]:
        backend = Backend.of(backend, logits.device, "backend")
        backend.dispatch(penalize_logits_reference)(logits, rows, slots)


def penalize_logits_reference(logits: torch.Tensor, rows: LogitRows, slots: SlotRows) -> None:
    pools = slots.pools
    if pools is None:
        return
    vocab = logits.shape[1]
    ids = torch.arange(vocab, device=logits.device)
    values = apply_penalties(logits, ids, rows, slots, pools, scales_last=True)
    stops = early_stops(rows, slots)
    has_minimum = slots.read("min_tokens", slice(0, rows.num_requests))[rows.owners()[0]] > 0
    is_there = (stops >= 0) & (stops < vocab) & has_minimum.unsqueeze(1)
    ceiling = torch.where(is_there, -torch.inf, torch.inf)
    # the minimum does not change entries of padded ids, whatever id they were clamped to
    values = values.scatter_reduce(1, stops.clamp(0, vocab - 1), ceiling, "amin")
    logits.copy_(values)
