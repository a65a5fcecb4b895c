"""The doors of judging by odds.

R requests, C contexts first, then G generations of K drafts; N rows of logits; V words; S slots.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.checks import expect_integers, is_integral
from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.ops.sampling.contract import CHOICE_COLUMNS, STEP_COLUMN, check_cuts
from mtp_plugin.speculative.ops.sampling.residual import reference
from mtp_plugin.speculative.ops.sampling.residual.contract import Judgement, check_draft_probs
from mtp_plugin.speculative.step import SlotRows, check_slots, expect_vocab

_COLUMNS = [column.name for column in (*CHOICE_COLUMNS, STEP_COLUMN)]


def keep_draft_probs(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    cuts: torch.Tensor,
    draft_probs: torch.Tensor,
    *,
    vocab_ids: torch.Tensor | None = None,
    backend: Backend,
) -> None:
    """Keep what plain drafts were drawn from, behind temperature and cuts: the slot's row
    ``rows.column`` of ``draft_probs``, in which ids that cannot be drafted stay as they are.

    Drafts that were not drawn, or as the target draws, leave no trace.

    Args:
        logits, rows, slots, cuts, vocab_ids: as of the draw, one row of each request.
        draft_probs: [S, K, V] float32; the last slot's is nobody's.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device.
    """
    rows.check_logits(logits)
    if rows.num_rows != rows.num_requests:
        raise TensorContractError(
            f"drafts: expected a row of each of {rows.num_requests} requests, got {rows.num_rows}"
        )
    check_slots(slots, rows.num_requests, logits.device, _COLUMNS)
    check_cuts(cuts, rows.num_rows, logits.device)
    check_draft_probs(draft_probs, rows.column + 1, logits.device)
    if vocab_ids is None:
        _expect_words(draft_probs, logits.shape[1])
    else:
        expect_vocab(logits, vocab_ids)
    if logits.shape[0]:
        _side(backend).keep_draft_probs(logits, rows, slots, cuts, draft_probs, vocab_ids=vocab_ids)


def judge(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    cuts: torch.Tensor,
    choices: torch.Tensor,
    *,
    draft_lens: torch.Tensor | None = None,
    forced_ids: torch.Tensor | None = None,
    by_block: bool = True,
    backend: Backend,
) -> Judgement:
    """How far drafts stand, by p, the target's distribution behind temperature and cuts, and q,
    that which they were drawn from; of requests whose column ``verification`` asks for it.

    **Rejection**: draft d stands with the chance p(d) / q(d), and falls with all behind it; what is
    drawn then is of max(p - q, 0). **Block**: with P the odds of drafts 1..i together, min(P p(d) /
    q(d), 1) each time, and r the mass of max(P p - q, 0) behind them, the most drafts stand that
    pass a test of chance r / (r + 1 - P), of the last one P; what is drawn is of max(P p - q, 0).
    Behind all drafts, and where no mass is left, p is drawn from. Greedy drafts have a q of one
    point. Drafts that are absent, or outside the vocabulary, end the run: p is drawn from. In a row
    that forces an id both are of one point, the id's and the draft's: the same stands for certain,
    another never does, and the id follows.

    The column ``draft_step`` of every generation goes up by one.

    Args:
        logits: [N, V] floating, contiguous rows with any stride between them.
        rows: of the target, of width K+1.
        draft_tokens: [G*K] or [G, K] integer.
        draft_probs: as :func:`keep_draft_probs` left them. None: no draft is plain.
        cuts: [N, NUM_CUTS] float32: of the draw of these rows.
        choices: [N] int32: what coupled requests emit in every row.
        draft_lens: [G] integer; drafts at or past it are absent. None: K everywhere.
        forced_ids: [N] integer: the only token that a row allows, -1: any. None: -1 everywhere.
        by_block: slots may ask for block verification; False: none does, and nothing is made for
            it.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device.
    """
    rows.check_logits(logits)
    device, count = logits.device, rows.num_requests - rows.num_contexts
    num_drafts = count * (rows.width - 1)
    if (
        draft_tokens.numel() != num_drafts
        or not is_integral(draft_tokens)
        or draft_tokens.device != device
    ):
        raise TensorContractError(
            f"draft_tokens: expected G*K = {num_drafts} integer ids on {device}, got "
            f"{draft_tokens.numel()}: {draft_tokens.dtype} {list(draft_tokens.shape)} on "
            f"{draft_tokens.device}"
        )
    check_slots(slots, rows.num_requests, device, _COLUMNS)
    check_cuts(cuts, rows.num_rows, device)
    if draft_probs is not None:
        check_draft_probs(draft_probs, rows.width - 1, device)
        _expect_words(draft_probs, logits.shape[1])
    expect_integers("choices", choices, rows.num_rows, device)
    if draft_lens is not None:
        expect_integers("draft_lens", draft_lens, count, device)
    if forced_ids is not None:
        expect_integers("forced_ids", forced_ids, rows.num_rows, device)
    if count == 0:
        return Judgement(choices.new_empty(0, dtype=torch.int32), choices)
    return _side(backend).judge(
        logits,
        rows,
        slots,
        draft_tokens,
        draft_probs,
        cuts,
        choices,
        draft_lens=draft_lens,
        forced_ids=forced_ids,
        by_block=by_block,
    )


class _Side(Protocol):
    def keep_draft_probs(
        self,
        logits: torch.Tensor,
        rows: DrawnRows,
        slots: SlotRows,
        cuts: torch.Tensor,
        draft_probs: torch.Tensor,
        *,
        vocab_ids: torch.Tensor | None,
    ) -> None: ...

    def judge(
        self,
        logits: torch.Tensor,
        rows: DrawnRows,
        slots: SlotRows,
        draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        cuts: torch.Tensor,
        choices: torch.Tensor,
        *,
        draft_lens: torch.Tensor | None,
        forced_ids: torch.Tensor | None,
        by_block: bool,
    ) -> Judgement: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.sampling.residual import launch

    return launch


def _expect_words(draft_probs: torch.Tensor, vocab: int) -> None:
    if draft_probs.shape[2] != vocab:
        raise TensorContractError(
            f"draft_probs: expected V = {vocab} words, as the logits have, got "
            f"{draft_probs.shape[2]}"
        )
