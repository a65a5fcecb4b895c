"""Torch reference of `draft_inputs`."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.draft_inputs.rows import (
    accepted_rows,
    concatenate,
    context_rows,
    context_rows_with_history,
    generation_window,
)
from mtp_plugin.ops.draft_inputs.types import (
    DraftKVLengths,
    DraftWindows,
    History,
    TargetRows,
)
from mtp_plugin.ops.step import DrafterInputs, DraftInputs, StepLayout, to_device


def advance_history_reference(
    layout: StepLayout, history: History, rows: TargetRows, num_accepted: torch.Tensor
) -> None:
    tokens_pool, states_pool = history.tokens, history.states
    width, num_contexts = history.max_draft_len, layout.num_contexts
    slots = history.slots()
    pool_tokens = tokens_pool[slots]  # [R, K]
    pool_states = states_pool[slots]  # [R, K, H]
    columns = torch.arange(width, device=tokens_pool.device)

    if num_contexts > 0:
        lens = layout.context_lens.to(torch.int64)
        ends = lens.cumsum(0)
        # entry e of the last K: pool entry m + e while that is one, else chunk row m - K + e
        entry = lens.unsqueeze(1) + columns  # index into (pool ++ chunk), [C, K]
        from_pool = entry < width
        chunk_rows = (ends.unsqueeze(1) - width + columns).clamp_min(0)
        pool_entry = entry.clamp_max(width - 1)
        kept = pool_tokens[:num_contexts]
        fresh = rows.input_ids[chunk_rows].to(kept.dtype)
        tokens_pool[slots[:num_contexts]] = torch.where(
            from_pool, kept.gather(1, pool_entry), fresh
        )
        kept_states = _gather_entries(pool_states[:num_contexts], pool_entry)
        fresh_states = rows.hidden_states[chunk_rows].to(kept_states.dtype)
        states_pool[slots[:num_contexts]] = torch.where(
            from_pool.unsqueeze(-1), kept_states, fresh_states
        )

    if layout.num_generations > 0:
        all_tokens, all_states = _entries(
            layout, rows, pool_tokens[num_contexts:], pool_states[num_contexts:], states_pool.dtype
        )
        entry = num_accepted[num_contexts:].to(torch.int64).unsqueeze(1) + columns
        tokens_pool[slots[num_contexts:]] = all_tokens.gather(1, entry)
        states_pool[slots[num_contexts:]] = _gather_entries(all_states, entry)


def advance_and_build_inputs_reference(
    layout: StepLayout,
    history: History,
    rows: TargetRows,
    num_accepted: torch.Tensor,
    last_tokens: torch.Tensor,
    windows: DraftWindows,
    kv: DraftKVLengths | None,
) -> DrafterInputs:
    positions = layout.expect_positions("advance_and_build_inputs")
    window, history_lens = windows.window, windows.history_lens
    k, num_contexts = history.max_draft_len, layout.num_contexts
    slots = history.slots()
    row_lens = layout.context_lens.to(torch.int64)
    parts: list[DraftInputs] = []
    if num_contexts > 0:
        prompts = _context_rows(layout, rows, positions)
        if any(history_lens):
            contexts = slots[:num_contexts]
            prompts = context_rows_with_history(
                prompts,
                rows.input_ids[: layout.num_ctx_tokens],
                history.tokens[contexts],
                history.states[contexts],
                layout.chunk_lens,
                history_lens,
            )
            row_lens = row_lens + to_device(history_lens, row_lens.dtype, row_lens.device)
        parts.append(prompts)
    if layout.num_generations > 0 or not parts:
        generations = slots[num_contexts:]
        all_tokens, all_states = _entries(
            layout,
            rows,
            history.tokens[generations],
            history.states[generations],
            rows.hidden_states.dtype,
        )
        counts = num_accepted[num_contexts:].to(torch.int64)
        parts.append(
            generation_window(
                all_tokens,
                all_states,
                (counts + k - window).clamp_min(0),
                last_tokens[num_contexts:],
                positions[layout.num_ctx_tokens :: layout.step_rows] + counts - window,
                window,
            )
        )
    inputs = parts[0] if len(parts) == 1 else concatenate(*parts)
    # after the windows were read from the history
    advance_history_reference(layout, history, rows, num_accepted)
    states = inputs.hidden_states
    if windows.spare_rows:
        spare = states.new_zeros(windows.spare_rows, states.shape[1])
        states = torch.cat([states, spare])
    lens = torch.cat([row_lens, row_lens.new_full((layout.num_generations,), window)])
    return DrafterInputs(
        ids=torch.cat([inputs.input_ids, inputs.input_ids.new_zeros(k - 1)]),
        positions=inputs.position_ids,
        states=states,
        last_rows=lens.cumsum(0) - 1,
        kv_lens=None
        if kv is None
        else _draft_kv_lens(layout, kv, num_accepted, context_rows=0, taken=layout.step_rows),
    )


def build_reused_inputs_reference(
    layout: StepLayout,
    rows: TargetRows,
    accepted_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    max_position: int | None,
    kv: DraftKVLengths | None,
) -> DrafterInputs:
    positions = layout.expect_positions("build_reused_inputs")
    num_contexts, num_ctx_tokens = layout.num_contexts, layout.num_ctx_tokens
    parts: list[DraftInputs] = []
    if num_contexts > 0:
        parts.append(_context_rows(layout, rows, positions))
    if layout.num_generations > 0 or not parts:
        parts.append(
            accepted_rows(
                accepted_tokens[num_contexts:],
                positions[num_ctx_tokens:],
                rows.hidden_states[num_ctx_tokens:],
            )
        )
    counts = num_accepted[num_contexts:].to(torch.int64).clamp_min(1)
    generation = torch.arange(layout.num_generations, device=counts.device)
    ends = layout.context_lens.to(torch.int64).cumsum(0) - 1
    last_rows = torch.cat([ends, num_ctx_tokens + generation * layout.step_rows + counts - 1])
    next_positions = positions[last_rows].to(torch.int64) + 1
    if max_position is not None:
        next_positions = next_positions.clamp_max(max_position)
    return DrafterInputs(
        ids=torch.cat([part.input_ids for part in parts]),
        positions=positions,
        states=rows.hidden_states,
        last_rows=last_rows,
        next_positions=next_positions,
        kv_lens=None
        if kv is None
        else _draft_kv_lens(layout, kv, num_accepted, context_rows=1, taken=layout.draft_len),
    )


def _context_rows(layout: StepLayout, rows: TargetRows, positions: torch.Tensor) -> DraftInputs:
    if rows.successors is None:
        raise TensorContractError("rows.successors: expected the tokens after chunks, got None")
    chunks = slice(0, layout.num_ctx_tokens)
    return context_rows(
        rows.input_ids[chunks],
        positions[chunks],
        rows.hidden_states[chunks],
        layout.context_lens,
        rows.successors,
    )


def _entries(
    layout: StepLayout,
    rows: TargetRows,
    pool_tokens: torch.Tensor,
    pool_states: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pool pairs and step rows of each generation: tokens [G, E], states [G, E, H]."""
    shape = (layout.num_generations, layout.step_rows)
    tokens = rows.input_ids[layout.num_ctx_tokens :].reshape(shape)
    states = rows.hidden_states[layout.num_ctx_tokens :].unflatten(0, shape)
    return (
        torch.cat([pool_tokens, tokens.to(pool_tokens.dtype)], dim=1),
        torch.cat([pool_states.to(dtype), states.to(dtype)], dim=1),
    )


def _gather_entries(states: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
    """Return states [N, E, H] at entry [N, W], as [N, W, H]."""
    return states.gather(1, entry.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def _draft_kv_lens(
    layout: StepLayout,
    kv: DraftKVLengths,
    num_accepted: torch.Tensor,
    *,
    context_rows: int,
    taken: int,
) -> torch.Tensor:
    """Return the draft loop's KV lengths: contexts + context_rows, generations - taken + n."""
    lens = kv.lens.clone()
    num_contexts, requests = layout.num_contexts, layout.num_requests
    lens[:num_contexts] += context_rows
    generations = lens[num_contexts:requests]
    generations += (num_accepted[num_contexts:] - taken).to(lens.dtype)
    if kv.floor is not None:
        generations.clamp_(min=kv.floor)
    return lens
