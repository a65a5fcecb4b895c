"""Outputs and grids of the history and draft-input kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton

from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.ops.draft_inputs.contract import DraftKVLengths, History, TargetRows
from mtp_plugin.speculative.ops.draft_inputs.kernel import (
    accepted_rows_kernel,
    context_history_kernel,
    context_rows_kernel,
    generation_kernel,
)
from mtp_plugin.speculative.step import DrafterInputs, StepLayout, to_device

UNBOUNDED = 2**62
LOWEST = -(2**31)


def advance_history(
    layout: StepLayout, history: History, rows: TargetRows, num_accepted: torch.Tensor
) -> None:
    """As at the door: one launch for contexts, one for generations."""
    if layout.num_contexts > 0:
        ends = layout.context_lens.cumsum(0, dtype=torch.int32)
        _advance_contexts(history, rows, ends)
    if layout.num_generations > 0:
        _generations(
            layout,
            history,
            rows,
            num_accepted,
            rows.input_ids,  # in place of positions and last tokens, which only a window needs
            num_accepted,
            None,
            None,
            window=history.max_draft_len,
            num_ctx_rows=layout.num_ctx_tokens,
        )


def advance_and_build_inputs(
    layout: StepLayout,
    history: History,
    rows: TargetRows,
    num_accepted: torch.Tensor,
    last_tokens: torch.Tensor,
    successors: torch.Tensor | None,
    *,
    positions: torch.Tensor,
    window: int,
    history_lens: Sequence[int],
    spare_rows: int,
    kv: DraftKVLengths | None,
    may_overwrite_states: bool,
) -> DrafterInputs:
    """As at the door: one launch per kind of request, and one for the pools of contexts.

    States stay in the step's own memory where each row of the result lies where the step's row
    does, and there are prompt rows whose copy that saves; the windows of generations overwrite
    theirs, for which nobody may read them any more.
    """
    num_generations, states = layout.num_generations, rows.hidden_states
    num_ctx_tokens, device = layout.num_ctx_tokens, states.device
    num_ctx_rows = num_ctx_tokens + sum(history_lens)
    num_rows = num_ctx_rows + num_generations * window
    in_place = (
        layout.num_contexts > 0
        and num_ctx_rows == num_ctx_tokens
        and window == layout.step_rows
        and spare_rows == 0
        and states.is_contiguous()
        and (num_generations == 0 or may_overwrite_states)
    )
    if not in_place:
        states = torch.empty(
            num_rows + spare_rows, states.shape[1], dtype=states.dtype, device=device
        )
    num_ids = num_rows + history.max_draft_len - 1
    first = DrafterInputs(
        ids=torch.empty(num_ids, dtype=torch.int32, device=device),
        positions=torch.empty(num_rows, dtype=torch.int64, device=device),
        states=states,
        last_rows=torch.empty(layout.num_requests, dtype=torch.int64, device=device),
        kv_lens=_context_kv_lens(layout, kv, 0),
    )
    positions = positions.contiguous()
    if layout.num_contexts > 0 and successors is not None:
        ends = layout.context_lens.cumsum(0, dtype=torch.int32)
        history_ends = torch.zeros_like(ends)
        if num_ctx_rows > num_ctx_tokens:
            history_ends = to_device(list(accumulate(history_lens)), torch.int32, device)
        hidden = states.shape[1]
        context_rows_kernel[(num_ctx_rows,)](
            history.tokens,
            history.states,
            history.slot_ids.contiguous(),
            rows.input_ids.contiguous(),
            rows.hidden_states,
            positions,
            successors,
            ends + history_ends,
            history_ends,
            first.ids,
            first.positions,
            first.states,
            first.last_rows,
            layout.num_contexts,
            hidden,
            rows.hidden_states.stride(0),
            successors.stride(0),
            K=history.max_draft_len,
            BLOCK=min(2048, triton.next_power_of_2(hidden)),
            COPY_STATES=not in_place,
            SEARCH_STEPS=max(layout.num_contexts, 1).bit_length(),
            num_warps=4,
        )
        _advance_contexts(history, rows, ends)
    if num_generations > 0:
        _generations(
            layout,
            history,
            rows,
            num_accepted,
            positions,
            last_tokens,
            first,
            kv,
            window=window,
            num_ctx_rows=num_ctx_rows,
        )
    return first


def build_reused_inputs(
    layout: StepLayout,
    rows: TargetRows,
    accepted_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    successors: torch.Tensor | None,
    *,
    positions: torch.Tensor,
    max_position: int | None,
    kv: DraftKVLengths | None,
) -> DrafterInputs:
    """As at the door."""
    states, num_ctx_tokens = rows.hidden_states, layout.num_ctx_tokens
    requests, device = layout.num_requests, states.device
    ids = torch.empty(layout.num_tokens, dtype=torch.int32, device=device)
    last_rows = torch.empty(requests, dtype=torch.int64, device=device)
    next_positions = torch.empty(requests, dtype=torch.int64, device=device)
    own = _context_kv_lens(layout, kv, 1)
    if layout.num_contexts > 0 and successors is not None:
        num_contexts = layout.num_contexts
        ends = layout.context_lens.to(torch.int64).cumsum(0) - 1
        ids[:num_ctx_tokens] = rows.input_ids[:num_ctx_tokens].roll(-1)
        ids[ends] = successors.to(ids.dtype)
        last_rows[:num_contexts] = ends
        after = positions[ends] + 1
        next_positions[:num_contexts] = (
            after if max_position is None else after.clamp_max(max_position)
        )
    if layout.num_generations > 0:
        width = layout.step_rows
        num_accepted = num_accepted.contiguous()
        kv_lens, kv_out, floor = _kv_arguments(kv, own, num_accepted)
        accepted_rows_kernel[(layout.num_generations,)](
            accepted_tokens.contiguous(),
            num_accepted,
            positions.contiguous(),
            kv_lens,
            ids,
            last_rows,
            next_positions,
            kv_out,
            layout.num_contexts,
            num_ctx_tokens,
            UNBOUNDED if max_position is None else max_position,
            floor,
            WIDTH=width,
            COLUMNS=triton.next_power_of_2(width),
            HAS_KV=own is not None,
            num_warps=1,
            **pdl_options(device),
        )
    return DrafterInputs(ids, positions, states, last_rows, next_positions, own)


def _context_kv_lens(
    layout: StepLayout, kv: DraftKVLengths | None, context_rows: int
) -> torch.Tensor | None:
    """The loop's KV lengths, with those of contexts; the kernels write those of generations."""
    if kv is None:
        return None
    own = torch.empty_like(kv.lens, memory_format=torch.contiguous_format)
    num_contexts = layout.num_contexts
    if num_contexts > 0:
        torch.add(kv.lens[:num_contexts], context_rows, out=own[:num_contexts])
    return own


