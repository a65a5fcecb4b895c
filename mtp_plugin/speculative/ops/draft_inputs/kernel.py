"""Triton kernels of history and draft inputs."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize


@triton.jit
def generation_kernel(
    # pools and step
    pool_token_ptr,
    pool_state_ptr,
    slot_ptr,
    input_ptr,
    state_ptr,
    position_ptr,
    count_ptr,
    last_ptr,
    kv_len_ptr,
    # outputs
    id_out_ptr,
    position_out_ptr,
    state_out_ptr,
    row_out_ptr,
    kv_out_ptr,
    # sizes
    num_contexts,
    num_ctx_tokens,
    num_ctx_rows,
    hidden,
    state_stride,
    last_stride,
    kv_floor,
    # constants
    K: tl.constexpr,
    STEP_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITE_WINDOW: tl.constexpr,
    HAS_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (generation, slice of H): its window of pairs, and its pool row moved on.

    A pair is an entry of (K pool pairs ++ the step's rows). Everything is read before anything is
    written, so the window may lie where the step's rows lie, and the pool moves in place.
    """
    grid_dependency_synchronize(PDL)
    generation = tl.program_id(0).to(tl.int64)
    request = num_contexts + generation
    slot = tl.load(slot_ptr + request).to(tl.int64)
    count = tl.load(count_ptr + request).to(tl.int32)
    step_row = num_ctx_tokens + generation * STEP_ROWS
    base = tl.maximum(count + K - WINDOW, 0)

    rows = tl.arange(0, ROWS)
    entry = base + rows
    from_pool = entry < K
    used = rows < WINDOW
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < hidden
    pool_offset = (slot * K + entry)[:, None] * hidden + lanes[None, :]
    step_offset = (step_row + entry - K)[:, None] * state_stride + lanes[None, :]
    kept = tl.load(
        pool_state_ptr + pool_offset, mask=(used & from_pool)[:, None] & inside[None, :], other=0.0
    )
    fresh = tl.load(
        state_ptr + step_offset, mask=(used & ~from_pool)[:, None] & inside[None, :], other=0.0
    )
    states = tl.where(from_pool[:, None], kept.to(fresh.dtype), fresh)
    # what stays in the pool keeps its own precision
    pool_states = tl.where(from_pool[:, None], kept, fresh.to(kept.dtype))

    first = tl.program_id(1) == 0
    step_used = used & ~from_pool & first
    tokens = tl.load(pool_token_ptr + slot * K + entry, mask=used & from_pool & first, other=0)
    step_tokens = tl.load(input_ptr + step_row + entry - K, mask=step_used, other=0)
    tokens = tl.where(from_pool, tokens, step_tokens.to(tl.int32))
    # the token one further on: the next entry, and behind the last one what was emitted last
    following = entry + 1
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
    moved = tl.where(following < K, next_pool, next_step.to(tl.int32))
    last = tl.load(last_ptr + request * last_stride)
    moved = tl.where(rows == WINDOW - 1, last, moved)
    position = tl.load(position_ptr + step_row).to(tl.int64) + count - WINDOW + rows
    tl.debug_barrier()

    # entries [n, n+K) are the pool's next row
    place = rows - (count - base)
    to_pool = used & (place >= 0) & (place < K)
    tl.store(
        pool_state_ptr + (slot * K + place)[:, None] * hidden + lanes[None, :],
        pool_states,
        mask=to_pool[:, None] & inside[None, :],
    )
    tl.store(pool_token_ptr + slot * K + place, tokens, mask=to_pool & first)
    if WRITE_WINDOW:
        out_row = num_ctx_rows + generation * WINDOW + rows
        tl.store(
            state_out_ptr + out_row[:, None] * hidden + lanes[None, :],
            states,
            mask=used[:, None] & inside[None, :],
        )
        dead = position < 0
        tl.store(id_out_ptr + out_row, tl.where(dead, 0, moved), mask=used & first)
        tl.store(position_out_ptr + out_row, tl.where(dead, 0, position), mask=used & first)
        if first:
            tl.store(row_out_ptr + request, num_ctx_rows + (generation + 1) * WINDOW - 1)
            if HAS_KV:
                kv_len = tl.load(kv_len_ptr + request) - STEP_ROWS + count
                tl.store(kv_out_ptr + request, tl.maximum(kv_len, kv_floor))


