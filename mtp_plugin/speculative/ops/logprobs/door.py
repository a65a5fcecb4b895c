"""The door of log-probabilities.

R requests of a step, C contexts first, then G generations of K+1 rows; V words.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.checks import expect_integers, is_integral
from mtp_plugin.requests.options import MAX_LOGPROBS
from mtp_plugin.speculative.ops.logprobs import reference
from mtp_plugin.speculative.ops.logprobs.contract import LogProbs
from mtp_plugin.speculative.row_sums import RowSums
from mtp_plugin.speculative.step import SlotRows, StepLayout, check_slots


def logprobs(
    layout: StepLayout,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    asked: SlotRows | int,
    *,
    sums: RowSums | None = None,
    backend: Backend,
) -> LogProbs:
    """Log-probabilities of emitted tokens, and the most likely ids beside them.

    They are of the log-softmax in float32 of the logits as they are given: token i of a generation
    is looked up in its row i, that of a context in its only row. Ids are ordered by value, of
    equals the lowest first. NaN counts as -inf; in a row that holds +inf the lowest such id has
    log-probability 0 and every other one -inf; in a row without any value all have -inf.

    Args:
        layout: its contexts, generations and K count.
        logits: [C + G*(K+1), V] floating, contiguous rows with any stride between them; the
            target's own, not edited.
        tokens: [R, K+1] integer, any strides; those at or past ``counts`` are not read.
        counts: [R] integer, any stride: tokens of each request that were emitted.
        asked: slots of the requests, whose ``logprobs`` says how many most likely ids are told, up
            to `MAX_LOGPROBS`, 0: of the token alone, -1: nothing; or one such number for all.
        sums: what a draw from these logits has left, for the same slots. None: nothing, so that
            rows are read once more.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device, a number out of range, or
            sums beside one number for all.
    """
    requests, device = layout.num_requests, logits.device
    if (
        logits.dim() != 2
        or logits.shape[0] != layout.num_logit_rows
        or logits.shape[1] == 0
        or not logits.is_floating_point()
    ):
        raise TensorContractError(
            f"logits: expected floating [{layout.num_logit_rows}, V] with V >= 1, "
            f"{layout.num_contexts} context rows and K+1 = {layout.step_rows} rows for each of "
            f"{layout.num_generations} generations, got {logits.dtype} {list(logits.shape)}"
        )
    if logits.shape[0] and logits.stride(1) != 1:
        raise TensorContractError(
            f"logits: expected contiguous rows, got strides {list(logits.stride())}"
        )
    if (
        tokens.shape != (requests, layout.step_rows)
        or not is_integral(tokens)
        or tokens.device != device
    ):
        raise TensorContractError(
            f"tokens: expected integers [{requests}, {layout.step_rows}] on {device}, got "
            f"{tokens.dtype} {list(tokens.shape)} on {tokens.device}"
        )
    expect_integers("counts", counts, requests, device)
    if isinstance(asked, SlotRows):
        check_slots(asked, requests, device)
    elif not -1 <= asked <= MAX_LOGPROBS:
        raise TensorContractError(f"asked: expected -1 to {MAX_LOGPROBS}, got {asked}")
    if sums is not None:
        if not isinstance(asked, SlotRows):
            raise TensorContractError(
                f"sums: expected the slots that the draw was given as asked, got {asked}"
            )
        sums.check(logits)
    return _side(backend).logprobs(layout, logits, tokens, counts, asked, sums)


class _Side(Protocol):
    def logprobs(
        self,
        layout: StepLayout,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        asked: SlotRows | int,
        sums: RowSums | None,
    ) -> LogProbs: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.logprobs import launch

    return launch
