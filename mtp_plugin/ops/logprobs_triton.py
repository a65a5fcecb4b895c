"""Triton implementation of `logprobs`: a scan of the rows by chunks, and a finish per token.

1. Grid (rows of logits, groups of PARTS blocks), `logprob_scan_kernel`: store of every chunk its
   maximum, and the sum of exp(x - maximum). Left out if sampling has stored the maxima of chunks
   and the sums of rows.
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
others -inf. Entries without a token (at or after the count, of a request that wants none, or past
the only row of a context) hold fill values, and rows without an entry are not read.
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

PARTS = 4
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
UNSPECIALIZED += ["count_stride", "table_stride", "slot_stride"]
OF_TOKENS = ["token_row_stride", "token_stride"]
UNALIGNED = ["count_ptr", "table_ptr", "slot_ptr"]
"""Arguments that differ between batches: no binary is specialized on them."""


@triton.jit
def requested_logprobs(
    request, table_ptr, table_stride, slot_ptr, slot_stride, requested, HAS_SLOTS: tl.constexpr
):
    """The number of most likely tokens that a request wants; below 0: no entries."""
    if HAS_SLOTS:
        slot = tl.load(slot_ptr + request * slot_stride).to(tl.int64)
        return tl.load(table_ptr + slot * table_stride + LOGPROBS)
    else:
        return requested


@triton.jit
def loaded(pointers, inside):
    """Values in float32; -inf for NaN and outside."""
    return nan_to_neg_inf(tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32))


@triton.jit
def keys_of(x, ids):
    """Unique int64 keys in the order of values; among equal values a lower id has a higher key."""
    return float_to_ordered_int(x).to(tl.int64) * 4294967296 - ids


@triton.jit
def id_of(key):
    """The id of a key."""
    return (-key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def value_of_key(key):
    """The value of a key."""
    return ordered_int_to_float(((key + id_of(key)) >> 32).to(tl.int32))


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def logprob_scan_kernel(
    # inputs
    logits_ptr,  # [N, vocab] floating; N: rows of logits
    count_ptr,  # [R] integer: generated tokens of each request
    table_ptr,  # HAS_SLOTS: [S, W] int32
    slot_ptr,  # HAS_SLOTS: [>= R] integer
    # outputs
    top_ptr,  # [N, num_blocks * LAYOUT.chunks] float32: maxima of chunks
    mass_ptr,  # [N, num_blocks * LAYOUT.chunks] float32: sums of exp(x - maximum)
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
    # constants
    LAYOUT: tl.constexpr,  # ChunkLayout
    PARTS: tl.constexpr,  # blocks per program
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per ``PARTS`` blocks of a row; rows without a requested entry are skipped."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    generation_row = tl.maximum(tl.program_id(0) - num_contexts, 0)
    is_context = row < num_contexts
    request = tl.where(is_context, row, num_contexts + generation_row // width)
    index = tl.where(is_context, 0, generation_row % width)
    count = tl.load(count_ptr + request * count_stride)
    requested = requested_logprobs(
        request, table_ptr, table_stride, slot_ptr, slot_stride, requested, HAS_SLOTS
    )
    if (requested >= 0) & (index < count):
        first_block = tl.program_id(1) * PARTS
        for block in range(first_block, tl.minimum(first_block + PARTS, num_blocks)):
            x = load_block(logits_ptr + row * row_stride, block, vocab, LAYOUT.block)
            held = tl.reshape(x, [LAYOUT.wraps, LAYOUT.threads, LAYOUT.each])
            thread_top = thread_maxima(held)
            by_chunk = tl.reshape(thread_top, [LAYOUT.chunks, LAYOUT.chunk_threads])
            top = tl.max(by_chunk, axis=1)
            below = (by_chunk - neg_inf_to_zero(top)[:, None]) * LOG2_E
            out = (row * num_blocks + block) * LAYOUT.chunks + tl.arange(0, LAYOUT.chunks)
            tl.store(top_ptr + out, top)
            tl.store(mass_ptr + out, sum_chunks(held, thread_top, below, LOG2_E))


@triton.jit
def _tile_of(row_ptr, vocab, picked, first, TILE: tl.constexpr, LAYOUT: tl.constexpr):
    """Values and columns of picked chunks, and which are valid, all [TILE, chunk size]; values are
    -inf where invalid."""
    columns, here = tile_columns(picked, first, tl.arange(0, LAYOUT.chunk_size), TILE, LAYOUT)
    inside = here[:, None] & (columns < vocab)
    return loaded(row_ptr + columns, inside), columns, inside


@triton.jit
def rank_of(
    row_ptr,
    vocab,
    token,
    own,
    tops,
    is_chunk,
    picked_ptr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """The rank of a token of value ``own``: 1 + the number of tokens ordered before it."""
    SIZE: tl.constexpr = LAYOUT.chunk_size
    picked = select_chunks((tops >= own) & is_chunk, picked_ptr)
    # other threads read what a thread wrote
    tl.debug_barrier()
    ahead = tl.zeros([TILE, SIZE], tl.int32)
    places = tl.arange(0, SIZE)
    x = _tile_of(row_ptr, vocab, picked, 0, TILE, LAYOUT)[0]
    for first in range(0, picked.num_chunks, TILE):
        # load the next tile while this one is counted
        next_x = _tile_of(row_ptr, vocab, picked, first + TILE, TILE, LAYOUT)[0]
        columns, here = tile_columns(picked, first, places, TILE, LAYOUT)
        is_equal = here[:, None] & (x == own) & (columns < tl.minimum(token, vocab))
        ahead += ((x > own) | is_equal).to(tl.int32)
        x = next_x
    return 1 + tl.sum(tl.sum(ahead, axis=1), axis=0)


@triton.jit
def most_likely(
    row_ptr,
    vocab,
    number,
    tops,
    chunks,
    is_chunk,
    picked_ptr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """The ``number`` >= 1 most likely tokens of a row and their values [LISTED], then -1."""
    # each of the `number` highest chunks holds a value >= least
    keys = tl.where(is_chunk, keys_of(tops, chunks), NO_KEY)
    least = float("inf")
    for _ in range(number):
        best = tl.max(keys, axis=0)
        least = tl.where(best > NO_KEY, value_of_key(best), float("-inf"))
        keys = tl.where(keys == best, NO_KEY, keys)
    # the rank was counted with the previous contents of picked_ptr
    tl.debug_barrier()
    picked = select_chunks((tops >= least) & is_chunk, picked_ptr)
    tl.debug_barrier()

    places = tl.arange(0, LISTED)
    # unique, so that exactly one is replaced at a time
    found = NO_KEY + places.to(tl.int64)
    lowest = tl.full([], NO_KEY, tl.int64)
    for first in range(0, picked.num_chunks, TILE):
        x, columns, inside = _tile_of(row_ptr, vocab, picked, first, TILE, LAYOUT)
        of_tile = tl.where(inside, keys_of(x, columns), NO_KEY)
        best_of_tile = tl.max(tl.max(of_tile, axis=1), axis=0)
        while best_of_tile > lowest:
            found = tl.where(found == lowest, best_of_tile, found)
            lowest = tl.min(tl.where(places < number, found, HIGHEST_KEY), axis=0)
            of_tile = tl.where(of_tile == best_of_tile, NO_KEY, of_tile)
            best_of_tile = tl.max(tl.max(of_tile, axis=1), axis=0)

    ids = tl.full([LISTED], -1, tl.int32)
    values = tl.full([LISTED], 0.0, tl.float32)
    for place in range(number):
        best = tl.max(found, axis=0)
        is_here = (places == place) & (best >= LOWEST_KEY)
        ids = tl.where(is_here, id_of(best), ids)
        values = tl.where(is_here, value_of_key(best), values)
        found = tl.where(found == best, NO_KEY, found)
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
    top_ptr,  # [N, num_blocks * LAYOUT.chunks] float32: maxima of chunks
    mass_ptr,  # HAS_SUMS: [N], else [N, num_blocks * LAYOUT.chunks] float32: sums of rows or chunks
    # outputs
    entry_ptr,  # [R, width, ENTRY] int32
    # written and read
    picked_ptr,  # [R, width, num_blocks * LAYOUT.chunks] int32: indices of selected chunks
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
        request, table_ptr, table_stride, slot_ptr, slot_stride, requested, HAS_SLOTS
    )
    places = tl.arange(0, LISTED)
    token = tl.full([], -1, tl.int32)
    rank = tl.full([], 0, tl.int32)
    value = tl.full([], 0.0, tl.float32)
    ids = tl.full([LISTED], -1, tl.int32)
    values = tl.full([LISTED], 0.0, tl.float32)
    if (requested >= 0) & (index < count) & ((index == 0) | (request >= num_contexts)):
        number = tl.minimum(requested, TOP)
        token = tl.load(token_ptr + request * token_row_stride + index * token_stride).to(tl.int32)
        row_ptr = logits_ptr + row * row_stride
        own = loaded(row_ptr + token, (token >= 0) & (token < vocab))
        num_chunks = num_blocks * LAYOUT.chunks
        chunks = tl.arange(0, ALL_CHUNKS)
        is_chunk = chunks < num_chunks
        kept = row * num_chunks + chunks
        tops = tl.load(top_ptr + kept, mask=is_chunk, other=float("-inf"))
        if HAS_SUMS:
            mass = tl.load(mass_ptr + row)
        else:
            masses = tl.load(mass_ptr + kept, mask=is_chunk, other=0.0)
        top = tl.max(tops, axis=0)
        if top == float("inf"):
            # blocks are in the order of token ids, chunks within a block are not
            block = tl.min(tl.where(tops == top, chunks // LAYOUT.chunks, NO_COLUMN), axis=0)
            columns = block * LAYOUT.block + tl.arange(0, LAYOUT.block)
            x = loaded(row_ptr + columns, columns < vocab)
            first = tl.min(tl.where(x == top, columns, NO_COLUMN), axis=0)
            # then all others by id
            others = places - 1 + (places > first).to(tl.int32)
            ids = tl.where(places == 0, first, others)
            values = tl.where(places == 0, 0.0, float("-inf"))
            value = tl.where(token == first, 0.0, float("-inf"))
            rank = tl.where(token == first, 1, token + 1 + (token < first).to(tl.int32))
            is_listed = (places < number) & (places < vocab)
            ids = tl.where(is_listed, ids, -1)
            values = tl.where(is_listed, values, 0.0)
        else:
            if not HAS_SUMS:
                mass = sum_row(masses, tops, top, LOG2_E)
            norm = tl.log(mass)
            value = tl.where(own > float("-inf"), own - top - norm, float("-inf"))
            picked_ptr += tl.program_id(0).to(tl.int64) * num_chunks
            rank = rank_of(row_ptr, vocab, token, own, tops, is_chunk, picked_ptr, TILE, LAYOUT)
            if number > 0:
                ids, values = most_likely(
                    row_ptr, vocab, number, tops, chunks, is_chunk, picked_ptr, TILE, LAYOUT
                )
                lower = tl.where(values > float("-inf"), values - top - norm, float("-inf"))
                values = tl.where(ids >= 0, lower, 0.0)
    entry = entry_ptr + tl.program_id(0).to(tl.int64) * ENTRY
    tl.store(entry + TOKEN, token)
    tl.store(entry + RANK, rank)
    tl.store(entry + VALUE, value.to(tl.int32, bitcast=True))
    tl.store(entry + TOP_IDS + places, ids, mask=places < TOP)
    tl.store(entry + TOP_VALUES + places, values.to(tl.int32, bitcast=True), mask=places < TOP)


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
    )
    constants: dict[str, Any] = {
        "LAYOUT": chunks,
        "HAS_SLOTS": slots is not None,
        **pdl_options(device),
    }
    if sums is None:
        parts = 1 if num_rows <= SOME_ROWS else PARTS
        tops, masses = torch.empty(2, num_rows, num_chunks, dtype=torch.float32, device=device)
        logprob_scan_kernel[(num_rows, -(-num_blocks // parts))](
            *inputs, tops, masses, *sizes, **constants, PARTS=parts, num_warps=chunks.warps
        )
    else:
        tops, masses = sums.tops, sums.masses
    logprob_finish_kernel[(num_cells,)](
        *inputs,
        tokens,
        tops,
        masses,
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
