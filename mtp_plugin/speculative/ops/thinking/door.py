"""The door of thinking budgets.

R requests of a step, C contexts first, then G generations of K+1 rows.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.checks import is_integral
from mtp_plugin.speculative.logit_rows import ThinkingRule
from mtp_plugin.speculative.ops.thinking import reference
from mtp_plugin.speculative.step import Accepted, SlotRows, StepLayout, check_slots


def force_ends(
    layout: StepLayout,
    draft_tokens: torch.Tensor,
    slots: SlotRows,
    rule: ThinkingRule,
    choices: torch.Tensor,
    *,
    backend: Backend,
) -> torch.Tensor:
    """Where budgets are spent, the id that each row must give [rows] int32; -1: any.

    A request with a budget of 2 that thinks, has emitted one token of it and has drafts ``a b c``:
    its rows are free, then, behind ``a``, the end's first id, and so on behind ``b`` and ``c``
    while these are the end's. An end that the text has begun is gone on with.

    Args:
        draft_tokens: [G*K] or [G, K] integer.
        slots: of the requests; read are ``thinking_token_budget`` (-1: none), ``thought`` (emitted
            tokens since the phase began, -1 outside) and ``end_place`` (ids of the end that stand
            last).
        choices: [rows] int32, contiguous: takes the ids too, where there are any.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device.
    """
    _check(slots, rule, layout.num_requests, choices.device)
    drafts = layout.num_generations * layout.draft_len
    if (
        draft_tokens.numel() != drafts
        or not is_integral(draft_tokens)
        or draft_tokens.device != choices.device
    ):
        raise TensorContractError(
            f"draft_tokens: expected G*K = {drafts} integer ids on {choices.device}, got "
            f"{draft_tokens.numel()}: {draft_tokens.dtype} on {draft_tokens.device}"
        )
    if (
        choices.shape != (layout.num_logit_rows,)
        or choices.dtype != torch.int32
        or not choices.is_contiguous()
    ):
        raise TensorContractError(
            f"choices: expected torch.int32 [{layout.num_logit_rows}] without gaps, got "
            f"{choices.dtype} {list(choices.shape)} with strides {list(choices.stride())}"
        )
    return _side(backend).force_ends(layout, draft_tokens, slots, rule, choices)


def note_thought(
    accepted: Accepted, slots: SlotRows, rule: ThinkingRule, *, backend: Backend
) -> None:
    """Move ``thought`` and ``end_place`` of requests with a budget on by what they emitted.

    Args:
        accepted: [R, K+1] tokens.
        slots: as :func:`force_ends`.

    Raises:
        TensorContractError: a table, slots or rule of another shape, type or device.
    """
    requests = int(accepted.num_accepted.shape[0])
    _check(slots, rule, requests, accepted.tokens.device)
    if requests:
        _side(backend).note_thought(accepted, slots, rule)


class _Side(Protocol):
    def force_ends(
        self,
        layout: StepLayout,
        draft_tokens: torch.Tensor,
        slots: SlotRows,
        rule: ThinkingRule,
        choices: torch.Tensor,
    ) -> torch.Tensor: ...

    def note_thought(self, accepted: Accepted, slots: SlotRows, rule: ThinkingRule) -> None: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.thinking import launch

    return launch


def _check(slots: SlotRows, rule: ThinkingRule, requests: int, device: torch.device) -> None:
    check_slots(slots, requests, device)
    rule.check(device)
