"""Sample one token per row of logits."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.row_sums import RowSums
from mtp_plugin.ops.sampling.sample_reference import sample_tokens_reference
from mtp_plugin.ops.sampling.types import DRAFT_COLUMNS, Role, check_truncation
from mtp_plugin.ops.step import SlotRows, check_slots, expect_vocab

SAMPLING_OPTIONS = frozenset({"temperature", "top_k", "top_p", "min_p", "seed"})
"""Options of a request that `sample_tokens` applies."""


def sample_tokens(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    *,
    role: Role = Role.TARGET,
    as_drafts: bool = False,
    vocab_ids: torch.Tensor | None = None,
    truncation: torch.Tensor | None = None,
    sums: RowSums | None = None,
    fills: torch.dtype | None = None,
    checked: bool = False,
    backend: Backend | str = "auto",
) -> torch.Tensor:
    """Sample one token per row with the temperature, top-k, top-p, min-p and seed of its request.

    See the package's documentation for the order of steps. NaN counts as -inf. Ties go to the
    lowest id; a row that holds +inf returns the lowest such id.

    The token is argmax(score + Gumbel noise) over the kept tokens, which is a sample of their
    softmax (Gumbel-max trick). The noise depends on seed, token id and token index alone.

    Args:
        logits: [N, V] floating, contiguous rows with any stride between them.
        rows: the request and the token index of each row.
        slots: slots of the R requests. Their pools process the logits first; -inf stays -inf.
        role: purpose of the random numbers; numbers of different roles are independent.
        as_drafts: the rows propose drafts, which the column ``draft_sampling`` chooses: coupled
            ones sample with ``role``, independent ones with `Role.PLAIN_DRAFT`, greedy ones take
            the argmax.
        vocab_ids: [V] int32, ascending: token ids of the columns, which are returned and key the
            noise. None: column i is id i.
        truncation: [N, TRUNCATION_SIZE] float32, written: the kept tokens of every row.
        sums: written: log-sum-exp partials of rows whose request returns log-probabilities. Only
            for rows of the target without pools.
        fills: for an engine that embeds every id: the dtype of the tokens, 0 in place of -1.
        checked: tensors of these shapes, dtypes and layouts have passed before, and pass unchecked.

    Returns:
        [N] int32; -1 for a row without finite value or +inf.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout; ``sums`` for
            processed rows or rows of drafts.

    Source: Philox-4x32-10 (Salmon et al. 2011); top-p (Holtzman et al. 2020); min-p (Nguyen et al.
    2024); coupled drafts (Daliri et al. 2024, drafter-invariant speculative decoding).
    """
    if not checked:
        _check(logits, rows, slots, role, as_drafts, vocab_ids, truncation, sums)
    backend = Backend.of(backend, logits.device, "backend")
    return backend.dispatch(sample_tokens_reference)(
        logits,
        rows,
        slots,
        role=role,
        as_drafts=as_drafts,
        vocab_ids=vocab_ids,
        truncation=truncation,
        sums=sums,
        fills=fills,
    )


def _check(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    role: Role,
    as_drafts: bool,
    vocab_ids: torch.Tensor | None,
    truncation: torch.Tensor | None,
    sums: RowSums | None,
) -> None:
    rows.check_logits(logits)
    named = [column.name for column in DRAFT_COLUMNS] if as_drafts else ()
    check_slots(slots, rows.num_requests, logits.device, named)
    if truncation is not None:
        check_truncation(truncation, rows.num_rows, logits.device)
    if sums is not None:
        if slots.pools is not None:
            raise TensorContractError(
                "sums: expected slots without pools, since sums are of unprocessed rows, got pools"
            )
        if role is not Role.TARGET or as_drafts or vocab_ids is not None:
            raise TensorContractError(
                f"sums: expected rows of the target, got role {role.name}, as_drafts {as_drafts} "
                f"and {'no' if vocab_ids is None else 'some'} vocab_ids"
            )
        sums.check(logits)
    if vocab_ids is not None:
        expect_vocab(logits, vocab_ids)
    if slots.pools is not None:
        slots.pools.check(logits.device, logits.shape[1] if vocab_ids is None else None)
