"""Triton implementation of `logprobs`: a scan of the rows by chunks, and a finish per token.

1. Grid (rows of logits, groups of BLOCKS_PER_PROGRAM blocks), `logprob_scan_kernel`: store of every
   chunk its maximum, and the sum of exp(x - maximum). Left out if sampling has stored the maxima of
   chunks and the sums of rows.
2. Grid [R * (K+1)], `logprob_finish_kernel`, one program per entry: load the chunk maxima of the
   entry's row; the row's maximum and sum give the log-probability of the token.
3. Rank: select the chunks whose maximum is at least the token's value, and count in these alone the
   tokens ordered before it.
4. Top-k: the k-th highest chunk maximum is a lower bound of the k-th highest value. Select the
   chunks that reach it, and keep the k highest keys of their tiles. A key orders by value, then by
   the lowest id, and is unique, so each step replaces exactly one.
5. Store the entry.

Chunks are selected into a list in memory, which threads share: barriers separate its writes and
reads. NaN counts as -inf; in a row with +inf the lowest such id has log-probability 0, and all
others -inf. A token outside the vocabulary has -inf and rank V+1. Entries without a token (at or
after the count, of a request that wants none, or past the only row of a context) hold fill values,
and rows without an entry are not read.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.logit_rows.rows_triton import (
    LOG2_E,
    NO_COLUMN,
    float_to_ordered_int,
    load_block,
    load_slot,
    nan_to_neg_inf,
    neg_inf_to_zero,
    ordered_int_to_float,
    select_chunks,
    sum_chunks,
    sum_row,
    thread_maxima,
    tile_columns,
)
from mtp_plugin.ops.logprobs import LogprobEntries
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.row_sums import ChunkLayout, RowSums
from mtp_plugin.ops.step import SlotRows, StepLayout
from mtp_plugin.requests.columns import request_column
from mtp_plugin.requests.logprobs import (
    ENTRY_WIDTH,
    RANK_INDEX,
    TOKEN_INDEX,
    TOP_IDS_INDEX,
    TOP_VALUES_INDEX,
    VALUE_INDEX,
)
from mtp_plugin.requests.options import MAX_LOGPROBS

BLOCKS_PER_PROGRAM = 4
"""Blocks that a program of the scan reads if there are many rows: programs without work take time
too."""
SOME_ROWS = 64
"""Up to so many rows the scan has one program per block."""
TILE = 4096
"""Logits that a program of the finish reads at once."""
FINISH_WARPS = 8

LOGPROBS = tl.constexpr(request_column("logprobs"))
ENTRY = tl.constexpr(ENTRY_WIDTH)
TOKEN = tl.constexpr(TOKEN_INDEX)
RANK = tl.constexpr(RANK_INDEX)
VALUE = tl.constexpr(VALUE_INDEX)
TOP_IDS = tl.constexpr(TOP_IDS_INDEX)
TOP_VALUES = tl.constexpr(TOP_VALUES_INDEX)
TOP = tl.constexpr(MAX_LOGPROBS)
LISTED = tl.constexpr(triton.next_power_of_2(MAX_LOGPROBS))
NO_KEY = tl.constexpr(-(2**63))
"""Below the key of every value; the next MAX_LOGPROBS keys are too, one per list entry."""
LOWEST_KEY = tl.constexpr(-(2**63) + triton.next_power_of_2(MAX_LOGPROBS))
HIGHEST_KEY = tl.constexpr(2**63 - 1)

UNSPECIALIZED = ["num_contexts", "width", "num_blocks", "requested"]
UNSPECIALIZED += ["count_stride", "table_stride", "slot_stride", "num_slots"]
OF_TOKENS = ["token_row_stride", "token_stride"]
UNALIGNED = ["count_ptr", "table_ptr", "slot_ptr"]
"""Arguments that differ between batches: no binary is specialized on them."""


@triton.jit
def requested_logprobs(
    request,
    table_ptr,
    table_stride,
    slot_ptr,
    slot_stride,
    num_slots,
    requested,
    HAS_SLOTS: tl.constexpr,
):
    """The number of most likely tokens that a request wants; below 0: no entries."""
    if HAS_SLOTS:
        slot = load_slot(slot_ptr, slot_stride, request, num_slots)
        return tl.load(table_ptr + slot * table_stride + LOGPROBS)
    else:
        return requested


@triton.jit
def load_values(pointers, inside):
    """Values in float32; -inf for NaN and outside."""
    return nan_to_neg_inf(tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32))


@triton.jit
def pack_keys(x, ids):
    """Unique int64 keys in the order of values; among equal values a lower id has a higher key."""
    return float_to_ordered_int(x).to(tl.int64) * 4294967296 - ids


@triton.jit
def id_of_key(key):
    """The id of a key."""
    return (-key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def value_of_key(key):
    """The value of a key."""
    return ordered_int_to_float(((key + id_of_key(key)) >> 32).to(tl.int32))


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def logprob_scan_kernel(
    # inputs
    logits_ptr,  # [N, vocab] floating; N: rows of logits
    count_ptr,  # [R] integer: generated tokens of each request
    table_ptr,  # HAS_SLOTS: [S, W] int32
    slot_ptr,  # HAS_SLOTS: [>= R] integer
    # outputs
    chunk_max_ptr,  # [N, num_blocks * LAYOUT.chunks] float32: maxima of chunks
    sum_ptr,  # [N, num_blocks * LAYOUT.chunks] float32: sums of exp(x - maximum)
    # sizes
    num_contexts,  # C
    width,  # K+1: rows of a generation
    vocab,
    num_blocks,  # of a row
    requested,  # without HAS_SLOTS: number of top tokens of every request, -1: no entry
    row_stride,
    count_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    # constants
    LAYOUT: tl.constexpr,  # ChunkLayout
    BLOCKS_PER_PROGRAM: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per BLOCKS_PER_PROGRAM blocks of a row; rows without an entry are skipped."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    generation_row = tl.maximum(tl.program_id(0) - num_contexts, 0)
    is_context = row < num_contexts
    request = tl.where(is_context, row, num_contexts + generation_row // width)
    index = tl.where(is_context, 0, generation_row % width)
    count = tl.load(count_ptr + request * count_stride)
    requested = requested_logprobs(
        request, table_ptr, table_stride, slot_ptr, slot_stride, num_slots, requested, HAS_SLOTS
    )
    if (requested >= 0) & (index < count):
        first_block = tl.program_id(1) * BLOCKS_PER_PROGRAM
        for block in range(first_block, tl.minimum(first_block + BLOCKS_PER_PROGRAM, num_blocks)):
            x = load_block(logits_ptr + row * row_stride, block, vocab, LAYOUT.block)
            by_thread = tl.reshape(x, [LAYOUT.wraps, LAYOUT.threads, LAYOUT.each])
            thread_max = thread_maxima(by_thread)
            by_chunk = tl.reshape(thread_max, [LAYOUT.chunks, LAYOUT.chunk_threads])
            chunk_max = tl.max(by_chunk, axis=1)
            thread_exponents = (by_chunk - neg_inf_to_zero(chunk_max)[:, None]) * LOG2_E
            offsets = (row * num_blocks + block) * LAYOUT.chunks + tl.arange(0, LAYOUT.chunks)
            tl.store(chunk_max_ptr + offsets, chunk_max)
            tl.store(sum_ptr + offsets, sum_chunks(by_thread, thread_max, thread_exponents, LOG2_E))


@triton.jit
def _load_tile(row_ptr, vocab, selected, first, TILE: tl.constexpr, LAYOUT: tl.constexpr):
    """Values and columns of selected chunks, and which are valid, all [TILE, chunk size].

    Values are -inf where invalid.
    """
    columns, is_chunk = tile_columns(selected, first, tl.arange(0, LAYOUT.chunk_size), TILE, LAYOUT)
    inside = is_chunk[:, None] & (columns < vocab)
    return load_values(row_ptr + columns, inside), columns, inside


@triton.jit
def count_rank(
    row_ptr,
    vocab,
    column,
    token_value,
    chunk_maxima,
    is_chunk,
    selected_ptr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """The rank of a token in a column, at most ``vocab``, with value ``token_value``: 1 + the
    number of tokens ordered before it."""
    SIZE: tl.constexpr = LAYOUT.chunk_size
    selected = select_chunks((chunk_maxima >= token_value) & is_chunk, selected_ptr)
    # other threads read what a thread wrote
    tl.debug_barrier()
    num_before = tl.zeros([TILE, SIZE], tl.int32)
    offsets = tl.arange(0, SIZE)
    x = _load_tile(row_ptr, vocab, selected, 0, TILE, LAYOUT)[0]
    for first in range(0, selected.num_chunks, TILE):
        # load the next tile while this one is counted
        next_x = _load_tile(row_ptr, vocab, selected, first + TILE, TILE, LAYOUT)[0]
        columns, in_list = tile_columns(selected, first, offsets, TILE, LAYOUT)
        is_equal = in_list[:, None] & (x == token_value) & (columns < column)
        num_before += ((x > token_value) | is_equal).to(tl.int32)
        x = next_x
    return 1 + tl.sum(tl.sum(num_before, axis=1), axis=0)


@triton.jit
def most_likely(
    row_ptr,
    vocab,
    num_tokens,
    chunk_maxima,
    chunks,
    is_chunk,
    selected_ptr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """The ``num_tokens`` >= 1 most likely tokens of a row and their values [LISTED], then -1."""
    # each of the `num_tokens` highest chunks has a value >= min_value
    keys = tl.where(is_chunk, pack_keys(chunk_maxima, chunks), NO_KEY)
    min_value = float("inf")
    for _ in range(num_tokens):
        best = tl.max(keys, axis=0)
        min_value = tl.where(best > NO_KEY, value_of_key(best), float("-inf"))
        keys = tl.where(keys == best, NO_KEY, keys)
    # the rank was counted with the previous contents of selected_ptr
    tl.debug_barrier()
    selected = select_chunks((chunk_maxima >= min_value) & is_chunk, selected_ptr)
    tl.debug_barrier()

    offsets = tl.arange(0, LISTED)
    # unique, so that exactly one is replaced at a time
    best_keys = NO_KEY + offsets.to(tl.int64)
    lowest = tl.full([], NO_KEY, tl.int64)
    for first in range(0, selected.num_chunks, TILE):
        x, columns, inside = _load_tile(row_ptr, vocab, selected, first, TILE, LAYOUT)
        tile_keys = tl.where(inside, pack_keys(x, columns), NO_KEY)
        best_tile_key = tl.max(tl.max(tile_keys, axis=1), axis=0)
        while best_tile_key > lowest:
            best_keys = tl.where(best_keys == lowest, best_tile_key, best_keys)
            lowest = tl.min(tl.where(offsets < num_tokens, best_keys, HIGHEST_KEY), axis=0)
            tile_keys = tl.where(tile_keys == best_tile_key, NO_KEY, tile_keys)
            best_tile_key = tl.max(tl.max(tile_keys, axis=1), axis=0)

    ids = tl.full([LISTED], -1, tl.int32)
    values = tl.full([LISTED], 0.0, tl.float32)
    for index in range(num_tokens):
        best = tl.max(best_keys, axis=0)
        is_index = (offsets == index) & (best >= LOWEST_KEY)
        ids = tl.where(is_index, id_of_key(best), ids)
        values = tl.where(is_index, value_of_key(best), values)
        best_keys = tl.where(best_keys == best, NO_KEY, best_keys)
    return ids, values


@triton.jit(
    do_not_specialize=[*UNSPECIALIZED, *OF_TOKENS],
    do_not_specialize_on_alignment=[*UNALIGNED, "token_ptr"],
)
def logprob_finish_kernel(
    # inputs
    logits_ptr,  # [N, vocab] floating; N: rows of logits
    count_ptr,  # [R] integer: generated tokens of each request
    table_ptr,  # HAS_SLOTS: [S, W] int32
    slot_ptr,  # HAS_SLOTS: [>= R] integer
    token_ptr,  # [R, width] integer: generated tokens
    chunk_max_ptr,  # [N, num_blocks * LAYOUT.chunks] float32: maxima of chunks
    sum_ptr,  # HAS_SUMS: [N], else [N, num_blocks * LAYOUT.chunks] float32: sums of rows or chunks
    # outputs
    entry_ptr,  # [R, width, ENTRY] int32
    # written and read
    selected_ptr,  # [R, width, num_blocks * LAYOUT.chunks] int32: indices of selected chunks
    # sizes
    num_contexts,  # C
    width,  # K+1: rows of a generation
    vocab,
    num_blocks,  # of a row
    requested,  # without HAS_SLOTS: number of top tokens of every request, -1: no entry
    row_stride,
    count_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    token_row_stride,
    token_stride,
    # constants
    LAYOUT: tl.constexpr,  # ChunkLayout
    ALL_CHUNKS: tl.constexpr,  # a power of two >= num_blocks * LAYOUT.chunks
    TILE: tl.constexpr,  # chunks per iteration
    HAS_SLOTS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (request, index of its token): the entry of the token, or fill values."""
    grid_dependency_synchronize(PDL)
    request = (tl.program_id(0) // width).to(tl.int64)
    index = tl.program_id(0) % width
    is_context = request < num_contexts
    row = tl.where(is_context, request, num_contexts + (request - num_contexts) * width + index)
    count = tl.load(count_ptr + request * count_stride)
    requested = requested_logprobs(
        request, table_ptr, table_stride, slot_ptr, slot_stride, num_slots, requested, HAS_SLOTS
    )
    offsets = tl.arange(0, LISTED)
    token = tl.full([], -1, tl.int32)
    rank = tl.full([], 0, tl.int32)
    value = tl.full([], 0.0, tl.float32)
    ids = tl.full([LISTED], -1, tl.int32)
    values = tl.full([LISTED], 0.0, tl.float32)
    if (requested >= 0) & (index < count) & ((index == 0) | (request >= num_contexts)):
        num_tokens = tl.minimum(requested, TOP)
        given = tl.load(token_ptr + request * token_row_stride + index * token_stride)
        token = given.to(tl.int32)
        # 64-bit ids are compared before they are narrowed; an unknown id is ordered after all
        is_known = (given >= 0) & (given < vocab)
        column = tl.where(is_known, token, vocab)
        row_ptr = logits_ptr + row * row_stride
        token_value = load_values(row_ptr + column, is_known)
        num_chunks = num_blocks * LAYOUT.chunks
        chunks = tl.arange(0, ALL_CHUNKS)
        is_chunk = chunks < num_chunks
        chunk_offsets = row * num_chunks + chunks
        chunk_maxima = tl.load(chunk_max_ptr + chunk_offsets, mask=is_chunk, other=float("-inf"))
        if HAS_SUMS:
            row_sum = tl.load(sum_ptr + row)
        else:
            chunk_sums = tl.load(sum_ptr + chunk_offsets, mask=is_chunk, other=0.0)
        row_max = tl.max(chunk_maxima, axis=0)
        if row_max == float("inf"):
            # blocks are in the order of token ids, chunks within a block are not
            block = tl.min(
                tl.where(chunk_maxima == row_max, chunks // LAYOUT.chunks, NO_COLUMN), axis=0
            )
            columns = block * LAYOUT.block + tl.arange(0, LAYOUT.block)
            x = load_values(row_ptr + columns, columns < vocab)
            first = tl.min(tl.where(x == row_max, columns, NO_COLUMN), axis=0)
            # then all others by id
            others = offsets - 1 + (offsets > first).to(tl.int32)
            ids = tl.where(offsets == 0, first, others)
            values = tl.where(offsets == 0, 0.0, float("-inf"))
            value = tl.where(column == first, 0.0, float("-inf"))
            rank = tl.where(column == first, 1, column + 1 + (column < first).to(tl.int32))
            is_listed = (offsets < num_tokens) & (offsets < vocab)
            ids = tl.where(is_listed, ids, -1)
            values = tl.where(is_listed, values, 0.0)
        else:
            if not HAS_SUMS:
                row_sum = sum_row(chunk_sums, chunk_maxima, row_max, LOG2_E)
            norm = tl.log(row_sum)
            value = tl.where(
                token_value > float("-inf"), token_value - row_max - norm, float("-inf")
            )
            selected_ptr += tl.program_id(0).to(tl.int64) * num_chunks
            rank = count_rank(
                row_ptr,
                vocab,
                column,
                token_value,
                chunk_maxima,
                is_chunk,
                selected_ptr,
                TILE,
                LAYOUT,
            )
            if num_tokens > 0:
                ids, values = most_likely(
                    row_ptr,
                    vocab,
                    num_tokens,
                    chunk_maxima,
                    chunks,
                    is_chunk,
                    selected_ptr,
                    TILE,
                    LAYOUT,
                )
                lower = tl.where(values > float("-inf"), values - row_max - norm, float("-inf"))
                values = tl.where(ids >= 0, lower, 0.0)
    entry = entry_ptr + tl.program_id(0).to(tl.int64) * ENTRY
    tl.store(entry + TOKEN, token)
    tl.store(entry + RANK, rank)
    tl.store(entry + VALUE, value.to(tl.int32, bitcast=True))
    tl.store(entry + TOP_IDS + offsets, ids, mask=offsets < TOP)
    tl.store(entry + TOP_VALUES + offsets, values.to(tl.int32, bitcast=True), mask=offsets < TOP)


def logprobs_triton(
    layout: StepLayout,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    requested: SlotRows | int,
    sums: RowSums | None,
) -> LogprobEntries:
    expect_reachable(logprob_scan_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    device = logits.device
    shape = layout.num_requests, layout.step_rows, ENTRY_WIDTH
    result = LogprobEntries(torch.empty(shape, dtype=torch.int32, device=device))
    if num_rows == 0:
        return result
    chunks = ChunkLayout.of(logits)
    num_blocks, num_chunks = chunks.num_blocks(vocab), chunks.num_chunks(vocab)
    num_cells = layout.num_requests * layout.step_rows
    slots = requested if isinstance(requested, SlotRows) else None
    inputs = (
        logits,
        counts,
        counts if slots is None else slots.table,  # never read without slots
        counts if slots is None else slots.slot_ids,
    )
    sizes = (
        layout.num_contexts,
        layout.step_rows,
        vocab,
        num_blocks,
        0 if isinstance(requested, SlotRows) else requested,
        logits.stride(0),
        counts.stride(0),
        0 if slots is None else slots.table.stride(0),
        0 if slots is None else slots.slot_ids.stride(0),
        0 if slots is None else slots.table.shape[0],
    )
    constants: dict[str, Any] = {
        "LAYOUT": chunks,
        "HAS_SLOTS": slots is not None,
        **pdl_options(device),
    }
    if sums is None:
        blocks = 1 if num_rows <= SOME_ROWS else BLOCKS_PER_PROGRAM
        chunk_maxima, chunk_sums = torch.empty(
            2, num_rows, num_chunks, dtype=torch.float32, device=device
        )
        logprob_scan_kernel[(num_rows, -(-num_blocks // blocks))](
            *inputs,
            chunk_maxima,
            chunk_sums,
            *sizes,
            **constants,
            BLOCKS_PER_PROGRAM=blocks,
            num_warps=chunks.warps,
        )
    else:
        chunk_maxima, chunk_sums = sums.tops, sums.masses
    logprob_finish_kernel[(num_cells,)](
        *inputs,
        tokens,
        chunk_maxima,
        chunk_sums,
        # outputs
        result.entries,
        # written and read
        torch.empty(num_cells, num_chunks, dtype=torch.int32, device=device),
        *sizes,
        *tokens.stride(),
        **constants,
        ALL_CHUNKS=triton.next_power_of_2(num_chunks),
        TILE=TILE // chunks.chunk_size,
        HAS_SUMS=sums is not None,
        num_warps=FINISH_WARPS,
    )
    return result
