"""The door of processed scores.

N rows of logits, V words; R requests.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.checks import expect_integers
from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.ops.sampling.contract import check_cuts
from mtp_plugin.speculative.ops.sampling.processed import reference
from mtp_plugin.speculative.step import SlotRows, check_slots


def processed_scores(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    cuts: torch.Tensor,
    forced: torch.Tensor | None = None,
    *,
    backend: Backend,
) -> torch.Tensor:
    """What the token of every row was chosen from: (x - the row's maximum) / T of edited logits,
    -inf where top-k, top-p and min-p leave an id out; of greedy requests T = 1 and no cuts.

    Where an id is forced it has 0 and every other one -inf; so has the lowest id of a row that
    holds +inf there. Their log-softmax are processed log-probabilities.

    Args:
        logits, rows, slots: as of the draw of these rows.
        cuts: [N, NUM_CUTS] float32, which that draw left.
        forced: [N] int32: ids that must come, -1: any. None: none must.

    Returns:
        [N, V] float32. Rows of requests whose column ``logprobs`` is below 0 hold anything.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device.
    """
    rows.check_logits(logits)
    if rows.ahead is not None or rows.column:
        raise TensorContractError("drawn rows: expected those of the target, got drafts'")
    check_slots(slots, rows.num_requests, logits.device)
    check_cuts(cuts, rows.num_rows, logits.device)
    if forced is not None:
        expect_integers("forced", forced, rows.num_rows, logits.device)
    if slots.pools is not None:
        slots.pools.check(logits.device, logits.shape[1])
    return _side(backend).processed_scores(logits, rows, slots, cuts, forced)


class _Side(Protocol):
    def processed_scores(
        self,
        logits: torch.Tensor,
        rows: DrawnRows,
        slots: SlotRows,
        cuts: torch.Tensor,
        forced: torch.Tensor | None,
    ) -> torch.Tensor: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.sampling.processed import launch

    return launch
