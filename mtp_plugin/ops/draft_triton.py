"""Triton implementation of `draft`: two launches per draft, one per shift of the state window.

A greedy draft takes two launches; a sampled one only the second:

1. Grid (R, blocks of the vocabulary): `top1_kernel` reduces each block of a row to its highest
   value and the lowest column that has it. `processed_top1_kernel` does so after logits processing
   with the allowed ids of drafts; columns of a reduced vocabulary are processed as their token ids.
2. Grid [R]: `write_drafts_kernel` merges the blocks of its row, lowest column on ties, and
   translates the column to a token id.
3. A forced end of thinking replaces that id.
4. It writes the draft to its column of the result and of the next tokens, and to the row that the
   next pass reads; it advances the request's position and KV length.
5. It updates the request's mask of the tokens that its next draft must not be.

`draft_argmax_kernel` is phase 2 alone. A row without a finite logit gets a valid id, as does a
sampled row without a draft (-1), since drafts are inputs of an embedding. Each program writes to
its own request alone, so padding requests need no mask; those that share a slot have no row in the
pools, and phase 5 skips them.

`shift_states_kernel`, once per pass after the first: copy the last output row of each request to
its row of the window. Programs own blocks of columns; its docstring has the order of requests.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.draft import shift_state_window_reference
from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.logit_rows import LogitRows, ThinkingRule
from mtp_plugin.ops.logit_rows.processing_triton import (
    Pools,
    load_processing,
    process_values,
    update_draft_mask,
)
from mtp_plugin.ops.logit_rows.rows_triton import load_slot
from mtp_plugin.ops.logit_rows.thinking_triton import forced_after
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.step import DraftOutput, SlotRows
from mtp_plugin.ops.top1 import Top1Partials, split, top1_partials
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, MAX_BAD_WORDS
from mtp_plugin.requests.stopping import MAX_STOP_IDS

UNBOUNDED = 2**62
REQUESTS, SHARED_REQUESTS, COLUMNS = 32, 256, 64
"""Requests and columns of states that a program holds at a time; SHARED_REQUESTS if states and
outputs share memory, so that every program must go through all requests, chunk after chunk."""

# arguments that differ between batches: no binary is specialized on them
BATCH_NUMBERS = ["row_position_stride", "ahead_stride", "table_stride", "slot_stride", "pool_vocab"]
BATCH_NUMBERS += ["num_slots", "begin_token", "end_token", "end_length"]
BATCH_POINTERS = ["row_position_ptr", "ahead_ptr", "table_ptr", "slot_ptr"]
SLOT_NUMBERS = ["table_stride", "slot_stride", "num_slots", "pool_vocab", "draft_stride", "column"]
SLOT_POINTERS = ["table_ptr", "slot_ptr", "draft_ptr"]


@triton.jit(do_not_specialize=BATCH_NUMBERS, do_not_specialize_on_alignment=BATCH_POINTERS)
def write_drafts_kernel(
    # inputs
    value_ptr,  # not IS_SAMPLED: [R, num_blocks] float32: maxima of blocks
    id_ptr,  # [R, num_blocks] int32: their columns; IS_SAMPLED: [R] int32: token ids, -1: none
    # outputs
    draft_ptr,  # [R, K] int32; earlier columns are read too
    next_ptr,  # [R, K+1] int32
    shifted_ptr,  # SHIFT: [T' + K-1] integer: ids of the window that the next pass reads
    # input
    row_ptr,  # SHIFT: [R] integer: the last row of each request
    # updated in place
    position_ptr,  # ADVANCE: [R] integer
    kv_len_ptr,  # HAS_KV: [>= R] integer
    # inputs
    vocab_ptr,  # HAS_VOCAB_IDS: [V'] int32: token ids of the columns
    row_position_ptr,  # HAS_DRAFT_MASK: [R] integer: of the target's first row of each request
    ahead_ptr,  # HAS_AHEAD: [R] integer: accepted tokens
    table_ptr,  # HAS_DRAFT_MASK or HAS_THINKING: [S, W] int32
    slot_ptr,  # HAS_DRAFT_MASK or HAS_THINKING: [>= R] integer
    words_ptr,  # HAS_DRAFT_MASK: [P, WORDS, LENGTH] int32: bad words, right-aligned, -1 before
    # updated in place
    allowed_ptr,  # HAS_DRAFT_MASK: [P, num_words(pool_vocab) + 1] int32: ids of drafts
    masked_ids_ptr,  # HAS_DRAFT_MASK: [P + 1, STOPS + WORDS] int32: ids removed from them
    # inputs
    end_ptr,  # HAS_THINKING: [end_length] int32: the end sequence
    next_progress_ptr,  # HAS_THINKING: [end_length, end_length] int32
    # sizes
    num_blocks,  # of a row of logits
    draft_stride,
    next_stride,
    column,  # of the draft, 0 to K-1
    max_position,
    row_position_stride,
    ahead_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    pool_vocab,
    begin_token,  # of thinking
    end_token,  # that ends thinking alone; -1: none
    end_length,  # of the end sequence
    # constants
    NUM_BLOCKS: tl.constexpr,  # a power of two >= num_blocks
    SHIFT: tl.constexpr,
    ADVANCE: tl.constexpr,
    HAS_KV: tl.constexpr,
    HAS_VOCAB_IDS: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
    HAS_DRAFT_MASK: tl.constexpr,
    HAS_THINKING: tl.constexpr,
    LANES: tl.constexpr,  # a power of two >= end_length
    HAS_AHEAD: tl.constexpr,
    STOPS: tl.constexpr,  # most stop ids of a request
    WORDS: tl.constexpr,  # most bad words of a request
    LENGTH: tl.constexpr,  # longest bad word
    PDL: tl.constexpr,
):
    """One program per request: write its draft for the next pass and for the sampler, and mask the
    tokens that its next draft must not be."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, NUM_BLOCKS)
    if IS_SAMPLED:
        draft = tl.maximum(tl.load(id_ptr + request), 0)
    else:
        inside = blocks < num_blocks
        offsets = request * num_blocks + blocks
        values = tl.load(value_ptr + offsets, mask=inside, other=float("-inf"))
        ids = tl.load(id_ptr + offsets, mask=inside, other=2147483647)
        top = tl.max(values, axis=0)
        draft = tl.min(tl.where(values == top, ids, 2147483647), axis=0)
    if HAS_VOCAB_IDS:
        draft = tl.load(vocab_ptr + draft)
    slot_row_ptr = table_ptr
    if HAS_DRAFT_MASK or HAS_THINKING:
        slot_row_ptr += load_slot(slot_ptr, slot_stride, request, num_slots) * table_stride
    if HAS_THINKING:
        forced = forced_after(
            slot_row_ptr,
            draft_ptr + request * draft_stride,
            column,
            begin_token,
            end_token,
            end_ptr,
            next_progress_ptr,
            end_length,
            LANES,
        )
        draft = tl.where(forced >= 0, forced, draft)
    tl.store(draft_ptr + request * draft_stride + column, draft)
    tl.store(next_ptr + request * next_stride + column + 1, draft)
    if SHIFT:
        # the window moves by an offset into the ids: only its last entry is new
        row = tl.load(row_ptr + request)
        tl.store(shifted_ptr + row + column + 1, draft)
    if ADVANCE:
        position = tl.load(position_ptr + request) + 1
        tl.store(position_ptr + request, tl.minimum(position, max_position))
        if HAS_KV:
            tl.store(kv_len_ptr + request, tl.load(kv_len_ptr + request) + 1)
    if HAS_DRAFT_MASK:
        index = tl.load(row_position_ptr + request * row_position_stride).to(tl.int64)
        if HAS_AHEAD:
            index += tl.load(ahead_ptr + request * ahead_stride).to(tl.int64)
        # other threads than those that stored the draft load it
        tl.debug_barrier()
        update_draft_mask(
            slot_row_ptr,
            index + column + 2,
            column + 1,
            allowed_ptr,
            masked_ids_ptr,
            words_ptr,
            draft_ptr + request * draft_stride,
            pool_vocab,
            STOPS,
            WORDS,
            LENGTH,
            True,
        )