def _kv_arguments(
    kv: DraftKVLengths | None, own: torch.Tensor | None, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The host's KV lengths, the loop's, and the least one, as kernels take them."""
    if kv is None or own is None:
        return unused, unused, LOWEST
    return kv.lens.contiguous(), own, LOWEST if kv.floor is None else kv.floor


def _advance_contexts(history: History, rows: TargetRows, ends: torch.Tensor) -> None:
    """Move the pools of contexts on; ``ends`` [C] int32: each chunk's end in the step's rows."""
    k = history.max_draft_len
    hidden = rows.hidden_states.shape[1]
    block = _column_block(hidden, k)
    context_history_kernel[(ends.shape[0], -(-hidden // block))](
        history.tokens,
        history.states,
        history.slot_ids.contiguous(),
        rows.input_ids.contiguous(),
        rows.hidden_states,
        ends,
        hidden,
        rows.hidden_states.stride(0),
        K=k,
        ROWS=triton.next_power_of_2(k),
        BLOCK=block,
        num_warps=4,
    )


def _generations(
    layout: StepLayout,
    history: History,
    rows: TargetRows,
    num_accepted: torch.Tensor,
    positions: torch.Tensor,
    last_tokens: torch.Tensor,
    first: DrafterInputs | None,
    kv: DraftKVLengths | None,
    *,
    window: int,
    num_ctx_rows: int,
) -> None:
    """Move the pools of generations on; with ``first`` their windows go there before."""
    hidden_states = rows.hidden_states
    hidden = hidden_states.shape[1]
    block = _column_block(hidden, window)
    num_accepted = num_accepted.contiguous()
    unused = num_accepted
    own = None if first is None else first.kv_lens
    kv_lens, kv_out, floor = _kv_arguments(kv, own, unused)
    generation_kernel[(layout.num_generations, -(-hidden // block))](
        # pools and step
        history.tokens,
        history.states,
        history.slot_ids.contiguous(),
        rows.input_ids.contiguous(),
        hidden_states,
        positions,
        num_accepted,
        last_tokens,
        kv_lens,
        # outputs
        first.ids if first is not None else unused,
        first.positions if first is not None else unused,
        first.states if first is not None else hidden_states,
        first.last_rows if first is not None else unused,
        kv_out,
        # sizes
        layout.num_contexts,
        layout.num_ctx_tokens,
        num_ctx_rows,
        hidden,
        hidden_states.stride(0),
        last_tokens.stride(0),
        floor,
        # constants
        K=history.max_draft_len,
        STEP_ROWS=layout.step_rows,
        WINDOW=window,
        ROWS=triton.next_power_of_2(window),
        BLOCK=block,
        WRITE_WINDOW=first is not None,
        HAS_KV=own is not None,
        num_warps=4,
        **pdl_options(hidden_states.device),
    )


def _column_block(hidden: int, rows: int) -> int:
    """Columns per program: enough for wide loads, few enough that a tile stays in registers."""
    widest = max(128, 4096 // triton.next_power_of_2(rows))
    return int(min(widest, max(16, triton.next_power_of_2(hidden))))
