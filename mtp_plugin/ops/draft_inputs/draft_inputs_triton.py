"""Triton implementation of `draft_inputs`.

K layers (`advance_and_build_inputs`), up to three launches:

1. Grid [draft rows of contexts]: `context_rows_kernel` searches the context of its row, and writes
   the id, position and state of the row: a pair of the pool before the chunk, or a row of the
   chunk.
2. Grid (C, blocks of H): `context_history_kernel` then sets the context's pool row to the last K
   entries of (pool ++ chunk).
3. Grid (G, blocks of H): `generation_window_kernel` reads the entries of (pool ++ step rows) that
   its generation needs, and after a barrier writes the window of the first pass and the pool row:
   both may be the memory that was read. Programs of the first block of H also write ids, positions,
   the last row and the KV length.

Without a first pass (`advance_history`) only the pools advance: 2, and 3 without its window.

A reused layer (`build_reused_inputs`), one launch: grid [G], `accepted_rows_kernel` writes the
accepted tokens of a generation, its last row, next position and KV length.

Rows of a window at negative positions are dead: their id and position are 0. A generation with 0
output tokens keeps its pool, and its window is not used. Rejected or absent drafts lie after the
accepted rows, which no window reaches; a reused layer repeats the last token there. Padding
requests may share a slot: they write its pool row, which no other request reads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.draft_inputs.types import (
    DraftKVLengths,
    DraftWindows,
    History,
    TargetRows,
)
from mtp_plugin.ops.logit_rows.rows_triton import load_slot
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.step import DrafterInputs, StepLayout, to_device

UNBOUNDED = 2**62
LOWEST = -(2**31)


@triton.jit(do_not_specialize=["num_slots"])
def generation_window_kernel(
    # pools, updated in place
    pool_token_ptr,  # [S, K] int32
    pool_state_ptr,  # [S, K, H] floating
    # inputs
    slot_ptr,  # [R] integer
    input_ptr,  # [T] integer: input ids of the step
    state_ptr,  # [T, H] floating: the target's states of them
    position_ptr,  # [T] integer
    count_ptr,  # [R] integer: output tokens, 0 to K+1
    last_ptr,  # WRITE_WINDOW: [R] integer: the last output token
    kv_len_ptr,  # HAS_KV: [>= R] integer
    # outputs, with WRITE_WINDOW
    id_out_ptr,  # [T' + K-1] int32
    position_out_ptr,  # [T'] int64
    state_out_ptr,  # [>= T', H], as the states of the step, possibly their memory
    row_out_ptr,  # [R] int64: the last row of each request
    kv_out_ptr,  # HAS_KV: [>= R] integer
    # sizes
    num_slots,  # S, of the smaller pool
    num_contexts,  # C
    num_ctx_tokens,  # step rows of contexts
    num_ctx_rows,  # draft rows of contexts
    hidden,  # H
    state_stride,
    last_stride,
    kv_floor,  # least KV length of a generation
    # constants
    K: tl.constexpr,  # of the pools
    STEP_ROWS: tl.constexpr,  # of a generation
    WINDOW: tl.constexpr,  # draft rows of a generation
    ROWS: tl.constexpr,  # a power of two >= WINDOW
    BLOCK: tl.constexpr,  # columns of H per program
    WRITE_WINDOW: tl.constexpr,
    HAS_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (generation, block of H): write its window of pairs, advance its pool row.

    A pair is an entry of (K pool pairs ++ the step's rows). Everything is read before anything is
    written, so the window may use the memory of the step's rows, and the pool advances in place.
    """
    grid_dependency_synchronize(PDL)
    generation = tl.program_id(0).to(tl.int64)
    request = num_contexts + generation
    slot = load_slot(slot_ptr, 1, request, num_slots)
    count = tl.load(count_ptr + request).to(tl.int32)
    step_row = num_ctx_tokens + generation * STEP_ROWS
    base = tl.maximum(count + K - WINDOW, 0)

    rows = tl.arange(0, ROWS)
    entries = base + rows
    from_pool = entries < K
    rows_inside = rows < WINDOW
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns_inside = columns < hidden
    pool_offsets = (slot * K + entries)[:, None] * hidden + columns[None, :]
    step_offsets = (step_row + entries - K)[:, None] * state_stride + columns[None, :]
    pool_values = tl.load(
        pool_state_ptr + pool_offsets,
        mask=(rows_inside & from_pool)[:, None] & columns_inside[None, :],
        other=0.0,
    )
    step_values = tl.load(
        state_ptr + step_offsets,
        mask=(rows_inside & ~from_pool)[:, None] & columns_inside[None, :],
        other=0.0,
    )
    states = tl.where(from_pool[:, None], pool_values.to(step_values.dtype), step_values)
    # entries that stay in the pool keep its precision
    pool_states = tl.where(from_pool[:, None], pool_values, step_values.to(pool_values.dtype))

    first = tl.program_id(1) == 0
    from_step = rows_inside & ~from_pool & first
    tokens = tl.load(
        pool_token_ptr + slot * K + entries, mask=rows_inside & from_pool & first, other=0
    )
    step_tokens = tl.load(input_ptr + step_row + entries - K, mask=from_step, other=0)
    tokens = tl.where(from_pool, tokens, step_tokens.to(tl.int32))
    # the following token: that of the next entry, and after the last one the last output token
    following = entries + 1
    next_pool = tl.load(
        pool_token_ptr + slot * K + following,
        mask=(rows < WINDOW - 1) & (following < K) & first,
        other=0,
    )
    next_step = tl.load(
        input_ptr + step_row + following - K,
        mask=(rows < WINDOW - 1) & (following >= K) & first,
        other=0,
    )
    next_tokens = tl.where(following < K, next_pool, next_step.to(tl.int32))
    last = tl.load(last_ptr + request * last_stride)
    next_tokens = tl.where(rows == WINDOW - 1, last, next_tokens)
    positions = tl.load(position_ptr + step_row).to(tl.int64) + count - WINDOW + rows
    tl.debug_barrier()

    # entries [n, n+K) are the pool's next row
    pool_entries = rows - (count - base)
    to_pool = rows_inside & (pool_entries >= 0) & (pool_entries < K)
    tl.store(
        pool_state_ptr + (slot * K + pool_entries)[:, None] * hidden + columns[None, :],
        pool_states,
        mask=to_pool[:, None] & columns_inside[None, :],
    )
    tl.store(pool_token_ptr + slot * K + pool_entries, tokens, mask=to_pool & first)
    if WRITE_WINDOW:
        out_rows = num_ctx_rows + generation * WINDOW + rows
        tl.store(
            state_out_ptr + out_rows[:, None] * hidden + columns[None, :],
            states,
            mask=rows_inside[:, None] & columns_inside[None, :],
        )
        dead = positions < 0
        tl.store(id_out_ptr + out_rows, tl.where(dead, 0, next_tokens), mask=rows_inside & first)
        tl.store(
            position_out_ptr + out_rows, tl.where(dead, 0, positions), mask=rows_inside & first
        )
        if first:
            tl.store(row_out_ptr + request, num_ctx_rows + (generation + 1) * WINDOW - 1)
            if HAS_KV:
                kv_len = tl.load(kv_len_ptr + request) - STEP_ROWS + count
                tl.store(kv_out_ptr + request, tl.maximum(kv_len, kv_floor))


