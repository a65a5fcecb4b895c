"""The door of draws.

N rows of logits, V words; R requests.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.ops.sampling import reference
from mtp_plugin.speculative.ops.sampling.contract import CHOICE_COLUMNS, Role, check_cuts
from mtp_plugin.speculative.row_sums import RowSums
from mtp_plugin.speculative.step import SlotRows, check_slots, expect_vocab


def draw(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    *,
    role: Role = Role.TARGET,
    by_choice: bool = False,
    vocab_ids: torch.Tensor | None = None,
    cuts: torch.Tensor | None = None,
    sums: RowSums | None = None,
    backend: Backend,
) -> torch.Tensor:
    """A token of every row, by its request's temperature, top-k, top-p, min-p and seed [N] int32.

    z = (x - the row's maximum) / T. Of z the ``top_k`` highest stay, of those the first that hold
    ``top_p`` of their mass, of those what is at least ``min_p`` times as likely as the first; ties
    at a cut keep the lowest ids. The token is the argmax of z + noise, the noise Gumbel's, of
    Philox-4x32-10 keyed by the seed and counted by id, token index and role: the same wherever the
    row stands, whatever else the batch holds. At a temperature of 0 it is the argmax of the row.

    Ties go to the lowest id, NaN counts as -inf; a row that holds +inf gives the lowest such id.

    Args:
        logits: [N, V] floating, contiguous rows with any stride between them.
        slots: of the R requests. Bias, allowed ids and penalties of their pools change the logits
            before anything else does; what is -inf stays so.
        by_choice: rows propose drafts, drawn as the column ``draft_sampling`` of their slots says:
            coupled ones by ``role``, plain ones by noise of their own, greedy ones are the argmax.
        vocab_ids: [V] int32, ascending: the ids that the columns stand for; they are drawn, and
            counted by. None: each stands for itself.
        cuts: [N, NUM_CUTS] float32: takes what is left of every row. None: nobody asks.
        sums: takes what log-probabilities of the rows need, where the column ``logprobs`` of a
            request's slot asks for them; of rows of the target without edits. None: nobody asks.

    Returns:
        [N] int32; -1 of a row without any value.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device; sums of other rows.
    """
    rows.check_logits(logits)
    named = [column.name for column in CHOICE_COLUMNS] if by_choice else ()
    check_slots(slots, rows.num_requests, logits.device, named)
    if cuts is not None:
        check_cuts(cuts, rows.num_rows, logits.device)
    if sums is not None:
        if slots.pools is not None:
            raise TensorContractError(
                "sums: expected slots without pools, as sums are of rows without edits, got some"
            )
        if role is not Role.TARGET or by_choice or vocab_ids is not None:
            raise TensorContractError(
                f"sums: expected rows of the target, got role {role.name}, by_choice {by_choice} "
                f"and {'no' if vocab_ids is None else 'some'} vocab_ids"
            )
        sums.check(logits)
    if vocab_ids is not None:
        expect_vocab(logits, vocab_ids)
    if slots.pools is not None:
        slots.pools.check(logits.device, logits.shape[1] if vocab_ids is None else None)
    return _side(backend).draw(
        logits,
        rows,
        slots,
        role=role,
        by_choice=by_choice,
        vocab_ids=vocab_ids,
        cuts=cuts,
        sums=sums,
    )


class _Side(Protocol):
    def draw(
        self,
        logits: torch.Tensor,
        rows: DrawnRows,
        slots: SlotRows,
        *,
        role: Role,
        by_choice: bool,
        vocab_ids: torch.Tensor | None,
        cuts: torch.Tensor | None,
        sums: RowSums | None,
    ) -> torch.Tensor: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.sampling import launch

    return launch
