"""Triton implementation of `sample`: a scan of the rows in chunks, and a finish per row.

A program of the scan reads blocks of a row. A chunk of a block is what a few neighbouring threads
hold (see `row_sums`), so that threads exchange no values before chunks are reduced.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from typing_extensions import Self

from mtp_plugin.ops import row_sums
from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logit_rows.processing_triton import (
    Pools,
    is_processed,
    load_block_processing,
    load_processing,
    load_shared_processing,
    process_block,
    process_values,
    unknown_shared_processing,
)
from mtp_plugin.ops.logit_rows.rows_triton import (
    GREEDY_BELOW,
    LOG2_E,
    NO_COLUMN,
    highest_of,
    load_block,
    locate_row,
    masses_of,
    number_of,
    number_or_zero,
    row_mass_of,
    thread_tops,
)
from mtp_plugin.ops.programmatic_launch import (
    grid_dependency_synchronize,
    grid_dependency_synchronize_ahead,
    pdl_options,
)
from mtp_plugin.ops.row_sums import ChunkLayout, RowSums
from mtp_plugin.ops.sampling.row_triton import (
    Row,
    RowSample,
    best_noisy_column,
    draft_sampling_of,
    first_infinite,
    gumbel_bound,
    ids_of,
    no_cutoff,
    options_of,
    random_words,
    scale_of,
    stream_of,
)
from mtp_plugin.ops.sampling.truncation_passes_triton import PARTIALS, PLACES, Split
from mtp_plugin.ops.sampling.truncation_triton import sample_truncated
from mtp_plugin.ops.sampling.types import DRAFT_COLUMNS, STEP_COLUMN, Role
from mtp_plugin.ops.step import SlotRows

PARTS = ((512, 4), (192, 2), (0, 1))
PARTS_OF_FEW = ((24, 2), (0, 1))
PARTS_OF_EDITED = ((192, 4), (24, 2), (0, 1))
"""(rows, blocks): with at least so many rows, a program of the scan reads so many blocks."""
MAX_GRID_Y = 65535
"""Largest size of a grid's second axis."""
WIDE_PROGRAM_ROWS = 264
"""With at most so many rows, a row is finished by more warps."""
SHARES, PROGRAMS = 8, 264
"""SHARES programs share a row with a flat nucleus if at most PROGRAMS run, all at once."""
SHARED_CHUNKS = 32
"""Least number of chunks of a row per share."""
REGISTERS, ALL_REGISTERS, SINGLE_ROWS = 128, 255, 132
"""Registers per thread that finishes a row: ALL_REGISTERS with logits processing, while each of at
most SINGLE_ROWS rows has its own multiprocessor."""
EXPONENT_ROUNDING = tl.constexpr(2.0**-22)
"""More than the relative rounding error of a bound; `BOUND_SLACK` covers small exponents."""
MOST_NOISE = tl.constexpr(160.0)
"""Greater than every bound of noise, in log2."""

UNSPECIALIZED = ["num_contexts", "width", "column", "role", "num_blocks"]
UNSPECIALIZED += ["verification_at", "draft_sampling_at", "step_at"]
UNSPECIALIZED += ["position_stride", "ahead_stride", "draft_stride", "table_stride", "slot_stride"]
UNALIGNED = ["position_ptr", "ahead_ptr", "draft_ptr", "table_ptr", "slot_ptr"]
"""Arguments that differ between batches: no binary is specialized on them."""


class ScanOutputs(NamedTuple):
    """Outputs of the scan of a row; pointers are those of the row."""

    top_ptr: tl.tensor
    detail_ptr: tl.tensor
    mass_ptr: tl.tensor
    raw_mass_ptr: tl.tensor


@triton.jit
def _above(bounds, exponents):
    """Bounds of chunks relative to the exponents of their maxima, rounded up.

    If an exponent is infinite, the noise itself is the bound. With exponents beyond 1e7, which no
    model has, bounds are so loose that most chunks are read again.
    """
    above = bounds - exponents + tl.abs(exponents) * EXPONENT_ROUNDING
    return tl.where(tl.abs(exponents) < float("inf"), above, MOST_NOISE)


