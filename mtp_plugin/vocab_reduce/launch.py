"""Checks, scratch and grids of the split reductions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.vocab_reduce.kernel import relaxed_kernel, top1_kernel

MAX_PIECES = 128
TARGET_PROGRAMS = 1024
"""Programs that fill a large GPU; more rows are cut into fewer pieces."""
LARGEST_PIECE = 16384


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


def split(rows: int, vocab: int) -> tuple[int, int, int]:
    """(piece length, number of pieces, block) for ``rows`` rows; a function of shapes alone."""
    wanted = max(1, -(-TARGET_PROGRAMS // max(rows, 1)))
    pieces = min(MAX_PIECES, max(wanted, -(-vocab // LARGEST_PIECE)))
    piece = -(-vocab // pieces)
    block = 1024 if piece <= 1024 else 2048 if piece <= 2048 else 4096
    if piece > block:
        piece = -(-piece // block) * block
    return piece, -(-vocab // piece), min(block, 1 << max(piece - 1, 1).bit_length())


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
            num_warps=4,
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
    """As :func:`top1_partials`, and what relaxed acceptance needs of drafted rows, in the same pass.

    Args:
        draft_tokens: [G * (width - 1)]. thinking: [R] bool. num_contexts: C. width: K+1.
        begin_token: a draft with this id may start the phase within its run.
    """
    rows, vocab = _check(logits)
    piece, pieces, block = split(rows, vocab)
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
