"""Rejection sampling: verify independently sampled drafts by acceptance probability."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import INTEGERS, SIGNED, expect_tensor
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.sampling.rejection_reference import (
    keep_draft_probs_reference,
    rejection_sample_reference,
)
from mtp_plugin.ops.sampling.types import (
    DRAFT_COLUMNS,
    STEP_COLUMN,
    ProposedDrafts,
    RejectionResult,
    TargetSamples,
    check_draft_probs,
    check_truncation,
)
from mtp_plugin.ops.step import SlotRows, check_slots, expect_vocab

_COLUMNS = [column.name for column in (*DRAFT_COLUMNS, STEP_COLUMN)]


def keep_draft_probs(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    truncation: torch.Tensor,
    draft_probs: torch.Tensor,
    *,
    vocab_ids: torch.Tensor | None = None,
    backend: Backend | str = "auto",
) -> None:
    """Write the distributions that independent drafts were sampled from to ``draft_probs``.

    Row ``rows.column`` of each request's slot takes the probabilities after temperature and
    truncation; ids that cannot be drafted keep their values. Greedy and coupled drafts write
    nothing.

    Args:
        logits, rows, slots, vocab_ids: as given to `sample_tokens`, one row per request.
        truncation: [N, TRUNCATION_SIZE] float32, as `sample_tokens` wrote it.
        draft_probs: [>= S, K, V] float32.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout, a slot table
            without the columns of drafts, or more than one row per request.
    """
    rows.check_logits(logits)
    if rows.num_rows != rows.num_requests:
        raise TensorContractError(
            f"drafts: expected a row of each of {rows.num_requests} requests, got {rows.num_rows}"
        )
    check_slots(slots, rows.num_requests, logits.device, _COLUMNS)
    check_truncation(truncation, rows.num_rows, logits.device)
    vocab = logits.shape[1] if vocab_ids is None else "V"
    check_draft_probs(draft_probs, slots, rows.column + 1, vocab, logits.device)
    if vocab_ids is not None:
        expect_vocab(logits, vocab_ids)
    if slots.pools is not None:
        slots.pools.check(logits.device, logits.shape[1] if vocab_ids is None else None)
    if logits.shape[0]:
        backend = Backend.of(backend, logits.device, "backend")
        backend.dispatch(keep_draft_probs_reference)(
            logits, rows, slots, truncation, draft_probs, vocab_ids=vocab_ids
        )


def rejection_sample(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    drafts: ProposedDrafts,
    target: TargetSamples,
    *,
    by_block: bool = True,
    backend: Backend | str = "auto",
) -> RejectionResult:
    """Accept drafts by rejection sampling, for requests whose column ``verification`` says so.

    p is the target's distribution after temperature and truncation, q the draft's; a greedy draft
    has q = 1 at its token.

    **Rejection** (Leviathan et al. 2023): draft d is accepted with probability min(1, p(d) / q(d)),
    up to the first rejected one; the next token is sampled from the recovered distribution
    max(p - q, 0).

    **Block** (Sun et al. 2024): P is the joint probability of drafts 1..i, updated to
    min(P p(d) / q(d), 1), and r the mass of max(P p - q, 0) after them. The accepted drafts are the
    most that pass a test with probability r / (r + 1 - P), or P for the last one; the next token is
    sampled from max(P p - q, 0).

    After all drafts, and if the recovered distribution is empty, the next token is sampled from p.
    Absent drafts and drafts outside the vocabulary end the run, then p is sampled. In a row that
    forces an id, p and q are 1 at that id and at the draft: an equal draft is accepted, another one
    rejected, and the id follows.

    The column ``draft_step`` of every generation increases by one.

    Args:
        logits: [N, V] floating, contiguous rows with any stride between them.
        rows: the target's rows, of width K+1.
        slots: slots of the R requests; reads ``verification``, ``draft_sampling`` and the sampling
            options.
        drafts: the G*K drafts and, if any is independent, the distributions from
            `keep_draft_probs`.
        target: tokens and truncation of the same rows from `sample_tokens`.
        by_block: whether a request may use block verification; False saves the work for it.

    Returns:
        The number of accepted drafts [G] int32 and the tokens [N] int32, which `accept` takes as
        ``AcceptanceRules(choices=tokens, forced_matches=num_accepted)``.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout, another number of
            drafts, or a slot table without the columns of drafts.

    Source: Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding; Sun et
    al. 2024, Block Verification Accelerates Speculative Decoding.
    """
    rows.check_logits(logits)
    device, count = logits.device, rows.num_requests - rows.num_contexts
    num_drafts = count * (rows.width - 1)
    expect_tensor("draft_tokens", drafts.tokens, dtype=SIGNED, device=device)
    if drafts.tokens.numel() != num_drafts:
        raise TensorContractError(
            f"draft_tokens: expected G*K = {num_drafts} integer ids, got {drafts.tokens.numel()}: "
            f"{list(drafts.tokens.shape)}"
        )
    check_slots(slots, rows.num_requests, device, _COLUMNS)
    if slots.pools is not None:
        slots.pools.check(device, logits.shape[1])
    check_truncation(target.truncation, rows.num_rows, device)
    if drafts.probs is not None:
        check_draft_probs(drafts.probs, slots, rows.width - 1, logits.shape[1], device)
    expect_tensor(
        "target tokens", target.tokens, dtype=SIGNED, shape=(rows.num_rows,), device=device
    )
    for name, tensor, size, dtype in (
        ("draft_lens", drafts.lens, count, INTEGERS),
        ("forced_ids", target.forced_ids, rows.num_rows, SIGNED),
    ):
        if tensor is not None:
            expect_tensor(name, tensor, dtype=dtype, shape=(size,), device=device)
    if count == 0:
        return RejectionResult(target.tokens.new_empty(0, dtype=torch.int32), target.tokens)
    backend = Backend.of(backend, device, "backend")
    return backend.dispatch(rejection_sample_reference)(
        logits, rows, slots, drafts, target, by_block=by_block
    )
