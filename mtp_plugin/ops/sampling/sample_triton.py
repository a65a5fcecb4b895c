"""Triton implementation of `sample`: a scan of the rows by chunks, and a finish per row.

A *chunk* of a row is what a few neighbouring threads hold of a block (see `row_sums`), so that
threads exchange no values before chunks are reduced.

1. `sample_scan_kernel`, grid [blocks of a row / BLOCKS_PER_PROGRAM, N], reads every logit once,
   processes it, and writes of each chunk its maximum and what the request's options need:

   - greedy: the lowest column of the maximum;
   - no truncation: a bound of the highest noisy score, from a cheap bound of the noise;
   - top-p alone: the sum of the weights exp((x - maximum) / T);
   - top-k or min-p: nothing more.

   Rows whose request returns log-probabilities also get the sum of exp(x - maximum).
2. `sample_finish_kernel`, grid [N], loads the maxima of a row's chunks, and

   a. for a greedy row, or one that holds +inf, returns the lowest column of the maximum;
   b. without truncation, computes exact noisy scores of the chunks whose bound reaches the best
      score so far (`best_noisy_column`): one or two of a thousand;
   c. with truncation, reads the chunks that may hold kept tokens (`truncation_triton`; the page
      is README.md).

   It writes the token, the row's truncation, and its sum for log-probabilities.

So logits are read once, apart from a few chunks. With programmatic dependent launch the finish
loads a row's options while the scan still runs, since the scan does not write them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mtp_plugin.ops import row_sums
from mtp_plugin.ops.launching import MOST_LAUNCHES, Launch, expect_reachable
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logit_rows.processing_triton import (
    Pools,
    is_processed,
    load_block_processing,
    load_processing,
    load_shared_processing,
    neutral_shared_processing,
    process_block,
    process_values,
)
from mtp_plugin.ops.logit_rows.rows_triton import (
    GREEDY_BELOW,
    LOG2_E,
    NO_COLUMN,
    load_block,
    locate_row,
    max_no_nan,
    nan_to_neg_inf,
    neg_inf_to_zero,
    sum_chunks,
    sum_row,
    thread_maxima,
)
from mtp_plugin.ops.programmatic_launch import (
    grid_dependency_synchronize,
    grid_dependency_synchronize_ahead,
    pdl_options,
)
from mtp_plugin.ops.row_sums import ChunkLayout, RowSums
from mtp_plugin.ops.sampling.row_triton import (
    OF_ALL,
    TRUNCATION_SIZE,
    LogitRow,
    RowSample,
    best_noisy_column,
    first_infinite,
    gumbel_bound,
    load_draft_sampling,
    load_ids,
    load_options,
    load_stream,
    log2_scale,
    no_cutoff,
    philox_of_block,
)
from mtp_plugin.ops.sampling.truncation_passes_triton import LIST_SIZE
from mtp_plugin.ops.sampling.truncation_triton import sample_truncated
from mtp_plugin.ops.sampling.types import DRAFT_COLUMNS, STEP_COLUMN, Role
from mtp_plugin.ops.step import SlotRows

SCAN_BLOCKS = ((512, 4), (192, 2), (0, 1))
SCAN_BLOCKS_OF_FEW = ((24, 2), (0, 1))
SCAN_BLOCKS_PROCESSED = ((192, 4), (24, 2), (0, 1))
"""(rows, blocks): with at least so many rows, a program of the scan reads so many blocks."""
MAX_GRID_Y = 65535
"""Largest size of a grid's second axis."""
WIDE_PROGRAM_ROWS = 264
"""With at most so many rows, a row is finished by more warps."""
REGISTERS, ALL_REGISTERS, SINGLE_ROWS = 128, 255, 132
"""Registers per thread that finishes a row: ALL_REGISTERS with logits processing, while each of at
most SINGLE_ROWS rows has its own multiprocessor."""
EXPONENT_ROUNDING = tl.constexpr(2.0**-22)
"""More than the relative rounding error of a bound; `BOUND_SLACK` covers small exponents."""
MAX_NOISE = tl.constexpr(160.0)
"""Greater than every bound of noise, in log2."""