@triton.jit
def _scan_blocks(
    x,
    row,
    options,
    temperature,
    stream,
    found,
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
    scale = scale_of(temperature)
    is_truncated = (options.top_k > 0) | (options.top_p < 1) | (options.min_p > 0)
    is_noisy = (temperature >= GREEDY_BELOW) & ~is_truncated
    shared = unknown_shared_processing()
    for block in range(first_block, last_block):
        if HAS_PROCESSING and not HAS_IDS:
            processing = load_block_processing(block * BLOCK, row.vocab, row.processing, BLOCK)
        if block > first_block:
            x = load_block(row.ptr, block, row.vocab, BLOCK)
        elif HAS_PROCESSING and not HAS_IDS:
            # after the loads that the first block waits for
            shared = load_shared_processing(row.processing, first_block * BLOCK, last_block * BLOCK)
        if HAS_PROCESSING:
            if HAS_IDS:
                columns = block * BLOCK + tl.arange(0, BLOCK)
                inside = columns < row.vocab
                ids = ids_of(row, columns, inside, HAS_IDS)
                x = process_values(number_of(x), ids, inside, row.processing)
            else:
                x = process_block(
                    x, processing, block * BLOCK, row.vocab, row.ptr, row.processing, shared
                )
        if NOISE_FIRST:
            noise = tl.zeros([BLOCK], tl.float32)
            if is_noisy:
                noise = gumbel_bound(random_words(row, block, stream, BLOCK, HAS_IDS))
        held = tl.reshape(x, [LAYOUT.wraps, LAYOUT.threads, LAYOUT.each])
        thread_top = thread_tops(held)
        by_chunk = tl.reshape(thread_top, [LAYOUT.chunks, LAYOUT.chunk_threads])
        top = tl.max(by_chunk, axis=1)
        base = number_or_zero(top)
        below = (by_chunk - base[:, None]) * scale

        out = block * LAYOUT.chunks + tl.arange(0, LAYOUT.chunks)
        if temperature < GREEDY_BELOW:
            at = tl.reshape(block * BLOCK + tl.arange(0, BLOCK), held.shape)
            at = tl.where(held == thread_top[None, :, None], at, NO_COLUMN)
            at = tl.reshape(tl.min(tl.min(at, axis=0), axis=1), by_chunk.shape)
            at = tl.min(tl.where(by_chunk == top[:, None], at, NO_COLUMN), axis=1)
            tl.store(found.detail_ptr + out, at.to(tl.float32, bitcast=True))
        elif is_noisy:
            if not NOISE_FIRST:
                noise = gumbel_bound(random_words(row, block, stream, BLOCK, HAS_IDS))
            bound = tl.reshape(noise, held.shape) + held * scale
            bound = tl.reshape(tl.max(tl.max(bound, axis=0), axis=1), by_chunk.shape)
            bound = number_of(tl.max(bound, axis=1))
            tl.store(found.detail_ptr + out, _above(bound, base * scale))
            if HAS_TRUNCATION:
                tl.store(found.mass_ptr + out, masses_of(held, thread_top, below, scale))
        elif (options.top_k == 0) & (options.top_p < 1):
            tl.store(found.detail_ptr + out, masses_of(held, thread_top, below, scale))
        if HAS_SUMS:  # noqa: SIM102 - known when it is compiled
            if options.num_logprobs >= 0:
                below = (by_chunk - base[:, None]) * LOG2_E
                tl.store(found.raw_mass_ptr + out, masses_of(held, thread_top, below, LOG2_E))
        tl.store(found.top_ptr + out, top)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def sample_scan_kernel(
    # inputs
    logits_ptr,
    vocab_ids_ptr,
    position_ptr,
    ahead_ptr,
    draft_ptr,
    table_ptr,
    slot_ptr,
    bias_ptr,
    allowed_ptr,
    count_ptr,
    seen_ptr,
    # outputs
    top_ptr,
    detail_ptr,
    mass_ptr,
    raw_mass_ptr,
    arrived_ptr,
    # sizes
    num_contexts,
    width,
    column,
    role,
    verification_at,
    draft_sampling_at,
    step_at,
    vocab,
    num_blocks,
    pool_vocab,
    row_stride,
    position_stride,
    ahead_stride,
    draft_stride,
    table_stride,
    slot_stride,
    # constants
    LAYOUT: tl.constexpr,
    PARTS: tl.constexpr,
    NOISE_FIRST: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    AS_DRAFTS: tl.constexpr,
    HAS_TRUNCATION: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    ROW_AXIS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scan ``PARTS`` blocks of a row: the maximum of each chunk, and what its options need.

    Greedy rows get the lowest column of the maximum, as the bits of a float. Rows without
    truncation get a bound of the highest noisy score, in log2 and relative to the maximum's. Rows
    with top-p alone get the sum of weights relative to the maximum's; so do rows without truncation
    if the truncation is an output. Rows whose request returns log-probabilities get the sum of
    weights at temperature 1. Arrival counters of rows that several programs finish are reset.
    """
    grid_dependency_synchronize_ahead(PDL)
    first_block = tl.program_id(1 - ROW_AXIS) * PARTS
    last_block = tl.minimum(first_block + PARTS, num_blocks)
    number = tl.program_id(ROW_AXIS).to(tl.int64)
    if IS_SPLIT:
        tl.store(arrived_ptr + number, 0, mask=first_block == 0)
    # loaded before the values, so that it does not wait for them
    request, offset, slot = locate_row(
        number, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride
    )
    x = load_block(logits_ptr + number * row_stride, first_block, vocab, LAYOUT.block)
    offset += column
    options = options_of(slot, vocab)
    temperature = options.temperature
    step = tl.full([], 0, tl.int32)
    if AS_DRAFTS:
        temperature, role, step = draft_sampling_of(
            slot, temperature, role, verification_at, draft_sampling_at, step_at
        )
    stream = stream_of(
        slot,
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
    processing = load_processing(slot, pools, draft_ptr, num_before)
    row = Row(logits_ptr + number * row_stride, vocab, vocab_ids_ptr, processing)
    chunk = number * (num_blocks * LAYOUT.chunks)
    found = ScanOutputs(top_ptr + chunk, detail_ptr + chunk, mass_ptr + chunk, raw_mass_ptr + chunk)
    # two calls, so that rows without processing need no registers for it
    if HAS_PROCESSING and is_processed(slot):
        _scan_blocks(
            x,
            row,
            options,
            temperature,
            stream,
            found,
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
            row,
            options,
            temperature,
            stream,
            found,
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
    logits_ptr,
    vocab_ids_ptr,
    position_ptr,
    ahead_ptr,
    draft_ptr,
    table_ptr,
    slot_ptr,
    bias_ptr,
    allowed_ptr,
    count_ptr,
    seen_ptr,
    top_ptr,
    detail_ptr,
    mass_ptr,
    raw_mass_ptr,
    # outputs
    token_ptr,
    truncation_ptr,
    row_mass_ptr,
    # written and read here
    picked_ptr,
    pair_ptr,
    arrived_ptr,
    partial_ptr,
    bound_ptr,
    # sizes
    num_contexts,
    width,
    column,
    role,
    verification_at,
    draft_sampling_at,
    step_at,
    vocab,
    num_blocks,
    pool_vocab,
    row_stride,
    position_stride,
    ahead_stride,
    draft_stride,
    table_stride,
    slot_stride,
    # constants
    LAYOUT: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    BOUNDS: tl.constexpr,
    ALL_BOUNDS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_AHEAD: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    AS_DRAFTS: tl.constexpr,
    HAS_TRUNCATION: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    WARPS: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finish one row: its token, its truncation, and its sum of weights for log-probabilities.

    ``SHARES`` programs share a row with a flat nucleus.
    """
    SEGMENTS: tl.constexpr = SHARES + 1 if SHARES > 1 else 1
    LISTS: tl.constexpr = 2 if SHARES > 1 else 1
    row = tl.program_id(0).to(tl.int64)
    share = tl.program_id(1)
    # inputs that the scan does not write, before it ends
    request, offset, slot = locate_row(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride, ".cg"
    )
    offset += column
    options = options_of(slot, vocab, ".cg")
    temperature = options.temperature
    step = tl.full([], 0, tl.int32)
    if AS_DRAFTS:
        temperature, role, step = draft_sampling_of(
            slot, temperature, role, verification_at, draft_sampling_at, step_at, ".cg"
        )
    stream = stream_of(
        slot,
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
    if SHARES > 1:
        is_nucleus = (options.top_k == 0) & (options.top_p < 1) & (temperature >= GREEDY_BELOW)
        if (share > 0) & ~is_nucleus:
            return  # nothing to share: leave the multiprocessor to the scan
    grid_dependency_synchronize(PDL)
    num_chunks = num_blocks * LAYOUT.chunks
    chunks = tl.arange(0, ALL_CHUNKS)
    tops = tl.load(
        top_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")
    )
    details = tl.load(detail_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    if HAS_SUMS:
        writes_mass = (share == 0) & (options.num_logprobs >= 0)
        raw_masses = tl.load(
            raw_mass_ptr + row * num_chunks + chunks,
            mask=(chunks < num_chunks) & writes_mass,
            other=0.0,
        )
    pools = Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab)
    draft_ptr += tl.maximum(request - num_contexts, 0) * draft_stride
    num_before = tl.where(request < num_contexts, 0, offset) if HAS_DRAFTS else 0
    processing = load_processing(slot, pools, draft_ptr, num_before)
    of_row = Row(logits_ptr + row * row_stride, vocab, vocab_ids_ptr, processing)
    top = highest_of(tops)
    sample = RowSample(of_row, options, stream, top)
    if HAS_SUMS:  # noqa: SIM102 - known when it is compiled
        if writes_mass:
            tl.store(row_mass_ptr + row, row_mass_of(raw_masses, tops, top, LOG2_E))
    sampled = tl.full([], NO_COLUMN, tl.int32)
    limit = tl.full([], 0.0, tl.float32)
    last = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float32)
    is_known = share == 0
    is_active = top > float("-inf")
    if SHARES > 1:
        is_active = is_active & (is_known | (top < float("inf")))
    if is_active:
        if temperature < GREEDY_BELOW:
            firsts = details.to(tl.int32, bitcast=True)
            sampled = tl.min(tl.where(tops == top, firsts, NO_COLUMN), axis=0)
            last = sampled
            mass += 1.0
        elif top == float("inf"):
            sampled = first_infinite(of_row, tops, chunks, LAYOUT, HAS_IDS, HAS_PROCESSING)
            last = sampled
            mass += 1.0
        elif (options.top_k == 0) & (options.top_p >= 1) & (options.min_p <= 0):
            bounds = details + (tops - top) * scale_of(temperature)
            bounds = tl.where(tops > float("-inf"), bounds, float("-inf"))
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
                masses = tl.load(
                    mass_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0
                )
                mass = row_mass_of(masses, tops, top, scale_of(temperature))
        else:
            sampled, limit, last, mass, is_known = sample_truncated(
                sample,
                tops,
                details,
                chunks,
                num_chunks,
                picked_ptr + (row * SHARES + share) * (num_chunks * LISTS),
                pair_ptr + (row * SEGMENTS + share) * PLACES,
                Split(
                    share, arrived_ptr + row, partial_ptr + row * (PARTIALS * SHARES), num_chunks
                ),
                bound_ptr + row * (tl.cdiv(vocab, BOUNDS.block) * BOUNDS.chunks),
                LAYOUT,
                ALL_CHUNKS,
                BOUNDS,
                ALL_BOUNDS,
                HAS_IDS,
                HAS_PROCESSING,
                HAS_TRUNCATION,
                WARPS,
                SHARES,
            )
    token = sampled
    if HAS_IDS:
        token = tl.load(vocab_ids_ptr + sampled, mask=sampled < vocab, other=NO_COLUMN)
    if SHARES == 1 or is_known:
        tl.store(token_ptr + row, tl.where(token == NO_COLUMN, -1, token))
        if HAS_TRUNCATION:
            tl.store(truncation_ptr + row * 4, top)
            tl.store(truncation_ptr + row * 4 + 1, limit)
            tl.store(truncation_ptr + row * 4 + 2, last.to(tl.float32))
            tl.store(truncation_ptr + row * 4 + 3, mass)


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
) -> torch.Tensor:
    """Two launches: a scan of all rows, and one that finishes each row."""
    expect_reachable(sample_scan_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    pools = slots.pools
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int32, device=device)
    if num_rows == 0:
        return tokens
    scan = _Scan.of(logits, is_processed=pools is not None)
    layout = scan.layout
    num_blocks, num_chunks = layout.num_blocks(vocab), layout.num_chunks(vocab)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    tops = torch.empty(num_rows, num_chunks, **float32) if sums is None else sums.tops
    details = torch.empty(num_rows, num_chunks, **float32)
    masses = details if truncation is None else torch.empty(num_rows, num_chunks, **float32)
    raw_masses = details if sums is None else torch.empty(num_rows, num_chunks, **float32)
    inputs = _Inputs(
        logits, rows, slots, tokens if vocab_ids is None else vocab_ids, tokens, num_blocks
    )
    sizes: tuple[int, ...] = (rows.num_contexts, rows.width, rows.column, int(role))
    sizes += _offsets(slots) if as_drafts else (0, 0, 0)
    constants: dict[str, Any] = {
        "LAYOUT": layout,
        "HAS_IDS": vocab_ids is not None,
        "HAS_AHEAD": rows.ahead is not None,
        "HAS_DRAFTS": rows.drafts is not None,
        "HAS_PROCESSING": pools is not None,
        "AS_DRAFTS": as_drafts,
        "HAS_TRUNCATION": truncation is not None,
        "HAS_SUMS": sums is not None,
        **pdl_options(device),
    }
    warps = 8 if num_rows <= WIDE_PROGRAM_ROWS else 4
    shares = _shares(num_rows, num_chunks)
    is_split = shares > 1
    arrived = torch.empty_like(tokens) if is_split else tokens
    grid = [num_rows, -(-num_blocks // scan.parts)]
    row_axis = int(num_rows <= MAX_GRID_Y)
    sample_scan_kernel[tuple(grid[::-1] if row_axis else grid)](
        *inputs.tensors,
        tops,
        details,
        masses,
        raw_masses,
        arrived,
        *sizes,
        *inputs.sizes,
        **constants,
        PARTS=scan.parts,
        NOISE_FIRST=scan.noise_first,
        ROW_AXIS=row_axis,
        IS_SPLIT=is_split,
        num_warps=layout.warps,
        maxnreg=None if vocab_ids is not None else scan.registers,
    )
    has_room = pools is not None and num_rows <= SINGLE_ROWS
    lists, segments = (2, shares + 1) if is_split else (1, 1)
    bounds = ChunkLayout.wide(layout.each, warps)
    num_bounds = bounds.num_chunks(vocab)
    sample_finish_kernel[(num_rows, shares)](
        *inputs.tensors,
        tops,
        details,
        masses,
        raw_masses,
        # outputs
        tokens,
        details if truncation is None else truncation,
        details if sums is None else sums.masses,
        # scratch
        torch.empty(num_rows, shares, lists, num_chunks, dtype=torch.int32, device=device),
        torch.empty(num_rows, segments, PLACES.value, dtype=torch.int64, device=device),
        arrived,
        torch.empty(num_rows, PARTIALS.value, shares, **float32) if is_split else details,
        torch.empty(num_rows, num_bounds, **float32) if truncation is None else details,
        *sizes,
        *inputs.sizes,
        **constants,
        ALL_CHUNKS=triton.next_power_of_2(num_chunks),
        BOUNDS=bounds,
        ALL_BOUNDS=triton.next_power_of_2(num_bounds),
        WARPS=warps,
        SHARES=shares,
        num_warps=warps,
        maxnreg=ALL_REGISTERS if has_room else REGISTERS,
    )
    return tokens


@dataclass(frozen=True)
class _Scan:
    """Tiling of the scan."""

    layout: ChunkLayout
    parts: int  # blocks per program
    registers: int  # per thread
    noise_first: bool  # compute noise while the values are loaded

    @classmethod
    def of(cls, logits: torch.Tensor, *, is_processed: bool) -> Self:
        num_rows, layout = logits.shape[0], ChunkLayout.of(logits)
        is_few = num_rows <= row_sums.FEW_ROWS
        if is_processed:
            layout = ChunkLayout.small(layout.each)
        sizes = PARTS_OF_EDITED if is_processed else PARTS_OF_FEW if is_few else PARTS
        parts = next(parts for least, parts in sizes if num_rows >= least)
        is_wide = not is_few and not is_processed
        return cls(layout, parts, registers=80 if is_wide else 64, noise_first=is_wide)


def _shares(num_rows: int, num_chunks: int) -> int:
    """Number of programs that share a row."""
    return SHARES if num_rows * SHARES <= PROGRAMS and num_chunks >= SHARES * SHARED_CHUNKS else 1


@dataclass(frozen=True)
class _Inputs:
    """Arguments that both launches read."""

    logits: torch.Tensor
    rows: LogitRows
    slots: SlotRows
    vocab_ids: torch.Tensor
    missing: torch.Tensor  # passed for absent tensors, never read
    num_blocks: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        rows, pools = self.rows, self.slots.pools
        return (
            self.logits,
            self.vocab_ids,
            rows.positions,
            self.missing if rows.ahead is None else rows.ahead,
            self.missing if rows.drafts is None else rows.drafts,
            self.slots.table,
            self.slots.slot_ids,
            *(
                (self.missing,) * 4
                if pools is None
                else (pools.bias, pools.allowed, pools.counts, pools.seen)
            ),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        rows, pools, vocab = self.rows, self.slots.pools, self.logits.shape[1]
        return (
            vocab,
            self.num_blocks,
            0 if pools is None else pools.vocab_size,
            self.logits.stride(0),
            rows.positions.stride(0),
            0 if rows.ahead is None else rows.ahead.stride(0),
            0 if rows.drafts is None else rows.drafts.stride(0),
            self.slots.table.stride(0),
            self.slots.slot_ids.stride(0),
        )


def _offsets(slots: SlotRows) -> tuple[int, ...]:
    """Offsets of the columns `DRAFT_COLUMNS` and `STEP_COLUMN`; -1 without steps."""
    columns = slots.columns
    step_at = columns.offset(STEP_COLUMN.name) if STEP_COLUMN.name in columns else -1
    return *(columns.offset(column.name) for column in DRAFT_COLUMNS), step_at