@triton.jit
def context_rows_kernel(
    # pools and step
    pool_token_ptr,
    pool_state_ptr,
    slot_ptr,
    input_ptr,
    state_ptr,
    position_ptr,
    successor_ptr,
    end_ptr,
    history_ptr,
    # outputs
    id_out_ptr,
    position_out_ptr,
    state_out_ptr,
    row_out_ptr,
    # sizes
    num_contexts,
    hidden,
    state_stride,
    successor_stride,
    # constants
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    COPY_STATES: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):
    """One draft row of a context: a history pair in front of its chunk, or a row of the chunk.

    ``end_ptr`` [C]: exclusive ends of the contexts in draft rows; ``history_ptr`` [C]: history rows
    up to and including each context.
    """
    row = tl.program_id(0)
    low = 0
    high = num_contexts - 1
    for _ in tl.static_range(SEARCH_STEPS):
        middle = (low + high) // 2
        behind = tl.load(end_ptr + middle) <= row
        low = tl.where(behind & (low < high), middle + 1, low)
        high = tl.where(behind, high, tl.maximum(middle, low))
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
    slot = tl.load(slot_ptr + context).to(tl.int64)
    pool_entry = K - history + index

    # the successor of a row: the next pool pair, the next token of the chunk, or what follows it
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
        lanes = tl.arange(0, BLOCK)
        out = row.to(tl.int64) * hidden
        if is_history:
            source = (slot * K + pool_entry) * hidden
            for first in range(0, hidden, BLOCK):
                inside = first + lanes < hidden
                states = tl.load(pool_state_ptr + source + first + lanes, mask=inside, other=0.0)
                tl.store(
                    state_out_ptr + out + first + lanes,
                    states.to(state_out_ptr.dtype.element_ty),
                    mask=inside,
                )
        else:
            source = chunk_row.to(tl.int64) * state_stride
            for first in range(0, hidden, BLOCK):
                inside = first + lanes < hidden
                states = tl.load(state_ptr + source + first + lanes, mask=inside, other=0.0)
                tl.store(state_out_ptr + out + first + lanes, states, mask=inside)


@triton.jit
def context_history_kernel(
    pool_token_ptr,
    pool_state_ptr,
    slot_ptr,
    input_ptr,
    state_ptr,
    end_ptr,
    hidden,
    state_stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One (context, slice of H): its pool row becomes the last K pairs of (pool ++ chunk)."""
    context = tl.program_id(0)
    slot = tl.load(slot_ptr + context).to(tl.int64)
    end = tl.load(end_ptr + context).to(tl.int64)
    start = tl.where(context > 0, tl.load(end_ptr + tl.maximum(context - 1, 0)).to(tl.int64), 0)
    length = end - start
    rows = tl.arange(0, ROWS)
    used = rows < K
    entry = length + rows
    from_pool = entry < K
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < hidden
    chunk_row = end - K + rows
    pool_offset = (slot * K + entry)[:, None] * hidden + lanes[None, :]
    kept = tl.load(
        pool_state_ptr + pool_offset, mask=(used & from_pool)[:, None] & inside[None, :], other=0.0
    )
    fresh = tl.load(
        state_ptr + chunk_row[:, None] * state_stride + lanes[None, :],
        mask=(used & ~from_pool)[:, None] & inside[None, :],
        other=0.0,
    )
    states = tl.where(from_pool[:, None], kept, fresh.to(kept.dtype))
    first = tl.program_id(1) == 0
    kept_tokens = tl.load(pool_token_ptr + slot * K + entry, mask=used & from_pool & first, other=0)
    tokens = tl.load(input_ptr + chunk_row, mask=used & ~from_pool & first, other=0).to(tl.int32)
    tokens = tl.where(from_pool, kept_tokens, tokens)
    tl.debug_barrier()
    tl.store(
        pool_state_ptr + (slot * K + rows)[:, None] * hidden + lanes[None, :],
        states,
        mask=used[:, None] & inside[None, :],
    )
    tl.store(pool_token_ptr + slot * K + rows, tokens, mask=used & first)


@triton.jit
def accepted_rows_kernel(
    token_ptr,
    count_ptr,
    position_ptr,
    kv_len_ptr,
    id_out_ptr,
    row_out_ptr,
    position_out_ptr,
    kv_out_ptr,
    num_contexts,
    num_ctx_tokens,
    max_position,
    kv_floor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """One generation of a reused layer: its accepted tokens, its last row, its next position."""
    grid_dependency_synchronize(PDL)
    generation = tl.program_id(0).to(tl.int64)
    request = num_contexts + generation
    columns = tl.arange(0, COLUMNS)
    emitted = tl.load(count_ptr + request).to(tl.int32)
    if HAS_KV:
        # one row, right behind the last accepted position
        kv_len = tl.load(kv_len_ptr + request) - (WIDTH - 1) + emitted
        tl.store(kv_out_ptr + request, tl.maximum(kv_len, kv_floor))
    count = tl.maximum(emitted, 1)
    column = tl.minimum(columns, count - 1)
    tokens = tl.load(token_ptr + request * WIDTH + column, mask=columns < WIDTH, other=0)
    first_row = num_ctx_tokens + generation * WIDTH
    tl.store(id_out_ptr + first_row + columns, tl.maximum(tokens, 0), mask=columns < WIDTH)
    tl.store(row_out_ptr + request, first_row + count - 1)
    position = tl.load(position_ptr + first_row + count - 1).to(tl.int64) + 1
    tl.store(position_out_ptr + request, tl.minimum(position, max_position))