UNSPECIALIZED = ["num_contexts", "width", "column", "role", "num_blocks"]
UNSPECIALIZED += ["verification_column", "draft_sampling_column", "step_column"]
UNSPECIALIZED += ["position_stride", "ahead_stride", "draft_stride", "table_stride", "slot_stride"]
UNSPECIALIZED += ["num_slots"]
UNALIGNED = ["position_ptr", "ahead_ptr", "draft_ptr", "table_ptr", "slot_ptr"]
"""Arguments that differ between batches: no binary is specialized on them."""


class ScanOutputs(NamedTuple):
    """Outputs of the scan of a row; pointers are those of the row."""

    chunk_max_ptr: tl.tensor  # [num_chunks] float32, as are all
    chunk_result_ptr: tl.tensor
    chunk_sum_ptr: tl.tensor
    raw_sum_ptr: tl.tensor


@triton.jit
def _relative_bounds(bounds, exponents):
    """Bounds of chunks relative to the exponents of their maxima, rounded up.

    If an exponent is infinite, the noise itself is the bound. With exponents beyond 1e7, which no
    model has, bounds are so loose that most chunks are read again.
    """
    above = bounds - exponents + tl.abs(exponents) * EXPONENT_ROUNDING
    return tl.where(tl.abs(exponents) < float("inf"), above, MAX_NOISE)


