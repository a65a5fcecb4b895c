"""Checks, scratch and grids of the split reductions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.vocab_reduce.kernel import relaxed_kernel, top1_kernel

BLOCK = 1024
"""Values that a program reads at a time; small enough that many programs share a multiprocessor."""
FEW_ROWS, SOME_ROWS = 16, 64
MAX_PIECES = 256


@dataclass(frozen=True)
class Top1Partials:
    """Per row and piece: the highest value and the lowest id that has it."""

    values: torch.Tensor  # [rows, pieces] float32
    ids: torch.Tensor  # [rows, pieces] int32

    @property
    def num_pieces(self) -> int:
        """Pieces of the vocabulary."""
        return int(self.values.shape[1])


@dataclass(frozen=True)
class RelaxedPartials(Top1Partials):
    """And, for drafted rows of thinking requests, the draft's rank and the softmax weights."""

    weights: torch.Tensor  # [rows, pieces] float32: sum of exp(value - piece maximum)
    ahead: torch.Tensor  # [rows, pieces] int32: tokens in front of the draft


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
    values = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    if rows:
        top1_kernel[(rows, pieces)](
            logits,
            values,
            ids,
            logits.stride(0),
            vocab,
            piece,
            pieces,
            BLOCK=block,
            num_warps=8,
        )
    return Top1Partials(values, ids)


def relaxed_partials(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    thinking: torch.Tensor,
    num_contexts: int,
    width: int,
    begin_token: int,
) -> RelaxedPartials:
    """As :func:`top1_partials`, and what relaxed acceptance needs of drafted rows, in the same
    pass.

    Args:
        draft_tokens: [G * (width - 1)]. thinking: [R] bool. num_contexts: C. width: K+1.
        begin_token: a draft with this id may start the phase within its run.
    """
    rows, vocab = _check(logits)
    piece, pieces, block = split(rows, vocab, heavy=True)
    values = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
    weights = torch.empty_like(values)
    ids = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    ahead = torch.empty_like(ids)
    if rows:
        relaxed_kernel[(rows, pieces)](
            logits,
            draft_tokens,
            thinking,
            values,
            ids,
            weights,
            ahead,
            logits.stride(0),
            vocab,
            piece,
            pieces,
            num_contexts,
            begin_token,
            WIDTH=width,
            COLUMNS=1 << max(width - 2, 0).bit_length(),
            BLOCK=block,
            num_warps=4,
        )
    return RelaxedPartials(values, ids, weights, ahead)


def _check(logits: torch.Tensor) -> tuple[int, int]:
    expect(
        logits.dim() == 2 and (logits.shape[0] == 0 or logits.stride(1) == 1),
        TensorContractError,
        f"logits: expected [rows, V] with contiguous rows, got shape {list(logits.shape)} and "
        f"strides {list(logits.stride())}",
    )
    return int(logits.shape[0]), int(logits.shape[1])
