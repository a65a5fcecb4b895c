"""The door of forced acceptance.

R requests of a step, C contexts first, then G generations; K drafts each.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.synthetic_acceptance import reference
from mtp_plugin.speculative.ops.synthetic_acceptance.contract import SyntheticRule
from mtp_plugin.speculative.step import SlotRows, StepLayout, check_slots


def forced_matches(
    layout: StepLayout,
    rule: SyntheticRule,
    slots: SlotRows | None = None,
    *,
    backend: Backend,
) -> torch.Tensor:
    """How many drafts of every generation the draws accept [G] int32, 0..K.

    One draw per request and absolute token position, from the seed, the request's number and the
    position alone: no other request, step or rank moves it, and a position that a run did not reach
    keeps its draw for the next step. With draws that accept positions 11, 12 and 14: last position
    10 and K = 4 give 2.

    Args:
        layout: with positions; the first of a generation is that of its last emitted token, the one
            in front of its first draft.
        rule: the thresholds of K drafts or more, of which the first K count, and the seed.
        slots: of the requests; ``number`` tells them apart. None: 0 for all, which then decide
            alike at equal positions.

    Raises:
        TensorContractError: a layout without positions, or a tensor of another shape, dtype or
            device.
    """
    positions = layout.expect_positions("synthetic acceptance")
    device = positions.device
    _check_rule(rule, layout.draft_len, device)
    if slots is not None:
        check_slots(slots, layout.num_requests, device)
        generations = slice(layout.num_contexts, layout.num_requests)
        slots = replace(slots, slot_ids=slots.slot_ids[generations])
    return _side(backend).forced_matches(
        positions[layout.num_ctx_tokens :: layout.step_rows],
        rule,
        slots,
        draft_len=layout.draft_len,
    )


class _Side(Protocol):
    def forced_matches(
        self,
        last_positions: torch.Tensor,
        rule: SyntheticRule,
        slots: SlotRows | None,
        *,
        draft_len: int,
    ) -> torch.Tensor: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.synthetic_acceptance import launch

    return launch


def _check_rule(rule: SyntheticRule, draft_len: int, device: torch.device) -> None:
    thresholds, seed = rule.thresholds, rule.seed
    if not (
        thresholds.dim() == 1
        and thresholds.shape[0] >= draft_len
        and thresholds.dtype == torch.int32
        and thresholds.device == device
    ):
        raise TensorContractError(
            f"thresholds: expected torch.int32 [>= {draft_len}], one per draft, on {device}, got "
            f"{thresholds.dtype} {list(thresholds.shape)} on {thresholds.device}"
        )
    if tuple(seed.shape) != (1,) or seed.dtype != torch.int64 or seed.device != device:
        raise TensorContractError(
            f"seed: expected torch.int64 [1] on {device}, got {seed.dtype} {list(seed.shape)} on "
            f"{seed.device}"
        )
