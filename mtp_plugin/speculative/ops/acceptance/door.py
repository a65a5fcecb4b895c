"""The door of acceptance.

R requests of a step, C contexts first, then G generations; K drafts each, V words.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.checks import expect_integers, is_integral
from mtp_plugin.speculative.ops.acceptance import reference
from mtp_plugin.speculative.ops.acceptance.contract import (
    STRICT,
    AcceptanceRules,
    RelaxedRule,
)
from mtp_plugin.speculative.step import Accepted, StepLayout, check_slots

RELAXED_COLUMNS = ("thinking", "relaxed_topk", "relaxed_limit", "stop_ids")
"""What relaxed acceptance reads of a slot, and the first of them it writes."""


def accept(
    layout: StepLayout,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    rules: AcceptanceRules = STRICT,
    *,
    draft_lens: torch.Tensor | None = None,
    final_context: torch.Tensor | None = None,
    last_tokens: torch.Tensor | None = None,
    backend: Backend,
) -> Accepted:
    """Judge the drafts of every generation, then let the target speak once: the bonus token.

    **Strict**: a draft stands while it is the target's argmax. With K = 2, drafts ``b c`` and rows
    whose argmax is ``b x y``: emitted ``b x``. Ties go to the lowest id, NaN counts as -inf.

    **Relaxed**: a thinking request accepts a draft among the ``relaxed_topk`` most probable tokens
    of its row with p(draft) >= p_max - delta (fp32 softmax; equality qualifies, the top-1 always
    does). Stop ids and the two thinking tokens are accepted only as top-1. The phase follows every
    emitted token, so later rows of the same run already obey the new one; without it the request is
    strict. The phase behind the run goes to the request's slot: ``thinking``, and the delta in
    force, 0 where it thinks no more.

    **Forced**: so many leading drafts stand, whatever the argmax is, up to the first that is
    absent, outside the vocabulary or masked (-inf or NaN) in its row. A generation with a negative
    number is judged by the other rules; one with a number by no other, only its phase goes on.

    The bonus is the argmax of the row behind the run, whatever the rule. The logits are read once,
    whatever the rules.

    **Choices**: where the target's tokens were drawn already, they stand for the argmax of every
    row: a draft stands while it is what the target drew there, and a request with a temperature
    is never relaxed. Nor is a row with a **forced id**, where no other draft stands.

    Args:
        logits: [C + G*(K+1), V] floating, contiguous rows with any stride between them.
        draft_tokens: [G*K] or [G, K] integer; ids outside the vocabulary are never accepted.
        draft_lens: [G] integer; drafts at or past it are absent. None: K everywhere.
        final_context: [C] bool; a context that does not end its prompt emits nothing. None: all do.
        last_tokens: [R] int32, any stride: takes each request's last emitted token, 0 without one.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device.
    """
    _check_rows(layout, logits, draft_tokens)
    requests, generations = layout.num_requests, layout.num_generations
    for name, tensor, size, dtype in (
        ("draft_lens", draft_lens, generations, None),
        ("final_context", final_context, layout.num_contexts, torch.bool),
        ("last_tokens", last_tokens, requests, torch.int32),
        ("forced_matches", rules.forced_matches, generations, None),
    ):
        if tensor is not None:
            _check_vector(name, tensor, size, dtype, logits.device)
    for name, rows in (("choices", rules.choices), ("forced_ids", rules.forced_ids)):
        if rows is not None:
            _check_vector(name, rows, layout.num_logit_rows, torch.int32, logits.device)
    for name, part in (("forced_ids", rules.forced_ids), ("edited_by", rules.edited_by)):
        if part is not None and rules.choices is None:
            raise TensorContractError(f"{name}: expected choices beside it, got None")
    if rules.edited_by is not None:
        check_slots(rules.edited_by, requests, logits.device)
    if rules.relaxed is not None:
        _check_relaxed(rules.relaxed, requests, logits.device)
    return _side(backend).accept(
        layout,
        logits,
        draft_tokens,
        rules,
        draft_lens=draft_lens,
        final_context=final_context,
        last_tokens=last_tokens,
    )


class _Side(Protocol):
    def accept(
        self,
        layout: StepLayout,
        logits: torch.Tensor,
        draft_tokens: torch.Tensor,
        rules: AcceptanceRules,
        *,
        draft_lens: torch.Tensor | None,
        final_context: torch.Tensor | None,
        last_tokens: torch.Tensor | None,
    ) -> Accepted: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.speculative.ops.acceptance import launch

    return launch


def _check_rows(layout: StepLayout, logits: torch.Tensor, draft_tokens: torch.Tensor) -> None:
    if logits.dim() != 2 or not logits.is_floating_point() or logits.shape[1] == 0:
        raise TensorContractError(
            f"logits: expected a floating [rows, V] tensor with V >= 1, got {logits.dtype} "
            f"{list(logits.shape)}"
        )
    rows = logits.shape[0]
    if rows != layout.num_logit_rows:
        raise TensorContractError(
            f"logits: expected {layout.num_contexts} context rows and K+1 = {layout.step_rows} "
            f"rows for each of {layout.num_generations} generations, got {rows} rows"
        )
    if rows and logits.stride(1) != 1:
        raise TensorContractError(
            f"logits: expected contiguous rows, got strides {list(logits.stride())}"
        )
    drafts = layout.num_generations * layout.draft_len
    if (
        draft_tokens.numel() != drafts
        or not is_integral(draft_tokens)
        or draft_tokens.device != logits.device
    ):
        raise TensorContractError(
            f"draft_tokens: expected G*K = {drafts} integer ids on {logits.device}, got "
            f"{draft_tokens.numel()}: {draft_tokens.dtype} {list(draft_tokens.shape)} on "
            f"{draft_tokens.device}"
        )


def _check_relaxed(rule: RelaxedRule, requests: int, device: torch.device) -> None:
    check_slots(rule.slots, requests, device, RELAXED_COLUMNS)
    pool = rule.delta_in_force
    if pool.dim() != 1 or pool.dtype != torch.float32 or pool.device != device:
        raise TensorContractError(
            f"delta_in_force: expected torch.float32 [S] on {device}, got {pool.dtype} "
            f"{list(pool.shape)} on {pool.device}"
        )


def _check_vector(
    name: str, tensor: torch.Tensor, size: int, dtype: torch.dtype | None, device: torch.device
) -> None:
    """Check a vector of ``dtype``; None: of any integers."""
    if dtype is None:
        expect_integers(name, tensor, size, device)
    elif tensor.dtype != dtype or tensor.shape != (size,) or tensor.device != device:
        raise TensorContractError(
            f"{name}: expected {dtype} [{size}] on {device}, got {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device}"
        )
