"""The rotary embedding of queries and keys in place, after the norm of each head.

T rows, Hq query heads, Hk key and value heads, D numbers per head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.errors import TensorContractError, expect_int
from mtp_plugin.hosts.embedded.layers.norm import rms_norm_reference
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import FLOATS, INTEGERS, AtLeast, expect_tensor


@dataclass(frozen=True)
class HeadLayout:
    """A row holds Hq queries, then Hk keys, then Hk values, of ``head_dim`` numbers each."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_rotated(self) -> int:
        """Heads that are rotated."""
        return self.num_q_heads + self.num_kv_heads

    @property
    def width(self) -> int:
        """Numbers per row."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hk, D]: views of the rows."""
        heads = qkv.unflatten(-1, (self.num_rotated + self.num_kv_heads, self.head_dim))
        queries, keys, values = heads.split(
            [self.num_q_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )
        return queries, keys, values


@dataclass(frozen=True)
class Angles:
    """Cosines and sines in the model's dtype, and which row of them each token uses."""

    cos: torch.Tensor
    """[rows, W]; the first ``num_angles`` columns are read."""
    sin: torch.Tensor
    """As ``cos``, strides included."""
    num_angles: int
    """Pairs of numbers of a head that are rotated; the rest of the head stays as it is."""
    index: torch.Tensor | None
    """[T] integers of any stride, clamped to the rows of ``cos``. None: token t uses row t."""


@dataclass(frozen=True)
class HeadNorms:
    """Root-mean-square norms over each query head and each key head."""

    q_weight: torch.Tensor
    """[head_dim], in the model's dtype."""
    k_weight: torch.Tensor
    """As ``q_weight``."""
    q_eps: float
    k_eps: float


def rotate(
    qkv: torch.Tensor,
    layout: HeadLayout,
    angles: Angles,
    norms: HeadNorms | None,
    *,
    backend: Backend,
) -> None:
    """Normalize and rotate queries and keys in place; values stay as they are.

    Args:
        qkv: [T, (Hq + 2 * Hk) * D] with contiguous rows, written.
        angles: number j of a head is rotated together with number j + ``num_angles``.
        norms: None where the model does not normalize heads.
    """
    expect_tensor("qkv", qkv, dtype=FLOATS, shape=("T", layout.width), contiguous="rows")
    num_rows = int(qkv.shape[0])
    _check_angles(angles, layout, qkv.dtype, num_rows)
    if norms is not None:
        for name, weight in (("q_weight", norms.q_weight), ("k_weight", norms.k_weight)):
            expect_tensor(name, weight, dtype=qkv.dtype, shape=(layout.head_dim,))
    if num_rows > 0:
        backend.dispatch(rotate_reference)(qkv, layout, angles, norms)


def rotate_reference(
    qkv: torch.Tensor, layout: HeadLayout, angles: Angles, norms: HeadNorms | None
) -> None:
    queries, keys, _ = layout.split(qkv)
    if norms is not None:
        queries.copy_(rms_norm_reference(queries, norms.q_weight, norms.q_eps))
        keys.copy_(rms_norm_reference(keys, norms.k_weight, norms.k_eps))
    n = angles.num_angles
    index = torch.arange(qkv.shape[0], device=qkv.device)
    if angles.index is not None:
        index = angles.index.clamp(0, angles.cos.shape[0] - 1)
    cos, sin = (table[index, None, :n] for table in (angles.cos, angles.sin))
    for heads in (queries, keys):
        first, second = heads[..., :n].clone(), heads[..., n : 2 * n].clone()
        heads[..., :n] = first * cos + -second * sin
        heads[..., n : 2 * n] = second * cos + first * sin


def _check_angles(angles: Angles, layout: HeadLayout, dtype: torch.dtype, num_rows: int) -> None:
    expect_int("num_angles", angles.num_angles, 1, layout.head_dim // 2)
    rows = "rows" if angles.index is not None else num_rows
    for name, table in (("cos", angles.cos), ("sin", angles.sin)):
        shape = (rows, AtLeast(angles.num_angles))
        expect_tensor(name, table, dtype=dtype, shape=shape, contiguous="rows")
    cos, sin = angles.cos, angles.sin
    if sin.shape[0] != cos.shape[0] or sin.stride() != cos.stride():
        raise TensorContractError(
            f"sin: expected {cos.shape[0]} rows with strides {list(cos.stride())} as cos has, got "
            f"{sin.shape[0]} with strides {list(sin.stride())}"
        )
    if angles.index is not None:
        expect_tensor("index", angles.index, dtype=INTEGERS, shape=(num_rows,), device=cos.device)