@triton.jit(do_not_specialize=["num_slots"])
def context_rows_kernel(
    # pools
    pool_token_ptr,  # [S, K] int32
    pool_state_ptr,  # [S, K, H] floating
    # step
    slot_ptr,  # [R] integer
    input_ptr,  # [T] integer: input ids
    state_ptr,  # [T, H] floating: the target's states of them
    position_ptr,  # [T] integer
    successor_ptr,  # [C] integer: the token that follows each chunk
    end_ptr,  # [C] int32: exclusive end of each context in draft rows
    history_ptr,  # [C] int32: history rows up to and including each context
    # outputs
    id_out_ptr,  # [T' + K-1] int32
    position_out_ptr,  # [T'] int64
    state_out_ptr,  # COPY_STATES: [>= T', H], as the states of the step
    row_out_ptr,  # [R] int64: the last row of each request
    # sizes
    num_slots,  # S, of the smaller pool
    num_contexts,  # C
    hidden,  # H
    state_stride,
    successor_stride,
    # constants
    K: tl.constexpr,  # of the pools
    BLOCK: tl.constexpr,  # columns of H per iteration
    COPY_STATES: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,  # of a binary search among C contexts
):
    """One program per draft row of a context: a history pair before its chunk, or a chunk row."""
    row = tl.program_id(0)
    low = 0
    high = num_contexts - 1
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        is_before = tl.load(end_ptr + middle) <= row
        low = tl.where(is_before & (low < high), middle + 1, low)
        high = tl.where(is_before, high, tl.maximum(middle, low))
    context = low
    previous = tl.maximum(context - 1, 0)
    start = tl.where(context > 0, tl.load(end_ptr + previous), 0)
    history_before = tl.where(context > 0, tl.load(history_ptr + previous), 0)
    history = tl.load(history_ptr + context) - history_before
    end = tl.load(end_ptr + context)
    index = row - start
    chunk_start = start - history_before  # rows of the step carry no history
    is_history = index < history
    chunk_row = chunk_start + index - history
    slot = load_slot(slot_ptr, 1, context, num_slots)
    pool_entry = K - history + index

    # the token after a row: the next pool pair, the next token of the chunk, or its successor
    next_in_pool = is_history & (index + 1 < history)
    is_last = row + 1 == end
    from_pool = tl.load(pool_token_ptr + slot * K + pool_entry + 1, mask=next_in_pool, other=0)
    following = tl.load(
        input_ptr + chunk_row + 1, mask=(next_in_pool == 0) & (is_last == 0), other=0
    ).to(tl.int32)
    token = tl.where(next_in_pool, from_pool, following)
    token = tl.where(is_last, tl.load(successor_ptr + context * successor_stride), token)
    position = tl.load(position_ptr + chunk_start).to(tl.int64) - history + index
    tl.store(id_out_ptr + row, token)
    tl.store(position_out_ptr + row, position)
    if is_last:
        tl.store(row_out_ptr + context, row.to(tl.int64))
    if COPY_STATES:
        offsets = tl.arange(0, BLOCK)
        out = row.to(tl.int64) * hidden
        if is_history:
            source = (slot * K + pool_entry) * hidden
            for first in range(0, hidden, BLOCK):
                inside = first + offsets < hidden
                states = tl.load(pool_state_ptr + source + first + offsets, mask=inside, other=0.0)
                tl.store(
                    state_out_ptr + out + first + offsets,
                    states.to(state_out_ptr.dtype.element_ty),
                    mask=inside,
                )
        else:
            source = chunk_row.to(tl.int64) * state_stride
            for first in range(0, hidden, BLOCK):
                inside = first + offsets < hidden
                states = tl.load(state_ptr + source + first + offsets, mask=inside, other=0.0)
                tl.store(state_out_ptr + out + first + offsets, states, mask=inside)


