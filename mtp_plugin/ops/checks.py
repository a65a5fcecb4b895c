"""Checks of tensor arguments."""

from __future__ import annotations

from collections.abc import Set
from typing import Literal, NamedTuple

import torch

from mtp_plugin.errors import TensorContractError, format_value

SIGNED = frozenset({torch.int32, torch.int64, torch.int16, torch.int8})
"""Dtypes of token ids of which -1 means none."""
INTEGERS = SIGNED | {torch.uint8}
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
        dtype: a dtype or a set of dtypes (:data:`INTEGERS`, :data:`SIGNED`, :data:`FLOATS`); None:
            any.
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
        and not value.is_nested
        and not value.is_neg()
        and not value.is_conj()
        and (
            dtype is None
            or value.dtype is dtype
            or (not isinstance(dtype, torch.dtype) and value.dtype in dtype)
        )
        and (shape is None or value.shape == shape or _matches(value.shape, shape))
        and (device is None or value.device == device)
        and (not contiguous or _is_contiguous(value, contiguous))
    ):
        return value
    kind = "" if dtype is None else f"{_format_dtypes(dtype)} "
    sizes = "" if shape is None else f" [{', '.join(map(_format_size, shape))}]"
    layout = "" if not contiguous else "contiguous " if contiguous is True else "row-contiguous "
    where = "" if device is None else f" on {device}"
    given = _format_given(value, with_strides=bool(contiguous))
    raise TensorContractError(f"{name}: expected {layout}{kind}tensor{sizes}{where}, got {given}")


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the memory of a view does not hold its values: torch negates or conjugates them when
    it reads them, a kernel does not."""
    return tensor.is_neg() or (tensor.is_complex() and tensor.is_conj())


def _format_given(value: object, *, with_strides: bool) -> str:
    if not isinstance(value, torch.Tensor):
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if not isinstance(shape, tuple) or dtype is None:
            return format_value(value)
        kind = type(value)
        return f"{kind.__module__}.{kind.__name__} {dtype} {list(shape)}; pass torch.as_tensor(...)"
    if value.is_nested:
        return f"nested {value.dtype} tensor on {value.device}; call to_padded_tensor(0)"
    given = f"{value.dtype} {list(value.shape)}"
    if value.layout is not torch.strided:
        return f"{value.layout} {given} on {value.device}; call to_dense()"
    if with_strides:
        given += f" with strides {list(value.stride())}"
    if _is_lazy(value):
        bit, call = ("negative", "neg") if value.is_neg() else ("conjugate", "conj")
        return f"{given} on {value.device}, a view with the {bit} bit; call resolve_{call}()"
    return f"{given} on {value.device}"


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
    if dtype in (INTEGERS, SIGNED):
        return "integer" if dtype == INTEGERS else "signed integer"
    return "floating-point" if dtype == FLOATS else " or ".join(sorted(map(str, dtype)))


def _format_size(size: int | str | AtLeast) -> str:
    return f">= {size.size}" if isinstance(size, AtLeast) else str(size)
