"""Checks and grids of the split reductions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.kernels.programmatic_launch import pdl_options
from mtp_plugin.kernels.top_k.kernel import top1_kernel

BLOCK = 1024
"""Values that a program reads at a time; small enough that many programs share a multiprocessor."""
FEW_ROWS, SOME_ROWS = 16, 64
MAX_PIECES = 256


@dataclass(frozen=True)
class Top1Partials:
    """Per row and piece: the highest value and the lowest id that has it."""

    values: torch.Tensor  # [rows, pieces] float32
    ids: torch.Tensor  # [rows, pieces] int32

    @classmethod
    def unwritten(cls, rows: int, vocab: int, device: torch.device | str) -> Top1Partials:
        """Tensors to write to, for ``rows`` rows of ``vocab`` values."""
        _, pieces, _ = split(rows, vocab)
        return cls(
            values=torch.empty(rows, pieces, dtype=torch.float32, device=device),
            ids=torch.empty(rows, pieces, dtype=torch.int32, device=device),
        )

    @property
    def num_pieces(self) -> int:
        """Pieces of the vocabulary."""
        return int(self.values.shape[1])


def split(rows: int, vocab: int, *, heavy: bool = False) -> tuple[int, int, int]:
    """(piece length, number of pieces, block) for ``rows`` rows; a function of shapes alone.

    Few rows are cut finely, so that every multiprocessor has work; many rows coarsely, so that
    less is left to merge. ``heavy``: the reduction computes more per value and wants longer pieces.
    """
    if rows <= FEW_ROWS:
        blocks = 1 if heavy else 2
    elif rows <= SOME_ROWS:
        blocks = 2 if heavy else 4
    else:
        blocks = 8 if heavy else 4
    piece = max(blocks * BLOCK, -(-vocab // (MAX_PIECES * BLOCK)) * BLOCK)
    return piece, -(-vocab // piece), min(BLOCK, 1 << max(vocab - 1, 1).bit_length())


def top1_partials(logits: torch.Tensor) -> Top1Partials:
    """Launch one program per (row, piece) of ``logits`` [rows, V], any row stride.

    Raises:
        TensorContractError: logits that are not a matrix of contiguous rows.
    """
    rows, vocab = _check(logits)
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
    """In place of :func:`top1_partials` where nobody reads what they hold."""
    unread = logits.new_empty(logits.shape[0], 0)
    return Top1Partials(unread, unread)


def _check(logits: torch.Tensor) -> tuple[int, int]:
    expect(
        logits.dim() == 2 and (logits.shape[0] == 0 or logits.stride(1) == 1),
        TensorContractError,
        f"logits: expected [rows, V] with contiguous rows, got shape {list(logits.shape)} and "
        f"strides {list(logits.stride())}",
    )
    return int(logits.shape[0]), int(logits.shape[1])