@triton.jit(do_not_specialize=["num_slots"])
def context_history_kernel(
    # pools, updated in place
    pool_token_ptr,  # [S, K] int32
    pool_state_ptr,  # [S, K, H] floating
    # inputs
    slot_ptr,  # [R] integer
    input_ptr,  # [T] integer: input ids of the step
    state_ptr,  # [T, H] floating: the target's states of them
    end_ptr,  # [C] int32: exclusive end of each chunk in the step's rows
    # sizes
    num_slots,  # S, of the smaller pool
    hidden,  # H
    state_stride,
    # constants
    K: tl.constexpr,  # of the pools
    ROWS: tl.constexpr,  # a power of two >= K
    BLOCK: tl.constexpr,  # columns of H per program
):
    """One program per (context, block of H): set its pool row to the last K of pool ++ chunk."""
    context = tl.program_id(0)
    slot = load_slot(slot_ptr, 1, context, num_slots)
    end = tl.load(end_ptr + context).to(tl.int64)
    start = tl.where(context > 0, tl.load(end_ptr + tl.maximum(context - 1, 0)).to(tl.int64), 0)
    length = end - start
    rows = tl.arange(0, ROWS)
    rows_inside = rows < K
    entries = length + rows
    from_pool = entries < K
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    columns_inside = columns < hidden
    chunk_rows = end - K + rows
    pool_offsets = (slot * K + entries)[:, None] * hidden + columns[None, :]
    pool_values = tl.load(
        pool_state_ptr + pool_offsets,
        mask=(rows_inside & from_pool)[:, None] & columns_inside[None, :],
        other=0.0,
    )
    chunk_values = tl.load(
        state_ptr + chunk_rows[:, None] * state_stride + columns[None, :],
        mask=(rows_inside & ~from_pool)[:, None] & columns_inside[None, :],
        other=0.0,
    )
    states = tl.where(from_pool[:, None], pool_values, chunk_values.to(pool_values.dtype))
    first = tl.program_id(1) == 0
    pool_tokens = tl.load(
        pool_token_ptr + slot * K + entries, mask=rows_inside & from_pool & first, other=0
    )
    chunk_tokens = tl.load(input_ptr + chunk_rows, mask=rows_inside & ~from_pool & first, other=0)
    tokens = tl.where(from_pool, pool_tokens, chunk_tokens.to(tl.int32))
    tl.debug_barrier()
    tl.store(
        pool_state_ptr + (slot * K + rows)[:, None] * hidden + columns[None, :],
        states,
        mask=rows_inside[:, None] & columns_inside[None, :],
    )
    tl.store(pool_token_ptr + slot * K + rows, tokens, mask=rows_inside & first)