@triton.jit
def _scan_blocks(
    x,
    logit_row,
    options,
    temperature,
    stream,
    outputs,
    first_block,
    last_block,
    LAYOUT: tl.constexpr,
    NOISE_FIRST: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    HAS_TRUNCATION: tl.constexpr,
    HAS_SUMS: tl.constexpr,
):
    """Scan blocks of a row; ``x`` are the values of the first block."""
    BLOCK: tl.constexpr = LAYOUT.block
    scale = log2_scale(temperature)
    is_truncated = (options.top_k > 0) | (options.top_p < 1) | (options.min_p > 0)
    is_noisy = (temperature >= GREEDY_BELOW) & ~is_truncated
    shared = neutral_shared_processing()
    for block in range(first_block, last_block):
        if HAS_PROCESSING and not HAS_IDS:
            processing = load_block_processing(
                block * BLOCK, logit_row.vocab, logit_row.processing, BLOCK
            )
        if block > first_block:
            x = load_block(logit_row.ptr, block, logit_row.vocab, BLOCK)
        elif HAS_PROCESSING and not HAS_IDS:
            # after the loads that the first block waits for
            shared = load_shared_processing(
                logit_row.processing, first_block * BLOCK, last_block * BLOCK
            )
        if HAS_PROCESSING:
            if HAS_IDS:
                columns = block * BLOCK + tl.arange(0, BLOCK)
                inside = columns < logit_row.vocab
                ids = load_ids(logit_row, columns, inside, HAS_IDS)
                x = process_values(nan_to_neg_inf(x), ids, inside, logit_row.processing)
            else:
                x = process_block(
                    x,
                    processing,
                    block * BLOCK,
                    logit_row.vocab,
                    logit_row.ptr,
                    logit_row.processing,
                    shared,
                )
        if NOISE_FIRST:
            noise = tl.zeros([BLOCK], tl.float32)
            if is_noisy:
                noise = gumbel_bound(philox_of_block(logit_row, block, stream, BLOCK, HAS_IDS))
        by_thread = tl.reshape(x, [LAYOUT.wraps, LAYOUT.threads, LAYOUT.each])
        thread_max = thread_maxima(by_thread)
        by_chunk = tl.reshape(thread_max, [LAYOUT.chunks, LAYOUT.chunk_threads])
        chunk_max = tl.max(by_chunk, axis=1)
        chunk_base = neg_inf_to_zero(chunk_max)
        thread_exponents = (by_chunk - chunk_base[:, None]) * scale

        offsets = block * LAYOUT.chunks + tl.arange(0, LAYOUT.chunks)
        if temperature < GREEDY_BELOW:
            argmax = tl.reshape(block * BLOCK + tl.arange(0, BLOCK), by_thread.shape)
            argmax = tl.where(by_thread == thread_max[None, :, None], argmax, NO_COLUMN)
            argmax = tl.reshape(tl.min(tl.min(argmax, axis=0), axis=1), by_chunk.shape)
            argmax = tl.min(tl.where(by_chunk == chunk_max[:, None], argmax, NO_COLUMN), axis=1)
            tl.store(outputs.chunk_result_ptr + offsets, argmax.to(tl.float32, bitcast=True))
        elif is_noisy:
            if not NOISE_FIRST:
                noise = gumbel_bound(philox_of_block(logit_row, block, stream, BLOCK, HAS_IDS))
            bound = tl.reshape(noise, by_thread.shape) + by_thread * scale
            bound = tl.reshape(tl.max(tl.max(bound, axis=0), axis=1), by_chunk.shape)
            bound = nan_to_neg_inf(tl.max(bound, axis=1))
            tl.store(
                outputs.chunk_result_ptr + offsets, _relative_bounds(bound, chunk_base * scale)
            )
            if HAS_TRUNCATION:
                tl.store(
                    outputs.chunk_sum_ptr + offsets,
                    sum_chunks(by_thread, thread_max, thread_exponents, scale),
                )
        elif (options.top_p < 1) & ((options.top_k == 0) | (options.top_p_mass == OF_ALL)):
            tl.store(
                outputs.chunk_result_ptr + offsets,
                sum_chunks(by_thread, thread_max, thread_exponents, scale),
            )
        if HAS_SUMS:  # noqa: SIM102 - known when it is compiled
            if options.num_logprobs >= 0:
                thread_exponents = (by_chunk - chunk_base[:, None]) * LOG2_E
                tl.store(
                    outputs.raw_sum_ptr + offsets,
                    sum_chunks(by_thread, thread_max, thread_exponents, LOG2_E),
                )
        tl.store(outputs.chunk_max_ptr + offsets, chunk_max)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def sample_scan_kernel(
    # inputs
    logits_ptr,  # [N, V] floating
    vocab_ids_ptr,  # HAS_IDS: [V] int32: token id of each column
    position_ptr,  # [R] integer: position of each request's first row
    ahead_ptr,  # HAS_AHEAD: [R] integer: added to the position
    draft_ptr,  # HAS_DRAFTS: [R - C, >= column + width - 1] integer
    table_ptr,  # [S, W] int32
    slot_ptr,  # [>= R] integer: each request's row of the table
    bias_ptr,  # HAS_PROCESSING: [P, pool_vocab] float32
    allowed_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab) + 1] int32: a bit per id, then a count
    count_ptr,  # HAS_PROCESSING: [P, pool_vocab] int16, unsigned: token counts
    seen_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab)] int32: a bit per id
    # outputs
    chunk_max_ptr,  # [N, num_chunks] float32: maximum of each chunk
    chunk_result_ptr,  # [N, num_chunks] float32: argmax, bound or sum of each chunk, by the options
    chunk_sum_ptr,  # HAS_TRUNCATION: [N, num_chunks] float32: sums of rows without truncation
    raw_sum_ptr,  # HAS_SUMS: [N, num_chunks] float32: sums at temperature 1
    # sizes
    num_contexts,  # C
    width,  # rows per generation
    column,  # draft tokens before a request's first row
    role,  # `Role` of the noise
    verification_column,  # offset in a row of the table
    draft_sampling_column,  # offset in a row of the table
    step_column,  # offset in a row of the table; below 0: none
    vocab,  # V
    num_blocks,  # of a row
    pool_vocab,  # vocabulary of the pools
    row_stride,
    position_stride,
    ahead_stride,
    draft_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    # constants
    LAYOUT: tl.constexpr,  # `ChunkLayout`
    BLOCKS_PER_PROGRAM: tl.constexpr,
    NOISE_FIRST: tl.constexpr,  # compute noise while the values are loaded
    HAS_IDS: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    AS_DRAFTS: tl.constexpr,
    HAS_TRUNCATION: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    ROW_AXIS: tl.constexpr,  # axis of the grid that has the rows
    PDL: tl.constexpr,
):
    """Phase 1: reduce the chunks of ``BLOCKS_PER_PROGRAM`` blocks of a row.

    ``chunk_result_ptr`` gets, of greedy rows, the lowest column of the chunk's maximum, as the bits
    of a float; of rows without truncation a bound of the highest noisy score, in log2 and relative
    to the maximum's; of rows with top-p of the mass of all tokens the sum of weights, relative to
    the maximum's.
    """
    grid_dependency_synchronize_ahead(PDL)
    first_block = tl.program_id(1 - ROW_AXIS) * BLOCKS_PER_PROGRAM
    last_block = tl.minimum(first_block + BLOCKS_PER_PROGRAM, num_blocks)
    row = tl.program_id(ROW_AXIS).to(tl.int64)
    # loaded before the values, so that it does not wait for them
    request, offset, slot_row_ptr = locate_row(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride, num_slots
    )
    x = load_block(logits_ptr + row * row_stride, first_block, vocab, LAYOUT.block)
    offset += column
    options = load_options(slot_row_ptr, vocab)
    temperature = options.temperature
    step = tl.full([], 0, tl.int32)
    if AS_DRAFTS:
        temperature, role, step = load_draft_sampling(
            slot_row_ptr, temperature, role, verification_column, draft_sampling_column, step_column
        )
    stream = load_stream(
        slot_row_ptr,
        request,
        offset,
        role,
        step,
        position_ptr,
        position_stride,
        ahead_ptr,
        ahead_stride,
        HAS_AHEAD,
    )
    pools = Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab)
    draft_ptr += tl.maximum(request - num_contexts, 0) * draft_stride
    num_before = tl.where(request < num_contexts, 0, offset) if HAS_DRAFTS else 0
    processing = load_processing(slot_row_ptr, pools, draft_ptr, num_before)
    logit_row = LogitRow(logits_ptr + row * row_stride, vocab, vocab_ids_ptr, processing)
    first_chunk = row * (num_blocks * LAYOUT.chunks)
    outputs = ScanOutputs(
        chunk_max_ptr + first_chunk,
        chunk_result_ptr + first_chunk,
        chunk_sum_ptr + first_chunk,
        raw_sum_ptr + first_chunk,
    )
    # two calls, so that rows without processing need no registers for it
    if HAS_PROCESSING and is_processed(slot_row_ptr):
        _scan_blocks(
            x,
            logit_row,
            options,
            temperature,
            stream,
            outputs,
            first_block,
            last_block,
            LAYOUT,
            False,  # processing a block takes all registers
            HAS_IDS,
            True,
            HAS_TRUNCATION,
            HAS_SUMS,
        )
    else:
        _scan_blocks(
            x,
            logit_row,
            options,
            temperature,
            stream,
            outputs,
            first_block,
            last_block,
            LAYOUT,
            NOISE_FIRST,
            HAS_IDS,
            False,
            HAS_TRUNCATION,
            HAS_SUMS,
        )


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def sample_finish_kernel(
    # inputs
    logits_ptr,  # [N, V] floating
    vocab_ids_ptr,  # HAS_IDS: [V] int32: token id of each column
    position_ptr,  # [R] integer: position of each request's first row
    ahead_ptr,  # HAS_AHEAD: [R] integer: added to the position
    draft_ptr,  # HAS_DRAFTS: [R - C, >= column + width - 1] integer
    table_ptr,  # [S, W] int32
    slot_ptr,  # [>= R] integer: each request's row of the table
    bias_ptr,  # HAS_PROCESSING: [P, pool_vocab] float32
    allowed_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab) + 1] int32: a bit per id, then a count
    count_ptr,  # HAS_PROCESSING: [P, pool_vocab] int16, unsigned: token counts
    seen_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab)] int32: a bit per id
    chunk_max_ptr,  # [N, num_chunks] float32: maximum of each chunk
    chunk_result_ptr,  # [N, num_chunks] float32: argmax, bound or sum of each chunk, by the options
    chunk_sum_ptr,  # HAS_TRUNCATION: [N, num_chunks] float32: sums of rows without truncation
    raw_sum_ptr,  # HAS_SUMS: [N, num_chunks] float32: sums at temperature 1
    # outputs
    token_ptr,  # [N] integer: sampled tokens, MISSING: no finite logit
    truncation_ptr,  # HAS_TRUNCATION: [N, TRUNCATION_SIZE] float32
    row_sum_ptr,  # HAS_SUMS: [N] float32: sum of exp(x - maximum)
    # scratch
    selected_ptr,  # [N, num_chunks] int32: chunks that may hold kept tokens
    pair_ptr,  # [N, LIST_SIZE] int64: lists of candidates, value and column
    bound_ptr,  # not HAS_TRUNCATION: [N, chunks of BOUNDS] float32: bounds of noisy scores
    # sizes
    num_contexts,  # C
    width,  # rows per generation
    column,  # draft tokens before a request's first row
    role,  # `Role` of the noise
    verification_column,  # offset in a row of the table
    draft_sampling_column,  # offset in a row of the table
    step_column,  # offset in a row of the table; below 0: none
    vocab,  # V
    num_blocks,  # of a row
    pool_vocab,  # vocabulary of the pools
    row_stride,
    position_stride,
    ahead_stride,
    draft_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    # constants
    LAYOUT: tl.constexpr,  # `ChunkLayout` of the scan
    PADDED_CHUNKS: tl.constexpr,  # a power of two >= num_chunks
    BOUNDS: tl.constexpr,  # `ChunkLayout` of flat nuclei
    PADDED_BOUNDS: tl.constexpr,  # a power of two >= its number of chunks
    HAS_IDS: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    AS_DRAFTS: tl.constexpr,
    HAS_TRUNCATION: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    WARPS: tl.constexpr,  # of a program
    MISSING: tl.constexpr,  # token of a row without finite value
    PDL: tl.constexpr,
):
    """Phase 2: the token of a row, its truncation, and its sum of weights for log-probabilities."""
    row = tl.program_id(0).to(tl.int64)
    # inputs that the scan does not write, before it ends
    request, offset, slot_row_ptr = locate_row(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride, num_slots, ".cg"
    )
    offset += column
    options = load_options(slot_row_ptr, vocab, ".cg")
    temperature = options.temperature
    step = tl.full([], 0, tl.int32)
    if AS_DRAFTS:
        temperature, role, step = load_draft_sampling(
            slot_row_ptr,
            temperature,
            role,
            verification_column,
            draft_sampling_column,
            step_column,
            ".cg",
        )
    stream = load_stream(
        slot_row_ptr,
        request,
        offset,
        role,
        step,
        position_ptr,
        position_stride,
        ahead_ptr,
        ahead_stride,
        HAS_AHEAD,
        ".cg",
    )
    grid_dependency_synchronize(PDL)
    num_chunks = num_blocks * LAYOUT.chunks
    chunks = tl.arange(0, PADDED_CHUNKS)
    chunk_maxima = tl.load(
        chunk_max_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")
    )
    chunk_results = tl.load(
        chunk_result_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0
    )
    if HAS_SUMS:
        writes_mass = options.num_logprobs >= 0
        raw_sums = tl.load(
            raw_sum_ptr + row * num_chunks + chunks,
            mask=(chunks < num_chunks) & writes_mass,
            other=0.0,
        )
    pools = Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab)
    draft_ptr += tl.maximum(request - num_contexts, 0) * draft_stride
    num_before = tl.where(request < num_contexts, 0, offset) if HAS_DRAFTS else 0
    processing = load_processing(slot_row_ptr, pools, draft_ptr, num_before)
    logit_row = LogitRow(logits_ptr + row * row_stride, vocab, vocab_ids_ptr, processing)
    row_max = max_no_nan(chunk_maxima)
    sample = RowSample(logit_row, options, stream, row_max)
    if HAS_SUMS:  # noqa: SIM102 - known when it is compiled
        if writes_mass:
            tl.store(row_sum_ptr + row, sum_row(raw_sums, chunk_maxima, row_max, LOG2_E))
    sampled = tl.full([], NO_COLUMN, tl.int32)
    limit = tl.full([], 0.0, tl.float32)
    last = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float32)
    if row_max > float("-inf"):
        if temperature < GREEDY_BELOW:
            firsts = chunk_results.to(tl.int32, bitcast=True)
            sampled = tl.min(tl.where(chunk_maxima == row_max, firsts, NO_COLUMN), axis=0)
            last = sampled
            mass += 1.0
        elif row_max == float("inf"):
            sampled = first_infinite(
                logit_row, chunk_maxima, chunks, LAYOUT, HAS_IDS, HAS_PROCESSING
            )
            last = sampled
            mass += 1.0
        elif (options.top_k == 0) & (options.top_p >= 1) & (options.min_p <= 0):
            bounds = chunk_results + (chunk_maxima - row_max) * log2_scale(temperature)
            bounds = tl.where(chunk_maxima > float("-inf"), bounds, float("-inf"))
            sampled = best_noisy_column(
                sample,
                temperature,
                bounds,
                chunks,
                no_cutoff(),
                LAYOUT,
                HAS_IDS,
                HAS_PROCESSING,
                False,
            )
            if HAS_TRUNCATION:
                limit += float("inf")
                last += vocab
                chunk_sums = tl.load(
                    chunk_sum_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0
                )
                mass = sum_row(chunk_sums, chunk_maxima, row_max, log2_scale(temperature))
        else:
            sampled, limit, last, mass = sample_truncated(
                sample,
                chunk_maxima,
                chunk_results,
                chunks,
                num_chunks,
                selected_ptr + row * num_chunks,
                pair_ptr + row * LIST_SIZE,
                bound_ptr + row * (tl.cdiv(vocab, BOUNDS.block) * BOUNDS.chunks),
                LAYOUT,
                PADDED_CHUNKS,
                BOUNDS,
                PADDED_BOUNDS,
                HAS_IDS,
                HAS_PROCESSING,
                HAS_TRUNCATION,
                WARPS,
            )
    token = sampled
    if HAS_IDS:
        token = tl.load(vocab_ids_ptr + sampled, mask=sampled < vocab, other=NO_COLUMN)
    tl.store(token_ptr + row, tl.where(token == NO_COLUMN, MISSING, token))
    if HAS_TRUNCATION:
        tl.store(truncation_ptr + row * TRUNCATION_SIZE, row_max)
        tl.store(truncation_ptr + row * TRUNCATION_SIZE + 1, limit)
        tl.store(truncation_ptr + row * TRUNCATION_SIZE + 2, last.to(tl.float32))
        tl.store(truncation_ptr + row * TRUNCATION_SIZE + 3, mass)


