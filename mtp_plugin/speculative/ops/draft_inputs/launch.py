"""Outputs and grids of the history and draft-input kernels."""

from __future__ import annotations

from itertools import accumulate
from typing import cast

import torch
import triton

from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative.ops.draft_inputs.contract import (
    check_eagle_output,
    check_vanilla_output,
)
from mtp_plugin.speculative.ops.draft_inputs.kernel import (
    accepted_rows_kernel,
    context_history_kernel,
    context_rows_kernel,
    generation_kernel,
)
from mtp_plugin.speculative.step import FirstPass, to_device

UNBOUNDED = 2**62
LOWEST = -(2**31)


def advance_history(
    tokens_pool: torch.Tensor,
    states_pool: torch.Tensor,
    slot_ids: torch.Tensor,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    num_accepted: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    num_contexts: int,
    num_ctx_tokens: int,
    step_rows: int,
) -> None:
    """As the reference of ``history``: one launch for contexts, one for generations."""
    k = tokens_pool.shape[1]
    num_generations = slot_ids.shape[0] - num_contexts
    if num_contexts > 0:
        ends = context_lens.cumsum(0, dtype=torch.int32)
        _advance_contexts(tokens_pool, states_pool, slot_ids, input_ids, hidden_states, ends)
    if num_generations > 0:
        unused = num_accepted
        _generations(
            tokens_pool,
            states_pool,
            slot_ids,
            input_ids,
            hidden_states,
            unused,
            num_accepted,
            unused,
            None,
            num_contexts,
            num_ctx_tokens,
            num_ctx_tokens,
            num_generations,
            k,
            step_rows,
        )


def vanilla_first_pass(
    tokens_pool: torch.Tensor,
    states_pool: torch.Tensor,
    slot_ids: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    num_accepted: torch.Tensor,
    last_tokens: torch.Tensor,
    successors: torch.Tensor | None,
    context_lens: torch.Tensor,
    *,
    chunk_lens: list[int],
    history_lens: list[int],
    window: int,
    kv_lens: torch.Tensor | None = None,
    kv_floor: int | None = None,
    spare_rows: int = 0,
    step_rows: int | None = None,
    out: FirstPass | None = None,
) -> FirstPass:
    """The rows of depth 1, and the pools moved on: one launch per kind of request, and one for the
    pools of contexts.

    Args:
        last_tokens: [R] int32, any stride. successors: [C] int32, any stride: the token behind
            each chunk.
        chunk_lens, history_lens: per context, on the host: prompt rows, and history rows in front.
        out: as the reference; states of contexts that lie where they should are not moved. Without
            contexts nothing is allocated beside it.
    """
    k = tokens_pool.shape[1]
    num_contexts, num_ctx_tokens = len(chunk_lens), sum(chunk_lens)
    requests = slot_ids.shape[0]
    num_generations = requests - num_contexts
    hidden = hidden_states.shape[1]
    num_ctx_rows = num_ctx_tokens + sum(history_lens)
    num_rows = num_ctx_rows + num_generations * window
    device = hidden_states.device
    if out is None:
        states = torch.empty(
            num_rows + spare_rows, hidden, dtype=hidden_states.dtype, device=device
        )
        first = FirstPass.unwritten(num_rows + k - 1, num_rows, requests, states, kv_lens)
        in_place = False
    else:
        first = out
        in_place = check_vanilla_output(
            out,
            hidden_states,
            kv_lens,
            requests=requests,
            num_contexts=num_contexts,
            num_ctx_tokens=num_ctx_tokens,
            num_history_rows=num_ctx_rows - num_ctx_tokens,
            max_draft_len=k,
            window=window,
            step_rows=k + 1 if step_rows is None else step_rows,
            spare_rows=spare_rows,
        )
    _copy_context_kv_lens(kv_lens, first.kv_lens, num_contexts, 0)
    if num_contexts > 0 and successors is not None:
        ends = context_lens.cumsum(0, dtype=torch.int32)
        history_ends = torch.zeros_like(ends)
        if num_ctx_rows > num_ctx_tokens:
            history_ends = to_device(list(accumulate(history_lens)), torch.int32, device)
        context_rows_kernel[(num_ctx_rows,)](
            tokens_pool,
            states_pool,
            slot_ids,
            input_ids,
            hidden_states,
            positions,
            successors,
            ends + history_ends,
            history_ends,
            first.ids,
            first.positions,
            first.states,
            first.last_rows,
            num_contexts,
            hidden,
            hidden_states.stride(0),
            successors.stride(0),
            K=k,
            BLOCK=min(2048, triton.next_power_of_2(hidden)),
            COPY_STATES=not in_place,
            SEARCH_STEPS=max(num_contexts, 1).bit_length(),
            num_warps=4,
        )
        _advance_contexts(tokens_pool, states_pool, slot_ids, input_ids, hidden_states, ends)
    if num_generations > 0:
        _generations(
            tokens_pool,
            states_pool,
            slot_ids,
            input_ids,
            hidden_states,
            positions,
            num_accepted,
            last_tokens,
            first,
            num_contexts,
            num_ctx_tokens,
            num_ctx_rows,
            num_generations,
            window,
            k + 1 if step_rows is None else step_rows,
            kv_lens,
            kv_floor,
        )
    return first


