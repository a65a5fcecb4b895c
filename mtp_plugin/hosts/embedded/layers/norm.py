"""Root-mean-square norms, as transformers' RMSNorm classes compute them.

T rows of one width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import FLOATS, INTEGERS, expect_tensor


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm: fp32 inside, weight after the cast."""

    weight: torch.Tensor
    """[width], contiguous, of the dtype of the rows."""
    eps: float
    """Added to the mean square."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend
) -> torch.Tensor:
    """Divide rows by their root mean square in fp32, cast to the dtype of ``x``, apply the weight.

    Args:
        x: [T, width] with contiguous rows.
        weight: [width], contiguous, of the dtype of ``x``.
        eps: added to the mean square.

    Returns:
        [T, width].
    """
    _check_rows("x", x, "weight", weight)
    return backend.dispatch(rms_norm_reference)(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``x`` to the residual and normalize the sum, see :func:`rms_norm`.

    Args:
        x: [T, width] with contiguous rows.
        residual: as ``x``.
        weight: [width], contiguous, of the dtype of ``x``.
        eps: added to the mean square.

    Returns:
        The normalized sum and the sum, [T, width] each.
    """
    _check_rows("x", x, "weight", weight)
    expect_tensor("residual", residual, dtype=x.dtype, shape=tuple(x.shape), contiguous="rows")
    return backend.dispatch(add_rms_norm_reference)(x, residual, weight, eps)


def join_norms(
    embedding: torch.Tensor,
    ids: torch.Tensor | None,
    hidden: torch.Tensor,
    embedding_norm: Norm,
    hidden_norm: Norm,
    *,
    embedding_first: bool,
    backend: Backend,
) -> torch.Tensor:
    """Concatenate normalized embeddings and hidden states: the input of an MTP layer's projection.

    Args:
        embedding: [V, width], or [T, width] where ``ids`` is None; contiguous rows.
        ids: [T], rows of ``embedding``; any stride.
        hidden: [T, width] with contiguous rows, of the dtype of ``embedding``.
        embedding_first: order of the halves.

    Returns:
        [T, 2 * width].
    """
    _check_rows("embedding", embedding, "embedding_norm.weight", embedding_norm.weight)
    num_rows = int(embedding.shape[0])
    if ids is not None:
        num_rows = int(expect_tensor("ids", ids, dtype=INTEGERS, shape=("T",)).shape[0])
    _check_rows("hidden", hidden, "hidden_norm.weight", hidden_norm.weight)
    shape = (num_rows, int(embedding.shape[1]))
    expect_tensor("hidden", hidden, dtype=embedding.dtype, shape=shape)
    return backend.dispatch(join_norms_reference)(
        embedding, ids, hidden, embedding_norm, hidden_norm, embedding_first
    )


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Also takes tensors of any rank."""
    wide = x.to(torch.float32)
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return rms_norm_reference(total, weight, eps), total


def join_norms_reference(
    embedding: torch.Tensor,
    ids: torch.Tensor | None,
    hidden: torch.Tensor,
    embedding_norm: Norm,
    hidden_norm: Norm,
    embedding_first: bool,
) -> torch.Tensor:
    embedded = embedding if ids is None else functional.embedding(ids, embedding)
    halves = [
        rms_norm_reference(embedded, embedding_norm.weight, embedding_norm.eps),
        rms_norm_reference(hidden, hidden_norm.weight, hidden_norm.eps),
    ]
    return torch.cat(halves if embedding_first else halves[::-1], dim=-1)


def _check_rows(name: str, rows: torch.Tensor, weight_name: str, weight: torch.Tensor) -> None:
    expect_tensor(name, rows, dtype=FLOATS, shape=("T", "width"), contiguous="rows")
    # the kernel reads the weight before the preceding kernel ends: it cannot be a copy made here
    expect_tensor(
        weight_name, weight, dtype=rows.dtype, shape=(int(rows.shape[1]),), contiguous=True
    )
