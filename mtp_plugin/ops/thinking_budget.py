"""Enforce the thinking budgets of requests."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import INTEGERS, SIGNED, AtLeast, expect_tensor
from mtp_plugin.ops.logit_rows import ThinkingRule, ThinkingState
from mtp_plugin.ops.step import Accepted, SlotRows, StepLayout, check_slots


def force_thinking_end(
    layout: StepLayout,
    draft_tokens: torch.Tensor,
    slots: SlotRows,
    rule: ThinkingRule,
    target_tokens: torch.Tensor,
    *,
    backend: Backend | str = "auto",
) -> torch.Tensor:
    """Return the token that each row must give once its thinking budget is spent, else -1.

    Each row counts the drafts before it. With budget 2, one thinking token so far and drafts
    ``a b c``, rows 0 and 1 are free, row 2 must give the first token of the end sequence, and row 3
    the one that follows it if ``b`` was the first. An end sequence that the output has begun is
    continued.

    Args:
        layout: of the step; its positions are not read.
        draft_tokens: [G*K] or [G, K] signed integer.
        slots: of the requests; reads ``thinking_token_budget`` (-1: none), ``num_thinking``
            (generated thinking tokens, -1: not thinking) and ``end_progress`` (how many tokens of
            the end sequence were generated last).
        rule: begin token and end sequence of thinking.
        target_tokens: [rows] int32, contiguous; forced tokens are written here too.

    Returns:
        [rows] int32, one per row of logits.

    Raises:
        TensorContractError: a tensor of another shape, dtype, device or layout, or another number
            of drafts.
    """
    device = expect_tensor(
        "target_tokens",
        target_tokens,
        dtype=torch.int32,
        shape=(layout.num_logit_rows,),
        contiguous=True,
    ).device
    check_slots(slots, layout.num_requests, device)
    rule.check(device)
    expect_tensor("draft_tokens", draft_tokens, dtype=SIGNED, device=device)
    drafts = layout.num_generations * layout.draft_len
    if draft_tokens.numel() != drafts:
        raise TensorContractError(
            f"draft_tokens: expected G*K = {drafts} token ids, got {list(draft_tokens.shape)}"
        )
    backend = Backend.of(backend, device, "backend")
    return backend.dispatch(force_thinking_end_reference)(
        layout, draft_tokens, slots, rule, target_tokens
    )


def update_thinking_state(
    accepted: Accepted, slots: SlotRows, rule: ThinkingRule, *, backend: Backend | str = "auto"
) -> None:
    """Update the thinking state of requests with a budget by their accepted tokens.

    Args:
        accepted: tokens [R, K+1] integer, any strides, and how many of each row count.
        slots: as in :func:`force_thinking_end`; ``num_thinking`` and ``end_progress`` are written.
        rule: as in :func:`force_thinking_end`.

    Raises:
        TensorContractError: a tensor of another shape, dtype or device.
    """
    tokens = expect_tensor(
        "accepted tokens", accepted.tokens, dtype=INTEGERS, shape=("R", AtLeast(1))
    )
    requests, device = int(tokens.shape[0]), tokens.device
    counts = accepted.num_accepted
    expect_tensor("num_accepted", counts, dtype=INTEGERS, shape=(requests,), device=device)
    check_slots(slots, requests, device)
    rule.check(device)
    if requests:
        backend = Backend.of(backend, device, "backend")
        backend.dispatch(update_thinking_state_reference)(accepted, slots, rule)


def force_thinking_end_reference(
    layout: StepLayout,
    draft_tokens: torch.Tensor,
    slots: SlotRows,
    rule: ThinkingRule,
    target_tokens: torch.Tensor,
) -> torch.Tensor:
    contexts = layout.num_contexts
    drafts = draft_tokens.reshape(layout.num_generations, layout.draft_len).to(torch.int64)
    state = ThinkingState.read(slots, slice(contexts, layout.num_requests))
    rows = [state.forced(rule)]
    for column in range(layout.draft_len):
        state = state.after(drafts[:, column], torch.ones_like(state.forces), rule)
        rows.append(state.forced(rule))
    prompts = ThinkingState.read(slots, slice(0, contexts)).forced(rule)
    forced = torch.cat([prompts, torch.stack(rows, dim=1).reshape(-1)]).to(torch.int32)
    target_tokens.copy_(torch.where(forced >= 0, forced, target_tokens))
    return forced


def update_thinking_state_reference(
    accepted: Accepted, slots: SlotRows, rule: ThinkingRule
) -> None:
    requests = slice(0, accepted.num_accepted.shape[0])
    state = ThinkingState.read(slots, requests)
    for column in range(accepted.tokens.shape[1]):
        is_there = (column < accepted.num_accepted) & (state.budget >= 0)
        state = state.after(accepted.tokens[:, column].to(torch.int64), is_there, rule)
    rows = slots.of(requests)
    for name, values in (("num_thinking", state.num_thinking), ("end_progress", state.progress)):
        slots.table[rows, slots.columns.offset(name)] = values.to(torch.int32)
