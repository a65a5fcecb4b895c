"""How heads lie in a row of queries, keys and values, and where their angles are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.errors import TensorContractError, expect


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
    """As ``cos``."""
    num_angles: int
    """Pairs of numbers of a head that are rotated; the rest of the head passes."""
    index: torch.Tensor | None
    """[T] integers of any stride, held within the rows there are. None: token t takes row t."""


@dataclass(frozen=True)
class HeadNorms:
    """Root-mean-square norms over each head of queries and of keys."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    q_eps: float
    k_eps: float


def check_rotation(qkv: torch.Tensor, layout: HeadLayout, angles: Angles) -> int:
    """Check one call and return T.

    Raises:
        TensorContractError: naming the tensor, what was expected and what came.
    """
    expect(
        qkv.dim() == 2 and qkv.shape[1] == layout.width and qkv.stride(1) == 1,
        TensorContractError,
        f"qkv: expected [T, {layout.width}] with contiguous rows, got {list(qkv.shape)} with "
        f"strides {list(qkv.stride())}",
    )
    expect(
        0 < 2 * angles.num_angles <= layout.head_dim,
        TensorContractError,
        f"angles: expected up to {layout.head_dim // 2} of them for heads of {layout.head_dim}, "
        f"got {angles.num_angles}",
    )
    num_rows = int(qkv.shape[0])
    for name, table in (("cos", angles.cos), ("sin", angles.sin)):
        fits = table.dim() == 2 and table.shape[1] >= angles.num_angles and table.stride(1) == 1
        if angles.index is None:
            fits = fits and table.shape[0] == num_rows
        expect(
            fits and table.dtype == qkv.dtype and table.stride() == angles.cos.stride(),
            TensorContractError,
            f"{name}: expected {qkv.dtype} rows of at least {angles.num_angles} angles, "
            f"{'any number' if angles.index is not None else num_rows} of them, got {table.dtype} "
            f"{list(table.shape)} with strides {list(table.stride())}",
        )
    index = angles.index
    expect(
        index is None or tuple(index.shape) == (num_rows,),
        TensorContractError,
        f"index: expected [{num_rows}], got {None if index is None else list(index.shape)}",
    )
    return num_rows
