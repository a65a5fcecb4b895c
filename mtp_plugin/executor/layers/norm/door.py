"""The doors of the norms, in the words of transformers' RMSNorm classes.

T rows of one width.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.executor.layers.norm import reference
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.checks import is_integral


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend
) -> torch.Tensor:
    """Rows over their root mean square, in fp32, cast to the dtype of ``x``, times the weight.

    Args:
        x: [T, width] with contiguous rows, here and below.
        weight: [width], contiguous, of the dtype of ``x``.
        eps: added to the mean square.

    Returns:
        [T, width].

    Raises:
        TensorContractError: rows or weights of other shapes, dtypes or strides.
    """
    _check_rows("x", x, "weight", weight)
    return _side(backend).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual plus ``x``, normed as by :func:`rms_norm`, and the sum itself.

    Args:
        x: [T, width].
        residual: as ``x``.
        weight: [width], contiguous, of the dtype of ``x``.
        eps: added to the mean square.

    Returns:
        [T, width] each.

    Raises:
        TensorContractError: rows or weights of other shapes, dtypes or strides.
    """
    _check_rows("x", x, "weight", weight)
    if residual.shape != x.shape or residual.dtype != x.dtype or not _has_whole_rows(residual):
        raise TensorContractError(
            f"residual: expected {x.dtype} {list(x.shape)} like x, with contiguous rows, got "
            f"{residual.dtype} {list(residual.shape)} with strides {list(residual.stride())}"
        )
    return _side(backend).add_rms_norm(x, residual, weight, eps)


def join_norms(
    embedding: torch.Tensor,
    ids: torch.Tensor | None,
    hidden: torch.Tensor,
    embedding_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    *,
    embedding_eps: float,
    hidden_eps: float,
    embedding_first: bool,
    backend: Backend,
) -> torch.Tensor:
    """What the joining projection of an MTP layer reads: two normed halves side by side.

    Args:
        embedding: [V, width], or [T, width] where ``ids`` is None.
        ids: [T], rows of ``embedding``; any stride.
        hidden: [T, width], of the dtype of ``embedding``.
        embedding_weight, hidden_weight: [width], contiguous, of that dtype too.
        embedding_eps, hidden_eps: added to the mean squares.
        embedding_first: order of the halves.

    Returns:
        [T, 2 * width].

    Raises:
        TensorContractError: rows, ids or weights of other shapes, dtypes or strides.
    """
    _check_rows("embedding", embedding, "embedding_weight", embedding_weight)
    _check_rows("hidden", hidden, "hidden_weight", hidden_weight)
    if ids is not None and (ids.dim() != 1 or not is_integral(ids)):
        raise TensorContractError(f"ids: expected integers [T], got {ids.dtype} {list(ids.shape)}")
    given = embedding.shape[0] if ids is None else ids.shape[0]
    fits = given == hidden.shape[0] and embedding.shape[1] == hidden.shape[1]
    if not fits or hidden.dtype != embedding.dtype:
        raise TensorContractError(
            f"hidden: expected one row of {embedding.shape[1]} {embedding.dtype} for each of "
            f"{given} embeddings, got {hidden.dtype} {list(hidden.shape)}"
        )
    return _side(backend).join_norms(
        embedding,
        ids,
        hidden,
        embedding_weight,
        hidden_weight,
        embedding_eps=embedding_eps,
        hidden_eps=hidden_eps,
        embedding_first=embedding_first,
    )


class _Side(Protocol):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def join_norms(
        self,
        embedding: torch.Tensor,
        ids: torch.Tensor | None,
        hidden: torch.Tensor,
        embedding_weight: torch.Tensor,
        hidden_weight: torch.Tensor,
        *,
        embedding_eps: float,
        hidden_eps: float,
        embedding_first: bool,
    ) -> torch.Tensor: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.executor.layers.norm import launch

    return launch


def _check_rows(name: str, rows: torch.Tensor, weight_name: str, weight: torch.Tensor) -> None:
    # copying a weight will not do: the kernel reads it before the work in front of it has ended
    if weight.dim() != 1 or not weight.is_contiguous() or weight.dtype != rows.dtype:
        raise TensorContractError(
            f"{weight_name}: expected contiguous {rows.dtype} [width] like {name}, got "
            f"{weight.dtype} {list(weight.shape)} with strides {list(weight.stride())}"
        )
    if rows.dim() != 2 or rows.shape[1:] != weight.shape or not _has_whole_rows(rows):
        raise TensorContractError(
            f"{name}: expected [rows, {weight.shape[0]}] with contiguous rows, got "
            f"{list(rows.shape)} with strides {list(rows.stride())}"
        )


def _has_whole_rows(rows: torch.Tensor) -> bool:
    return rows.stride(1) == 1 or rows.shape[1] == 1
