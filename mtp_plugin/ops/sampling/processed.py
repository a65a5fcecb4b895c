"""Processed scores: what processed log-probabilities are computed from."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import SIGNED, expect_tensor
from mtp_plugin.ops.logit_rows import GREEDY_BELOW, LogitRows, process_logits
from mtp_plugin.ops.sampling.sample_reference import kept_scores
from mtp_plugin.ops.sampling.types import check_truncation
from mtp_plugin.ops.step import SlotRows, check_slots


def processed_scores(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    truncation: torch.Tensor,
    forced: torch.Tensor | None = None,
    *,
    backend: Backend | str = "auto",
) -> torch.Tensor:
    """Return the scores that every row's token was sampled from, before noise.

    They are (x - row maximum) / T of processed logits, -inf for tokens that top-k, top-p and min-p
    remove; for greedy requests T = 1 without truncation. In a row that forces an id, this id has
    score 0 and all others -inf; so has the lowest id with +inf. Their log-softmax are the processed
    log-probabilities.

    Args:
        logits, rows, slots: as given to `sample_tokens`.
        truncation: [N, TRUNCATION_SIZE] float32, as `sample_tokens` wrote it.
        forced: [N] signed integer: forced ids, -1: none. None: no row forces an id.

    Returns:
        [N, V] float32; unspecified for requests whose column ``logprobs`` is below 0.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout, or rows of drafts.
    """
    rows.check_logits(logits)
    if rows.ahead is not None or rows.column:
        raise TensorContractError("logit rows: expected those of the target, got rows of drafts")
    check_slots(slots, rows.num_requests, logits.device)
    check_truncation(truncation, rows.num_rows, logits.device)
    if forced is not None:
        expect_tensor("forced", forced, dtype=SIGNED, shape=(rows.num_rows,), device=logits.device)
    if slots.pools is not None:
        slots.pools.check(logits.device, logits.shape[1])
    backend = Backend.of(backend, logits.device, "backend")
    return backend.dispatch(processed_scores_reference)(logits, rows, slots, truncation, forced)


def processed_scores_reference(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    truncation: torch.Tensor,
    forced: torch.Tensor | None,
) -> torch.Tensor:
    owners = rows.owners()[0]
    temperature, min_p = (
        slots.read(name, slice(0, rows.num_requests))[owners] for name in ("temperature", "min_p")
    )
    values, highest = process_logits(logits, rows, slots), truncation[:, :1]
    scores = kept_scores(values, truncation, temperature, min_p)
    is_greedy = (temperature < GREEDY_BELOW).unsqueeze(1) & highest.isfinite()
    scores = torch.where(is_greedy, values - highest, scores)
    if forced is None:
        return scores
    ids = torch.arange(values.shape[1], device=values.device)
    at_forced = torch.where(ids == forced.unsqueeze(1), 0.0, -torch.inf)
    return torch.where((forced >= 0).unsqueeze(1), at_forced, scores)
