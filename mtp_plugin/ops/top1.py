"""Top-1 of each row of logits: the first pass, over blocks of the vocabulary.

1. `top1_kernel`, grid [rows, blocks]: a program reads one block of one row in tiles; each lane
   keeps its highest value and that value's lowest id. The program reduces the lanes, lowest id on
   ties, and writes both. NaN never wins; a block without a finite value has -inf.
2. The kernels that follow (of `acceptance` and `draft`) merge the blocks of a row.

Blocks are short if rows are few, so that they still occupy the whole device (`split`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.checks import expect_tensor
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options

TILE = 1024
"""Values that a program reads per iteration, few enough that programs share a multiprocessor."""
FEW_ROWS, SOME_ROWS = 16, 64
MAX_BLOCKS = 256


@dataclass(frozen=True)
class Top1Partials:
    """Per row and block: the highest value and its lowest id."""

    values: torch.Tensor  # [rows, blocks] float32
    ids: torch.Tensor  # [rows, blocks] int32

    @classmethod
    def unwritten(cls, rows: int, vocab: int, device: torch.device | str) -> Top1Partials:
        _, num_blocks, _ = split(rows, vocab)
        return cls(
            values=torch.empty(rows, num_blocks, dtype=torch.float32, device=device),
            ids=torch.empty(rows, num_blocks, dtype=torch.int32, device=device),
        )

    @property
    def num_blocks(self) -> int:
        return int(self.values.shape[1])


def split(rows: int, vocab: int, *, heavy: bool = False) -> tuple[int, int, int]:
    """Return (block length, number of blocks, tile: values per iteration) for ``rows`` rows.

    Few rows get short blocks, so that every multiprocessor has work; many rows get long ones, so
    that less is left to merge. ``heavy``: the reduction computes more per value and is faster with
    longer blocks.
    """
    if rows <= FEW_ROWS:
        tiles = 1 if heavy else 2
    elif rows <= SOME_ROWS:
        tiles = 2 if heavy else 4
    else:
        tiles = 8 if heavy else 4
    block_len = max(tiles * TILE, -(-vocab // (MAX_BLOCKS * TILE)) * TILE)
    return block_len, -(-vocab // block_len), min(TILE, 1 << max(vocab - 1, 1).bit_length())


@triton.jit
def _lane_top1(logits_ptr, row_start, first, end, TILE: tl.constexpr):
    """Highest value of each lane over [first, end), and its lowest id."""
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = first + lanes
    for start in range(first, end, TILE):
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
    logits_ptr,  # [rows, V] floating
    value_ptr,  # [rows, num_blocks] float32: maxima of blocks
    id_ptr,  # [rows, num_blocks] int32: their lowest ids
    row_stride,
    vocab,  # V
    block_len,  # columns per block
    num_blocks,
    TILE: tl.constexpr,  # columns per iteration
    PDL: tl.constexpr,
):
    """One program per (row, block): its highest value and the lowest id of it."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    first = block * block_len
    end = tl.minimum(first + block_len, vocab)
    best, best_id = _lane_top1(logits_ptr, row * row_stride, first, end, TILE)
    top = tl.max(best, axis=0)
    top_id = tl.min(tl.where(best == top, best_id, 2147483647), axis=0)
    index = row * num_blocks + block
    tl.store(value_ptr + index, top)
    tl.store(id_ptr + index, top_id)


def top1_partials(logits: torch.Tensor) -> Top1Partials:
    """Launch one program per (row, block) of ``logits`` [rows, V], any row stride."""
    expect_tensor("logits", logits, shape=("rows", "V"))
    rows, vocab = logits.shape
    if rows:
        expect_tensor("logits", logits, contiguous="rows")
    block_len, num_blocks, tile = split(rows, vocab)
    partials = Top1Partials.unwritten(rows, vocab, logits.device)
    if rows:
        top1_kernel[(rows, num_blocks)](
            logits,
            partials.values,
            partials.ids,
            logits.stride(0),
            vocab,
            block_len,
            num_blocks,
            TILE=tile,
            num_warps=8,
            **pdl_options(logits.device),
        )
    return partials
