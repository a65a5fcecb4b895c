"""Draws on the device: a scan of all rows, and a launch that finishes each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from typing_extensions import Self

from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.speculative import row_sums
from mtp_plugin.speculative.logit_rows import DrawnRows
from mtp_plugin.speculative.ops.sampling.contract import CHOICE_COLUMNS, STEP_COLUMN, Role
from mtp_plugin.speculative.ops.sampling.cuts.candidates_kernel import PLACES
from mtp_plugin.speculative.ops.sampling.cuts.shares_kernel import TOLD
from mtp_plugin.speculative.ops.sampling.kernel import finish_kernel, scan_kernel
from mtp_plugin.speculative.row_sums import ChunkLayout, RowSums
from mtp_plugin.speculative.step import SlotRows

PARTS = ((512, 4), (192, 2), (0, 1))
PARTS_OF_FEW = ((24, 2), (0, 1))
PARTS_OF_EDITED = ((192, 4), (24, 2), (0, 1))
"""Of so many rows or more a program of the scan reads so many pieces: to learn what its row asks
for takes as long as to read one."""
MOST_BEHIND = 65535
"""Programs along the second side of a grid, which follow each other farther apart."""
SOME_ROWS = 264
"""So many rows or fewer leave the device room to finish each with more warps."""
SHARES, PROGRAMS = 8, 264
"""So many programs share what is flat of a row, where that takes no more programs than run at once.
Of one number, as each is a binary of its own."""
SHARED_CHUNKS = 32
"""Of a row, for each of them, at least."""
REGISTERS = 128
"""Of a thread that finishes a row: with more too few rows are finished at a time."""
ALL_REGISTERS, SINGLE_ROWS = 255, 132
"""Of one that may edit, while every row has a multiprocessor of its own."""


def draw(
    logits: torch.Tensor,
    rows: DrawnRows,
    slots: SlotRows,
    *,
    role: Role,
    by_choice: bool,
    vocab_ids: torch.Tensor | None,
    cuts: torch.Tensor | None,
    sums: RowSums | None,
) -> torch.Tensor:
    """As at the door."""
    expect_reachable(scan_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    pools = slots.pools
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int32, device=device)
    if num_rows == 0:
        return tokens
    scan = _Scan.of(logits, is_edited=pools is not None)
    layout = scan.layout
    num_pieces, num_chunks = layout.num_pieces(vocab), layout.num_chunks(vocab)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    tops = torch.empty(num_rows, num_chunks, **float32) if sums is None else sums.tops
    details = torch.empty(num_rows, num_chunks, **float32)
    masses = details if cuts is None else torch.empty(num_rows, num_chunks, **float32)
    raw_masses = details if sums is None else torch.empty(num_rows, num_chunks, **float32)
    inputs = _Inputs(
        logits, rows, slots, tokens if vocab_ids is None else vocab_ids, tokens, num_pieces
    )
    places: tuple[int, ...] = (rows.num_contexts, rows.width, rows.column, int(role))
    places += _places(slots) if by_choice else (0, 0, 0)
    constants: dict[str, Any] = {
        "LAYOUT": layout,
        "HAS_IDS": vocab_ids is not None,
        "HAS_AHEAD": rows.ahead is not None,
        "HAS_DRAFTS": rows.drafts is not None,
        "HAS_EDITS": pools is not None,
        "HAS_CHOICE": by_choice,
        "HAS_CUTS": cuts is not None,
        "HAS_SUMS": sums is not None,
        **pdl_options(device),
    }
    warps = 8 if num_rows <= SOME_ROWS else 4
    shares = _shares(num_rows, num_chunks)
    arrived = torch.empty(num_rows, dtype=torch.int32, device=device) if shares > 1 else tokens
    grid = [num_rows, -(-num_pieces // scan.parts)]
    # neighbours read neighbouring pieces
    row_axis = int(num_rows <= MOST_BEHIND)
    scan_kernel[tuple(grid[::-1] if row_axis else grid)](
        *inputs.tensors,
        tops,
        details,
        masses,
        raw_masses,
        arrived,
        *places,
        *inputs.sizes,
        **constants,
        PARTS=scan.parts,
        NOISE_FIRST=scan.noise_first,
        ROW_AXIS=row_axis,
        IS_SPLIT=shares > 1,
        num_warps=layout.warps,
        maxnreg=None if vocab_ids is not None else scan.registers,
    )
    has_room = pools is not None and num_rows <= SINGLE_ROWS
    lists, segments = (2, shares + 1) if shares > 1 else (1, 1)
    bounds = ChunkLayout.wide(layout.each, warps)
    num_bounds = bounds.num_chunks(vocab)
    finish_kernel[(num_rows, shares)](
        *inputs.tensors,
        tops,
        details,
        masses,
        raw_masses,
        # outputs
        tokens,
        details if cuts is None else cuts,
        details if sums is None else sums.masses,
        # written and read there
        torch.empty(num_rows, shares, lists, num_chunks, dtype=torch.int32, device=device),
        torch.empty(num_rows, segments, PLACES.value, dtype=torch.int64, device=device),
        arrived,
        torch.empty(num_rows, TOLD.value, shares, **float32) if shares > 1 else details,
        torch.empty(num_rows, num_bounds, **float32) if cuts is None else details,
        *places,
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
    """How rows are read."""

    layout: ChunkLayout
    parts: int  # pieces that a program reads
    registers: int  # of a thread; with more too few of them share a multiprocessor
    noise_first: bool
    """A thread makes noise while its values, which are many, are on their way."""

    @classmethod
    def of(cls, logits: torch.Tensor, *, is_edited: bool) -> Self:
        """Of rows of logits, some of which are edited."""
        num_rows, layout = logits.shape[0], ChunkLayout.of(logits)
        is_few = num_rows <= row_sums.FEW_ROWS
        if is_edited:
            layout = ChunkLayout.small(layout.each)
        sizes = PARTS_OF_EDITED if is_edited else PARTS_OF_FEW if is_few else PARTS
        parts = next(parts for least, parts in sizes if num_rows >= least)
        is_wide = not is_few and not is_edited
        return cls(layout, parts, registers=80 if is_wide else 64, noise_first=is_wide)


def _shares(num_rows: int, num_chunks: int) -> int:
    """Programs that share a row of so many chunks."""
    return SHARES if num_rows * SHARES <= PROGRAMS and num_chunks >= SHARES * SHARED_CHUNKS else 1


@dataclass(frozen=True)
class _Inputs:
    """What both launches read, in their order."""

    logits: torch.Tensor
    rows: DrawnRows
    slots: SlotRows
    vocab_ids: torch.Tensor
    missing: torch.Tensor
    """Stands for what is not there, which is never read."""
    num_pieces: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In front of what the scan leaves."""
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
        """Behind what both launches are told of rows."""
        rows, pools, vocab = self.rows, self.slots.pools, self.logits.shape[1]
        return (
            vocab,
            self.num_pieces,
            0 if pools is None else pools.vocab_size,
            self.logits.stride(0),
            rows.positions.stride(0),
            0 if rows.ahead is None else rows.ahead.stride(0),
            0 if rows.drafts is None else rows.drafts.stride(0),
            self.slots.table.stride(0),
            self.slots.slot_ids.stride(0),
        )


def _places(slots: SlotRows) -> tuple[int, int, int]:
    """Where slots say how drafts are judged and drawn, and count steps; -1: they do not."""
    columns = slots.columns
    places = [columns.offset(column.name) for column in CHOICE_COLUMNS]
    has_steps = STEP_COLUMN.name in columns
    return places[0], places[1], columns.offset(STEP_COLUMN.name) if has_steps else -1