@triton.jit
def draft_argmax_kernel(
    # inputs
    value_ptr,  # [rows, num_blocks] float32: maxima of blocks
    id_ptr,  # [rows, num_blocks] int32: their lowest ids
    # output
    draft_ptr,  # [rows] int32
    # sizes
    num_blocks,
    # constants
    NUM_BLOCKS: tl.constexpr,  # a power of two >= num_blocks
    PDL: tl.constexpr,
):
    """One program per row: the id of the maximum of its blocks, the lowest on ties."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, NUM_BLOCKS)
    inside = blocks < num_blocks
    values = tl.load(value_ptr + row * num_blocks + blocks, mask=inside, other=float("-inf"))
    ids = tl.load(id_ptr + row * num_blocks + blocks, mask=inside, other=2147483647)
    top = tl.max(values, axis=0)
    tl.store(draft_ptr + row, tl.min(tl.where(values == top, ids, 2147483647), axis=0))


@triton.jit(do_not_specialize=SLOT_NUMBERS, do_not_specialize_on_alignment=SLOT_POINTERS)
def processed_top1_kernel(
    # inputs
    logits_ptr,  # [R, vocab] floating
    table_ptr,  # [S, W] int32
    slot_ptr,  # [>= R] integer
    bias_ptr,  # [P, pool_vocab] float32
    allowed_ptr,  # [P, num_words(pool_vocab) + 1] int32: a bit per id, then their number
    count_ptr,  # [P, pool_vocab] int16, unsigned: token counts
    seen_ptr,  # [P, num_words(pool_vocab)] int32: a bit per id
    draft_ptr,  # [R, >= column] int32: earlier drafts
    vocab_ptr,  # HAS_VOCAB_IDS: [vocab] int32: token ids of the columns
    # outputs
    value_ptr,  # [R, num_blocks] float32: maxima of blocks
    id_ptr,  # [R, num_blocks] int32: their lowest columns
    # sizes
    row_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    draft_stride,
    column,  # number of earlier drafts
    pool_vocab,
    vocab,  # columns of the logits
    block_len,
    num_blocks,
    # constants
    HAS_VOCAB_IDS: tl.constexpr,
    TILE: tl.constexpr,  # columns per iteration
    PDL: tl.constexpr,
):
    """One program per (row, block of columns): the maximum after logits processing, and its lowest
    column."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    slot_row_ptr = table_ptr + load_slot(slot_ptr, slot_stride, row, num_slots) * table_stride
    pools = Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab)
    processing = load_processing(slot_row_ptr, pools, draft_ptr + row * draft_stride, column)
    first = block * block_len
    end = tl.minimum(first + block_len, vocab)
    offsets = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_column = first + offsets
    for start in range(first, end, TILE):
        columns = start + offsets
        inside = columns < end
        x = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where(x == x, x, float("-inf"))
        ids = columns
        if HAS_VOCAB_IDS:
            ids = tl.load(vocab_ptr + columns, mask=inside, other=0)
        x = tl.where(inside, process_values(x, ids, inside, processing), float("-inf"))
        better = x > best
        best = tl.where(better, x, best)
        best_column = tl.where(better, columns, best_column)
    top = tl.max(best, axis=0)
    top_column = tl.min(tl.where(best == top, best_column, 2147483647), axis=0)
    out = row * num_blocks + block
    tl.store(value_ptr + out, top)
    tl.store(id_ptr + out, top_column)