def sample_tokens_triton(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    *,
    role: Role,
    as_drafts: bool,
    vocab_ids: torch.Tensor | None,
    truncation: torch.Tensor | None,
    sums: RowSums | None,
    fills: torch.dtype | None,
) -> torch.Tensor:
    """Two launches: a scan of all rows, and one that finishes each row."""
    expect_reachable(sample_scan_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    pools, device = slots.pools, logits.device
    tokens = torch.empty(num_rows, dtype=fills or torch.int32, device=device)
    if num_rows == 0:
        return tokens
    ahead, drafts = rows.ahead, rows.drafts
    plan = _plan(
        num_rows,
        vocab,
        logits.element_size(),
        device,
        # sizes of the kernels
        (
            *(rows.num_contexts, rows.width, rows.column, int(role)),
            *(_offsets(slots) if as_drafts else (0, 0, 0)),
        ),
        (
            0 if pools is None else pools.vocab_size,
            logits.stride(0),
            rows.positions.stride(0),
            0 if ahead is None else ahead.stride(0),
            0 if drafts is None else drafts.stride(0),
            slots.table.stride(0),
            slots.slot_ids.stride(0),
            slots.table.shape[0],
        ),
        -1 if fills is None else 0,
        has_ids=vocab_ids is not None,
        has_ahead=ahead is not None,
        has_drafts=drafts is not None,
        has_processing=pools is not None,
        as_drafts=as_drafts,
        has_truncation=truncation is not None,
        has_sums=sums is not None,
    )
    num_chunks = plan.num_chunks
    float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    chunk_maxima = torch.empty(num_rows, num_chunks, **float32) if sums is None else sums.tops
    chunk_results = torch.empty(num_rows, num_chunks, **float32)
    inputs = (
        logits,
        # absent tensors are never read; whatever the dtype of the tokens, the kernel is one
        slots.table if vocab_ids is None else vocab_ids,
        rows.positions,
        slots.table if ahead is None else ahead,
        slots.table if drafts is None else drafts,
        slots.table,
        slots.slot_ids,
        *(
            (slots.table,) * 4
            if pools is None
            else (pools.bias, pools.allowed, pools.counts, pools.seen)
        ),
        # what the scan writes
        chunk_maxima,
        chunk_results,
        chunk_results if truncation is None else torch.empty(num_rows, num_chunks, **float32),
        chunk_results if sums is None else torch.empty(num_rows, num_chunks, **float32),
    )
    plan.scan(*inputs)
    plan.finish(
        *inputs,
        # outputs
        tokens,
        chunk_results if truncation is None else truncation,
        chunk_results if sums is None else sums.masses,
        # scratch
        torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device),
        torch.empty(num_rows, LIST_SIZE.value, dtype=torch.int64, device=device),
        torch.empty(num_rows, plan.num_bounds, **float32) if truncation is None else chunk_results,
    )
    return tokens