@triton.jit(do_not_specialize=["num_contexts", "num_ctx_tokens"])
def accepted_rows_kernel(
    # inputs
    token_ptr,  # [R, WIDTH] integer: accepted tokens
    count_ptr,  # [R] integer: how many of each row count, 0 to WIDTH
    position_ptr,  # [T] integer
    kv_len_ptr,  # HAS_KV: [>= R] integer
    # outputs
    id_out_ptr,  # [T] int32
    row_out_ptr,  # [R] int64: the last row of each request
    position_out_ptr,  # [R] int64: positions of pass 2
    kv_out_ptr,  # HAS_KV: [>= R] integer
    # sizes
    num_contexts,  # C
    num_ctx_tokens,  # step rows of contexts
    max_position,
    kv_floor,  # least KV length of a generation
    # constants
    WIDTH: tl.constexpr,  # K+1: step rows of a generation
    COLUMNS: tl.constexpr,  # a power of two >= WIDTH
    HAS_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per generation: its accepted tokens, last row and next position."""
    grid_dependency_synchronize(PDL)
    generation = tl.program_id(0).to(tl.int64)
    request = num_contexts + generation
    columns = tl.arange(0, COLUMNS)
    num_tokens = tl.load(count_ptr + request).to(tl.int32)
    if HAS_KV:
        # one row, right after the last accepted position
        kv_len = tl.load(kv_len_ptr + request) - (WIDTH - 1) + num_tokens
        tl.store(kv_out_ptr + request, tl.maximum(kv_len, kv_floor))
    count = tl.maximum(num_tokens, 1)
    token_columns = tl.minimum(columns, count - 1)
    tokens = tl.load(token_ptr + request * WIDTH + token_columns, mask=columns < WIDTH, other=0)
    first_row = num_ctx_tokens + generation * WIDTH
    tl.store(id_out_ptr + first_row + columns, tl.maximum(tokens, 0), mask=columns < WIDTH)
    tl.store(row_out_ptr + request, first_row + count - 1)
    position = tl.load(position_ptr + first_row + count - 1).to(tl.int64) + 1
    tl.store(position_out_ptr + request, tl.minimum(position, max_position))


def advance_history_triton(
    layout: StepLayout, history: History, rows: TargetRows, num_accepted: torch.Tensor
) -> None:
    """One launch for contexts, one for generations."""
    if layout.num_contexts > 0:
        ends = layout.context_lens.cumsum(0, dtype=torch.int32)
        _advance_contexts(history, rows, ends)
    if layout.num_generations > 0:
        _advance_generations(layout, history, rows, num_accepted, None)


def advance_and_build_inputs_triton(
    layout: StepLayout,
    history: History,
    rows: TargetRows,
    num_accepted: torch.Tensor,
    last_tokens: torch.Tensor,
    windows: DraftWindows,
    kv: DraftKVLengths | None,
) -> DrafterInputs:
    """One launch per kind of request, and one for the pools of contexts.

    The result uses the memory of the step's states if each of its rows has the index of the step's
    row and that saves copies of prompt rows. The windows of generations then overwrite the
    step's states, which must be allowed.
    """
    positions = layout.expect_positions("advance_and_build_inputs").contiguous()
    window, history_lens, spare_rows = windows.window, windows.history_lens, windows.spare_rows
    successors = rows.successors
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
        and (num_generations == 0 or windows.may_overwrite_states)
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
            history.num_slots,
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
        out = _WindowOutput(first, positions, last_tokens, kv, window, num_ctx_rows)
        _advance_generations(layout, history, rows, num_accepted, out)
    return first


def build_reused_inputs_triton(
    layout: StepLayout,
    rows: TargetRows,
    accepted_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    max_position: int | None,
    kv: DraftKVLengths | None,
) -> DrafterInputs:
    positions, successors = layout.expect_positions("build_reused_inputs"), rows.successors
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
    """Return the draft loop's KV lengths, of which the kernels write those of generations."""
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
    """Return the KV lengths of host engine and draft loop and the minimum, as kernel arguments."""
    if kv is None or own is None:
        return unused, unused, LOWEST
    return kv.lens.contiguous(), own, LOWEST if kv.floor is None else kv.floor


def _advance_contexts(history: History, rows: TargetRows, ends: torch.Tensor) -> None:
    """Advance the pools of contexts; ``ends`` [C] int32: each chunk's end in the step's rows."""
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
        history.num_slots,
        hidden,
        rows.hidden_states.stride(0),
        K=k,
        ROWS=triton.next_power_of_2(k),
        BLOCK=block,
        num_warps=4,
    )