@triton.jit
def shift_states_kernel(
    # inputs
    output_ptr,  # [T', H] floating, possibly rows of the states
    row_ptr,  # [R] integer, ascending: the last row of each request
    # output
    state_ptr,  # [T' + K-1, H] floating
    # sizes
    num_requests,  # R
    hidden,  # H
    output_stride,
    state_stride,
    offset,  # of the window of the next pass
    chunks,  # of requests, per program
    # constants
    REQUESTS: tl.constexpr,  # of a chunk
    BLOCK: tl.constexpr,  # columns per program
    PDL: tl.constexpr,
):
    """One program per block of columns and ``chunks`` chunks of requests, the last chunk first.

    If ``output`` is ``state`` from row d <= offset on, request i writes row last[i] + offset and
    request j reads row last[j] + d. These are the same row only if last[j] >= last[i], that is
    j >= i: a write never overwrites what a lower chunk has yet to read. Within a chunk the barrier
    separates all reads from all writes, and other columns belong to other programs.
    """
    grid_dependency_synchronize(PDL)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = (tl.program_id(1) + 1) * chunks
    for back in range(chunks):
        requests = (end - 1 - back) * REQUESTS + tl.arange(0, REQUESTS)
        requests_inside = requests < num_requests
        rows = tl.load(row_ptr + requests, mask=requests_inside, other=0).to(tl.int64)
        inside = requests_inside[:, None] & (columns < hidden)[None, :]
        source_ptrs = output_ptr + rows[:, None] * output_stride + columns[None, :]
        states = tl.load(source_ptrs, mask=inside, other=0.0)
        tl.debug_barrier()
        target_ptrs = state_ptr + (rows + offset)[:, None] * state_stride + columns[None, :]
        tl.store(target_ptrs, states, mask=inside)