def eagle_first_pass(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    accepted_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    successors: torch.Tensor | None,
    context_lens: torch.Tensor,
    *,
    num_contexts: int,
    num_ctx_tokens: int,
    max_position: int | None,
    kv_lens: torch.Tensor | None = None,
    kv_floor: int | None = None,
    out: FirstPass | None = None,
) -> FirstPass:
    """The ids of pass 1 and where pass 2 starts; states and positions are the step's own.

    Args:
        out: as the reference. Without contexts nothing is allocated beside it.
    """
    requests, width = accepted_tokens.shape
    num_generations = requests - num_contexts
    if out is None:
        first = FirstPass.beside_step(positions, hidden_states, requests, kv_lens)
    else:
        check_eagle_output(out, positions, hidden_states, kv_lens, requests)
        first = out
    ids, last_rows, own = first.ids, first.last_rows, first.kv_lens
    next_positions = cast(torch.Tensor, first.next_positions)  # for a reused layer it is there
    _copy_context_kv_lens(kv_lens, own, num_contexts, 1)
    if num_contexts > 0 and successors is not None:
        ends = context_lens.to(torch.int64).cumsum(0) - 1
        ids[:num_ctx_tokens] = input_ids[:num_ctx_tokens].roll(-1)
        ids[ends] = successors
        last_rows[:num_contexts] = ends
        after = positions[ends] + 1
        next_positions[:num_contexts] = (
            after if max_position is None else after.clamp_max(max_position)
        )
    if num_generations > 0:
        accepted_rows_kernel[(num_generations,)](
            accepted_tokens,
            num_accepted,
            positions,
            kv_lens if kv_lens is not None else num_accepted,
            ids,
            last_rows,
            next_positions,
            own if own is not None else num_accepted,
            num_contexts,
            num_ctx_tokens,
            UNBOUNDED if max_position is None else max_position,
            LOWEST if kv_floor is None else kv_floor,
            WIDTH=width,
            COLUMNS=triton.next_power_of_2(width),
            HAS_KV=own is not None,
            num_warps=1,
            **pdl_options(hidden_states.device),
        )
    return first


def _copy_context_kv_lens(
    kv_lens: torch.Tensor | None, own: torch.Tensor | None, num_contexts: int, context_rows: int
) -> None:
    """The loop's KV lengths of contexts; the kernels write those of generations."""
    if kv_lens is not None and own is not None and num_contexts > 0:
        torch.add(kv_lens[:num_contexts], context_rows, out=own[:num_contexts])


def _advance_contexts(
    tokens_pool: torch.Tensor,
    states_pool: torch.Tensor,
    slot_ids: torch.Tensor,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """Move the pools of contexts on; ``ends`` [C] int32: each chunk's end in the step's rows."""
    k = tokens_pool.shape[1]
    hidden = hidden_states.shape[1]
    block = _column_block(hidden, k)
    context_history_kernel[(ends.shape[0], -(-hidden // block))](
        tokens_pool,
        states_pool,
        slot_ids,
        input_ids,
        hidden_states,
        ends,
        hidden,
        hidden_states.stride(0),
        K=k,
        ROWS=triton.next_power_of_2(k),
        BLOCK=block,
        num_warps=4,
    )


def _generations(
    tokens_pool: torch.Tensor,
    states_pool: torch.Tensor,
    slot_ids: torch.Tensor,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    positions: torch.Tensor,
    num_accepted: torch.Tensor,
    last_tokens: torch.Tensor,
    first: FirstPass | None,
    num_contexts: int,
    num_ctx_tokens: int,
    num_ctx_rows: int,
    num_generations: int,
    window: int,
    step_rows: int,
    kv_lens: torch.Tensor | None = None,
    kv_floor: int | None = None,
) -> None:
    hidden = hidden_states.shape[1]
    block = _column_block(hidden, window)
    unused = num_accepted
    own = None if first is None else first.kv_lens
    generation_kernel[(num_generations, -(-hidden // block))](
        # pools and step
        tokens_pool,
        states_pool,
        slot_ids,
        input_ids,
        hidden_states,
        positions,
        num_accepted,
        last_tokens,
        kv_lens if kv_lens is not None else unused,
        # outputs
        first.ids if first is not None else unused,
        first.positions if first is not None else unused,
        first.states if first is not None else hidden_states,
        first.last_rows if first is not None else unused,
        own if own is not None else unused,
        # sizes
        num_contexts,
        num_ctx_tokens,
        num_ctx_rows,
        hidden,
        hidden_states.stride(0),
        last_tokens.stride(0),
        LOWEST if kv_floor is None else kv_floor,
        # constants
        K=states_pool.shape[1],
        STEP_ROWS=step_rows,
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
