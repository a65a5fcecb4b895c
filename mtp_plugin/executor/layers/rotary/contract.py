"""How heads lie in a row of queries, keys and values, and where their angles are."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeadLayout:
    """A row holds Hq queries, then Hk keys, then Hk values, of ``head_dim`` numbers each."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_turned(self) -> int:
        """Heads that are rotated."""
        return self.num_q_heads + self.num_kv_heads

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hk, D]: views of the rows."""
        heads = qkv.unflatten(-1, (self.num_turned + self.num_kv_heads, self.head_dim))
        queries, keys, values = heads.split(
            [self.num_q_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )
        return queries, keys, values


@dataclass(frozen=True)
class Angles:
    """Cosines and sines, in the model's dtype, and the row of them that each token takes."""

    cos: torch.Tensor
    """[rows, W]; the first ``num_angles`` columns are read."""
    sin: torch.Tensor
    """As ``cos``, strides included."""
    num_angles: int
    """Pairs of numbers of a head that are rotated; the rest of the head passes."""
    index: torch.Tensor | None
    """[T] integers of any stride, held within the rows there are. None: token t takes row t."""


@dataclass(frozen=True)
class HeadNorms:
    """Root-mean-square norms over each head of queries and of keys."""

    q_weight: torch.Tensor
    """[head_dim], in the model's dtype."""
    k_weight: torch.Tensor
    """As ``q_weight``."""
    q_eps: float
    k_eps: float
