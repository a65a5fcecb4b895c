"""Checks of tensor arguments."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal, NamedTuple

import torch

from mtp_plugin.errors import TensorContractError, format_value

INTEGERS = frozenset({torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8})
FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


class AtLeast(NamedTuple):
    """A minimum size of a dimension."""

    size: int


def expect_tensor(
    name: str,
    value: object,
    *,
    dtype: torch.dtype | Set[torch.dtype] | None = None,
    shape: tuple[int | str | AtLeast, ...] | None = None,
    device: torch.device | None = None,
    contiguous: bool | Literal["rows"] = False,
) -> torch.Tensor:
    """Return ``value`` if it is a dense tensor of the expected dtype, shape, device and layout.

    Args:
        name: name of the argument, for the message.
        dtype: a dtype or a set of dtypes (:data:`INTEGERS`, :data:`FLOATS`); None: any.
        shape: sizes, each a number, :class:`AtLeast`, or a string, which any size matches; None:
            any shape.
        device: None: any.
        contiguous: True: contiguous; "rows": the last dimension has stride 1.

    Raises:
        TensorContractError: anything else; the message has the expected and the given tensor.
    """
    if (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and (
            dtype is None
            or value.dtype is dtype
            or (not isinstance(dtype, torch.dtype) and value.dtype in dtype)
        )
        and (shape is None or _matches(value.shape, shape))
        and (device is None or value.device == device)
        and (not contiguous or _is_contiguous(value, contiguous))
    ):
        return value
    kind = "" if dtype is None else f"{_format_dtypes(dtype)} "
    sizes = "" if shape is None else f" [{', '.join(map(_format_size, shape))}]"
    layout = "" if not contiguous else "contiguous " if contiguous is True else "row-contiguous "
    where = "" if device is None else f" on {device}"
    given = format_value(value)
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        given = (
            f"{value.layout} {value.dtype} {list(value.shape)} on {value.device}; call to_dense()"
        )
    elif isinstance(value, torch.Tensor):
        strides = f" with strides {list(value.stride())}" if contiguous else ""
        given = f"{value.dtype} {list(value.shape)}{strides} on {value.device}"
    raise TensorContractError(f"{name}: expected {layout}{kind}tensor{sizes}{where}, got {given}")


def _matches(given: torch.Size, expected: tuple[int | str | AtLeast, ...]) -> bool:
    if len(given) != len(expected):
        return False
    for size, limit in zip(given, expected, strict=True):
        if type(limit) is int:  # the fast case
            if size != limit:
                return False
        elif isinstance(limit, AtLeast):
            if size < limit.size:
                return False
        elif not isinstance(limit, str) and size != limit:
            return False
    return True


def _is_contiguous(tensor: torch.Tensor, contiguous: bool | Literal["rows"]) -> bool:
    if contiguous is True:
        return tensor.is_contiguous()
    return tensor.dim() == 0 or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


def _format_dtypes(dtype: torch.dtype | Set[torch.dtype]) -> str:
    if not isinstance(dtype, Set):
        return str(dtype)
    if dtype == INTEGERS:
        return "integer"
    return "floating-point" if dtype == FLOATS else " or ".join(sorted(map(str, dtype)))


def _format_size(size: int | str | AtLeast) -> str:
    return f">= {size.size}" if isinstance(size, AtLeast) else str(size)
