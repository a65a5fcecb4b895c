"""Maximum of each row of logits, reduced by blocks of the vocabulary.

One program per (row, block), so that few rows still use the whole device and many rows are read
once. The kernels that follow merge the blocks of a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mtp_plugin.kernels.checks import expect_tensor
from mtp_plugin.kernels.programmatic_launch import grid_dependency_synchronize, pdl_options

BLOCK = 1024
"""Values that a program reads at a time, few enough that programs share a multiprocessor."""
FEW_ROWS, SOME_ROWS = 16, 64
MAX_PIECES = 256


@dataclass(frozen=True)
class Top1Partials:
    """Per row and block: the highest value and its lowest id."""

    values: torch.Tensor  # [rows, pieces] float32
    ids: torch.Tensor  # [rows, pieces] int32

    @classmethod
    def unwritten(cls, rows: int, vocab: int, device: torch.device | str) -> Top1Partials:
        _, pieces, _ = split(rows, vocab)
        return cls(
            values=torch.empty(rows, pieces, dtype=torch.float32, device=device),
            ids=torch.empty(rows, pieces, dtype=torch.int32, device=device),
        )

    @property
    def num_pieces(self) -> int:
        return int(self.values.shape[1])


def split(rows: int, vocab: int, *, heavy: bool = False) -> tuple[int, int, int]:
    """Return (block length, number of blocks, values per iteration) for ``rows`` rows.

    Few rows get short blocks, so that every multiprocessor has work; many rows get long ones, so
    that less is left to merge. ``heavy``: the reduction computes more per value and is faster with
    longer blocks.
    """
    if rows <= FEW_ROWS:
        blocks = 1 if heavy else 2
    elif rows <= SOME_ROWS:
        blocks = 2 if heavy else 4
    else:
        blocks = 8 if heavy else 4
    piece = max(blocks * BLOCK, -(-vocab // (MAX_PIECES * BLOCK)) * BLOCK)
    return piece, -(-vocab // piece), min(BLOCK, 1 << max(vocab - 1, 1).bit_length())


@triton.jit
def _lane_top1(logits_ptr, row_start, first, end, BLOCK: tl.constexpr):
    """Highest value of each lane over [first, end), and its lowest id."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = first + lanes
    for start in range(first, end, BLOCK):
        ids = start + lanes
        value = tl.load(logits_ptr + row_start + ids, mask=ids < end, other=float("-inf"))
        value = value.to(tl.float32)
        # a comparison with NaN is false, so NaN never wins
        better = value > best
        best = tl.where(better, value, best)
        best_id = tl.where(better, ids, best_id)
    return best, best_id


@triton.jit
def top1_kernel(
    logits_ptr,
    value_ptr,
    id_ptr,
    row_stride,
    vocab,
    piece,
    num_pieces,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (row, block): its highest value and the lowest id of it."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * piece
    end = tl.minimum(first + piece, vocab)
    best, best_id = _lane_top1(logits_ptr, row * row_stride, first, end, BLOCK)
    top = tl.max(best, axis=0)
    top_id = tl.min(tl.where(best == top, best_id, 2147483647), axis=0)
    out = row * num_pieces + part
    tl.store(value_ptr + out, top)
    tl.store(id_ptr + out, top_id)


def top1_partials(logits: torch.Tensor) -> Top1Partials:
    """Launch one program per (row, block) of ``logits`` [rows, V], any row stride."""
    expect_tensor("logits", logits, shape=("rows", "V"))
    rows, vocab = logits.shape
    if rows:
        expect_tensor("logits", logits, contiguous="rows")
    piece, pieces, block = split(rows, vocab)
    partials = Top1Partials.unwritten(rows, vocab, logits.device)
    if rows:
        top1_kernel[(rows, pieces)](
            logits,
            partials.values,
            partials.ids,
            logits.stride(0),
            vocab,
            piece,
            pieces,
            BLOCK=block,
            num_warps=8,
            **pdl_options(logits.device),
        )
    return partials


def no_partials(logits: torch.Tensor) -> Top1Partials:
    """Return a placeholder for :func:`top1_partials` that must not be read."""
    unread = logits.new_empty(logits.shape[0], 0)
    return Top1Partials(unread, unread)