def propose_triton(logits: torch.Tensor, output: DraftOutput) -> None:
    _write(top1_partials(logits), output)


def propose_processed_triton(
    logits: torch.Tensor,
    output: DraftOutput,
    rows: LogitRows,
    slots: SlotRows,
    following: LogitRows | None,
    thinking: ThinkingRule | None,
) -> None:
    partials = _processed_partials(logits, output, rows, slots)
    _write(partials, output, following, slots, thinking)


def write_drafts_triton(
    drafts: torch.Tensor,
    output: DraftOutput,
    following: LogitRows | None,
    slots: SlotRows | None,
    thinking: ThinkingRule | None,
) -> None:
    """One launch, one program per request."""
    _write(drafts.contiguous(), output, following, slots, thinking)


def draft_argmax_triton(logits: torch.Tensor) -> torch.Tensor:
    partials = top1_partials(logits)
    drafts = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    draft_argmax_kernel[(drafts.shape[0],)](
        partials.values,
        partials.ids,
        drafts,
        partials.num_blocks,
        NUM_BLOCKS=triton.next_power_of_2(partials.num_blocks),
        num_warps=1,
        **pdl_options(drafts.device),
    )
    return drafts


def _processed_partials(
    logits: torch.Tensor, output: DraftOutput, rows: LogitRows, slots: SlotRows
) -> Top1Partials:
    """As `top1_partials`, after logits processing."""
    pools = slots.for_drafts().pools
    if pools is None:
        return top1_partials(logits)
    expect_reachable(processed_top1_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    block_len, num_blocks, tile = split(num_rows, vocab)
    partials = Top1Partials.unwritten(num_rows, vocab, logits.device)
    drafts = rows.drafts
    processed_top1_kernel[(num_rows, num_blocks)](
        # inputs
        logits,
        slots.table,
        slots.slot_ids,
        pools.bias,
        pools.allowed,
        pools.counts,
        pools.seen,
        output.drafts if drafts is None else drafts,
        partials.ids if output.vocab_ids is None else output.vocab_ids,
        # outputs
        partials.values,
        partials.ids,
        # sizes
        logits.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        slots.table.shape[0],
        0 if drafts is None else drafts.stride(0),
        0 if drafts is None else rows.column,
        pools.vocab_size,
        vocab,
        block_len,
        num_blocks,
        # constants
        HAS_VOCAB_IDS=output.vocab_ids is not None,
        TILE=tile,
        num_warps=8,
        **pdl_options(logits.device),
    )
    return partials


def _write(
    source: Top1Partials | torch.Tensor,
    output: DraftOutput,
    following: LogitRows | None = None,
    slots: SlotRows | None = None,
    thinking: ThinkingRule | None = None,
) -> None:
    """Write the drafts of ``source``: maxima of blocks, or sampled token ids [R], contiguous."""
    if isinstance(source, Top1Partials):
        values, ids, num_blocks = source.values, source.ids, source.num_blocks
        vocab_ids = output.vocab_ids
    else:
        values, ids, num_blocks = source, source, 1
        vocab_ids = None
    unused = ids
    draft_mask = None if following is None or slots is None else slots.draft_mask
    pools = None if draft_mask is None or slots is None else slots.pools
    length = 1 if thinking is None else thinking.end_ids.numel()
    ahead = None if following is None else following.ahead
    write_drafts_kernel[(ids.shape[0],)](
        values,
        ids,
        output.drafts,
        output.next_tokens,
        output.shifted_ids if output.shifted_ids is not None else unused,
        output.last_rows.contiguous() if output.last_rows is not None else unused,
        output.positions if output.positions is not None else unused,
        output.kv_lens if output.kv_lens is not None else unused,
        vocab_ids if vocab_ids is not None else unused,
        unused if following is None else following.positions,
        unused if ahead is None else ahead,
        unused if slots is None else slots.table,
        unused if slots is None else slots.slot_ids,
        unused if pools is None else pools.words,
        unused if draft_mask is None else draft_mask.allowed,
        unused if draft_mask is None else draft_mask.masked_ids,
        unused if thinking is None else thinking.end_ids,
        unused if thinking is None else thinking.next_progress,
        num_blocks,
        output.drafts.stride(0),
        output.next_tokens.stride(0),
        output.column,
        UNBOUNDED if output.max_position is None else output.max_position,
        0 if following is None else following.positions.stride(0),
        0 if ahead is None else ahead.stride(0),
        0 if slots is None else slots.table.stride(0),
        0 if slots is None else slots.slot_ids.stride(0),
        0 if slots is None else slots.table.shape[0],
        0 if pools is None else pools.vocab_size,
        -1 if thinking is None else thinking.begin_token,
        -1 if thinking is None else thinking.end_token,
        length,
        NUM_BLOCKS=triton.next_power_of_2(num_blocks),
        SHIFT=output.shifted_ids is not None,
        ADVANCE=output.positions is not None,
        HAS_KV=output.kv_lens is not None,
        HAS_VOCAB_IDS=vocab_ids is not None,
        IS_SAMPLED=not isinstance(source, Top1Partials),
        HAS_DRAFT_MASK=draft_mask is not None,
        HAS_THINKING=thinking is not None,
        LANES=triton.next_power_of_2(length),
        HAS_AHEAD=ahead is not None,
        STOPS=MAX_STOP_IDS,
        WORDS=MAX_BAD_WORDS,
        LENGTH=MAX_BAD_WORD_LEN,
        num_warps=1,
        **pdl_options(ids.device),
    )


def shift_state_window_triton(
    states: torch.Tensor, outputs: torch.Tensor, last_rows: torch.Tensor, offset: int
) -> None:
    """One launch; memory that overlaps other than as a window, and rows with gaps, use torch."""
    expect_reachable(shift_states_kernel, "states", states)
    requests, hidden = last_rows.shape[0], states.shape[1]
    shares = _share_memory(states, outputs)
    if (shares and not _is_window(states, outputs, offset)) or not _has_plain_rows(states, outputs):
        shift_state_window_reference(states, outputs, last_rows, offset)
        return
    rows = min(SHARED_REQUESTS if shares else REQUESTS, triton.next_power_of_2(requests))
    chunks = triton.cdiv(requests, rows)
    block = min(COLUMNS, triton.next_power_of_2(hidden))
    # with several chunks it runs so long that an overlapping launch costs more than it saves
    timing = {"PDL": False} if shares else pdl_options(states.device)
    shift_states_kernel[(triton.cdiv(hidden, block), 1 if shares else chunks)](
        # inputs
        outputs,
        last_rows.contiguous(),
        # outputs
        states,
        # sizes
        requests,
        hidden,
        outputs.stride(0),
        states.stride(0),
        offset,
        chunks if shares else 1,
        # constants
        REQUESTS=rows,
        BLOCK=block,
        num_warps=8,
        **timing,
    )


def _share_memory(states: torch.Tensor, outputs: torch.Tensor) -> bool:
    return states.untyped_storage().data_ptr() == outputs.untyped_storage().data_ptr()


def _is_window(states: torch.Tensor, outputs: torch.Tensor, offset: int) -> bool:
    """Whether ``outputs`` are rows of ``states`` from at most row ``offset`` on."""
    ahead = outputs.storage_offset() - states.storage_offset()
    return (
        outputs.dtype == states.dtype
        and outputs.stride() == states.stride()
        and ahead % states.stride(0) == 0
        and 0 <= ahead // states.stride(0) <= offset
    )


def _has_plain_rows(states: torch.Tensor, outputs: torch.Tensor) -> bool:
    """Whether rows of both are contiguous, and no two rows of states overlap."""
    return states.stride(1) == outputs.stride(1) == 1 and states.stride(0) >= states.shape[1]