class _Plan(NamedTuple):
    """The launches that sample rows, and what they allocate for each row."""

    scan: Launch
    finish: Launch
    num_chunks: int
    num_bounds: int


@lru_cache(maxsize=MOST_LAUNCHES)
def _plan(
    num_rows: int,
    vocab: int,
    element_size: int,
    device: torch.device,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    missing: int,
    **has: bool,
) -> _Plan:
    """Return the launches of all steps with the same shapes.

    Args:
        sizes, strides: of the kernels, before and after ``vocab`` and ``num_blocks``; of these the
            size of the pools.
        missing: the token of a row without finite value.
        has: constants of the kernels, in lower case.
    """
    is_few, has_processing = num_rows <= row_sums.FEW_ROWS, has["has_processing"]
    layout = ChunkLayout.of_rows(num_rows, element_size)
    parts = SCAN_BLOCKS_OF_FEW if is_few else SCAN_BLOCKS
    if has_processing:
        layout, parts = ChunkLayout.small(layout.each), SCAN_BLOCKS_PROCESSED
    is_wide = not is_few and not has_processing
    blocks = next(blocks for least, blocks in parts if num_rows >= least)
    num_blocks, num_chunks = layout.num_blocks(vocab), layout.num_chunks(vocab)
    sizes = (*sizes, vocab, num_blocks, *strides)
    constants: dict[str, Any] = {name.upper(): value for name, value in has.items()}
    constants |= {"LAYOUT": layout, **pdl_options(device)}
    grid = [num_rows, -(-num_blocks // blocks)]
    row_axis = int(num_rows <= MAX_GRID_Y)
    of_scan = {
        **constants,
        "BLOCKS_PER_PROGRAM": blocks,
        "NOISE_FIRST": is_wide,  # noise is computed while the values are loaded
        "ROW_AXIS": row_axis,
        "num_warps": layout.warps,
        "maxnreg": None if has["has_ids"] else 80 if is_wide else 64,
    }
    warps = 8 if num_rows <= WIDE_PROGRAM_ROWS else 4
    bounds = ChunkLayout.wide(layout.each, warps)
    num_bounds = bounds.num_chunks(vocab)
    has_room = has_processing and num_rows <= SINGLE_ROWS
    of_finish = {
        **constants,
        "PADDED_CHUNKS": triton.next_power_of_2(num_chunks),
        "BOUNDS": bounds,
        "PADDED_BOUNDS": triton.next_power_of_2(num_bounds),
        "WARPS": warps,
        "MISSING": missing,
        "num_warps": warps,
        "maxnreg": ALL_REGISTERS if has_room else REGISTERS,
    }
    return _Plan(
        Launch(sample_scan_kernel, tuple(grid[::-1] if row_axis else grid), sizes, of_scan),
        Launch(sample_finish_kernel, (num_rows,), sizes, of_finish),
        num_chunks,
        num_bounds,
    )


def _offsets(slots: SlotRows) -> tuple[int, ...]:
    """Offsets of the columns `DRAFT_COLUMNS` and `STEP_COLUMN`; -1 without steps."""
    columns = slots.columns
    step_column = columns.offset(STEP_COLUMN.name) if STEP_COLUMN.name in columns else -1
    return *(columns.offset(column.name) for column in DRAFT_COLUMNS), step_column