@dataclass(frozen=True)
class _WindowOutput:
    """Where the windows of generations are written, and what they read in addition."""

    first: DrafterInputs
    positions: torch.Tensor
    last_tokens: torch.Tensor
    kv: DraftKVLengths | None
    window: int
    num_ctx_rows: int  # rows of the result before them


def _advance_generations(
    layout: StepLayout,
    history: History,
    rows: TargetRows,
    num_accepted: torch.Tensor,
    out: _WindowOutput | None,
) -> None:
    """Advance the pools of generations, after writing their windows to ``out``."""
    hidden_states = rows.hidden_states
    hidden = hidden_states.shape[1]
    window = history.max_draft_len if out is None else out.window
    block = _column_block(hidden, window)
    num_accepted = num_accepted.contiguous()
    unused = num_accepted
    # positions and last tokens are read for windows alone
    positions = rows.input_ids if out is None else out.positions
    last_tokens = num_accepted if out is None else out.last_tokens
    first = None if out is None else out.first
    own = None if first is None else first.kv_lens
    kv_lens, kv_out, floor = _kv_arguments(None if out is None else out.kv, own, unused)
    generation_window_kernel[(layout.num_generations, -(-hidden // block))](
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
        history.num_slots,
        layout.num_contexts,
        layout.num_ctx_tokens,
        layout.num_ctx_tokens if out is None else out.num_ctx_rows,
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
    """Return columns per program: wide enough for loads, few enough to stay in registers."""
    widest = max(128, 4096 // triton.next_power_of_2(rows))
    return int(min(widest, max(16, triton.next_power_of_2(hidden))))
