"""The door of the rotary embedding.

T rows, Hq heads of queries, Hk of keys and of values, D numbers of a head.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.executor.layers.rotary import reference
from mtp_plugin.executor.layers.rotary.contract import Angles, HeadLayout, HeadNorms
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.checks import expect_integers


def rotate(
    qkv: torch.Tensor,
    layout: HeadLayout,
    angles: Angles,
    norms: HeadNorms | None,
    *,
    backend: Backend,
) -> None:
    """Norm and rotate queries and keys in place; values stay as they are.

    Args:
        qkv: [T, (Hq + 2 * Hk) * D] with contiguous rows, written.
        layout: of a row.
        angles: number j of a head turns with number j + ``num_angles``.
        norms: None where the model does not norm heads.

    Raises:
        TensorContractError: rows, angles or norms that do not fit.
    """
    num_rows = _check_rows(qkv, layout)
    _check_angles(angles, layout, qkv.dtype, num_rows)
    if norms is not None:
        _check_norms(norms, layout, qkv.dtype)
    if num_rows > 0:
        _side(backend).rotate(qkv, layout, angles, norms)


class _Side(Protocol):
    def rotate(
        self, qkv: torch.Tensor, layout: HeadLayout, angles: Angles, norms: HeadNorms | None
    ) -> None: ...


@cache
def _side(backend: Backend) -> _Side:
    if backend is Backend.TORCH:
        return reference
    from mtp_plugin.executor.layers.rotary import launch

    return launch


def _check_rows(qkv: torch.Tensor, layout: HeadLayout) -> int:
    """Check the rows and return T."""
    if qkv.dim() != 2 or qkv.shape[1] != layout.width or qkv.stride(1) != 1:
        raise TensorContractError(
            f"qkv: expected [T, {layout.width}] with contiguous rows, got {list(qkv.shape)} with "
            f"strides {list(qkv.stride())}"
        )
    return int(qkv.shape[0])


def _check_angles(angles: Angles, layout: HeadLayout, dtype: torch.dtype, num_rows: int) -> None:
    if not 0 < 2 * angles.num_angles <= layout.head_dim:
        raise TensorContractError(
            f"angles: expected up to {layout.head_dim // 2} of them for heads of "
            f"{layout.head_dim}, got {angles.num_angles}"
        )
    index = angles.index
    for name, table in (("cos", angles.cos), ("sin", angles.sin)):
        fits = table.dim() == 2 and table.shape[1] >= angles.num_angles and table.stride(1) == 1
        if index is None:
            fits = fits and table.shape[0] == num_rows
        if not fits or table.dtype != dtype or table.stride() != angles.cos.stride():
            raise TensorContractError(
                f"{name}: expected {dtype} rows of at least {angles.num_angles} angles, "
                f"{'any number' if index is not None else num_rows} of them, got {table.dtype} "
                f"{list(table.shape)} with strides {list(table.stride())}"
            )
    if angles.sin.shape[0] != angles.cos.shape[0]:
        raise TensorContractError(
            f"sin: expected {angles.cos.shape[0]} rows as cos has, got {angles.sin.shape[0]}"
        )
    if index is not None:
        expect_integers("index", index, num_rows, angles.cos.device)


def _check_norms(norms: HeadNorms, layout: HeadLayout, dtype: torch.dtype) -> None:
    for name, weight in (("q_weight", norms.q_weight), ("k_weight", norms.k_weight)):
        if weight.dim() != 1 or weight.shape[0] != layout.head_dim or weight.dtype != dtype:
            raise TensorContractError(
                f"{name}: expected {dtype} [{layout.head_dim}], got {weight.dtype} "
                f"{list(weight.shape)}"
            )
