"""What routing decides and how pairs of rows and experts are laid out."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RouterRule:
    """How scores become experts and weights."""

    top_k: int
    num_groups: int
    topk_group: int
    """Groups that experts are taken from; as many as there are: all."""
    normalise: bool
    """Whether the weights of a row are divided by their sum."""
    scale: float


@dataclass(frozen=True)
class Blocks:
    """Pairs by expert, contiguous. Entries behind the filled rows of a block mean nothing."""

    weights: torch.Tensor
    """[T, slots] fp32: of each pair; 1 for shared experts."""
    pairs: torch.Tensor
    """[blocks, block_rows] int32."""
    expert: torch.Tensor
    """[blocks] int32: routed experts first, then shared ones; any where nothing is filled."""
    filled: torch.Tensor
    """[blocks] int32: filled rows; 0 behind the last block."""

    @property
    def slots(self) -> int:
        """Experts of a row."""
        return int(self.weights.shape[1])

    @property
    def num_blocks(self) -> int:
        """Blocks, filled or not."""
        return int(self.pairs.shape[0])

    @property
    def block_rows(self) -> int:
        """Rows that a block holds."""
        return int(self.pairs.shape[1])


def block_rows_for(num_rows: int) -> int:
    """Rows of a block for ``num_rows`` rows; a function of shapes alone."""
    if num_rows <= 32:
        return 16
    if num_rows <= 64:
        return 32
    return 64 if num_rows <= 512 else 128


def most_blocks(num_rows: int, num_experts: int, top_k: int, shared: int, block_rows: int) -> int:
    """Blocks that pairs can take at most, however they are routed."""
    whole = -(-num_rows // block_rows)
    pairs = num_rows * top_k
    hit = min(num_experts, pairs)
    # a row takes an expert once, so that none has more than all rows
    return shared * whole + min(hit * whole, hit + (pairs - hit) // block_rows)
