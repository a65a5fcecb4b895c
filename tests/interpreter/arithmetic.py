"""Values of usual types are not promoted, spread and computed step by step: numpy does it all.

Every function here answers None where it does not know, and the interpreter does as ever.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime.interpreter import TensorHandle

NUMPY = {
    "int1": np.bool_,
    "int32": np.int32,
    "int64": np.int64,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "fp32": np.float32,
}
RANGES = {
    "int32": (-(2**31), 2**31),
    "int64": (-(2**63), 2**63),
    "uint32": (0, 2**32),
    "uint64": (0, 2**64),
    "fp32": (-(2**31), 2**31),
}
"""Integers in this range take the type of the other operand."""
COMMON = {
    ("int32", "int64"): core.int64,
    ("int64", "int32"): core.int64,
    ("int32", "fp32"): core.float32,
    ("fp32", "int32"): core.float32,
}

SIGNED = frozenset(("int32", "int64"))
UNSIGNED = frozenset(("uint32", "uint64"))
INTEGERS = SIGNED | UNSIGNED
NUMBERS = INTEGERS | {"fp32"}
BITS = INTEGERS | {"int1"}

ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
COMPARISONS = {
    "gt": ("greater_than", np.greater),
    "ge": ("greater_equal", np.greater_equal),
    "lt": ("less_than", np.less),
    "le": ("less_equal", np.less_equal),
    "eq": ("equal", np.equal),
    "ne": ("not_equal", np.not_equal),
}
"""The operator's name, the operation's, and numpy's."""
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
MOST_KEPT = 10_000

Operation = Callable[[Any, Any], Any]
Operands = tuple[Any, Any, Any, Any, bool]
"""Numbers of both sides, their type and their handle's, and whether one of them is a block."""

_numbers: dict[tuple[Any, ...], Any] = {}
_blocks: dict[tuple[int, tuple[int, ...]], Any] = {}


def compute_at_once(semantic: Any) -> None:
    """Operations of ``semantic`` that know most operands."""

    def replace(name: str, compute: Operation, takes: frozenset[str], of: Any = None) -> None:
        step_by_step = getattr(semantic, name)

        @functools.wraps(step_by_step)
        def computed(lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
            result = _result(compute, takes, of, lhs, rhs)
            return step_by_step(lhs, rhs, *flags, **named) if result is None else result

        setattr(semantic, name, computed)

    for name, compute in ARITHMETIC.items():
        replace(name, compute, NUMBERS)
    for name, compute in BITWISE.items():
        replace(f"{name}_", compute, BITS)
    for name, compute in COMPARISONS.values():
        replace(name, compute, NUMBERS, core.int1)
    replace("shl", np.left_shift, INTEGERS)
    replace("ashr", np.right_shift, SIGNED)
    replace("lshr", np.right_shift, UNSIGNED)
    choose = semantic.where

    @functools.wraps(choose)
    def where(condition: Any, x: Any, y: Any) -> Any:
        result = _chosen(condition, x, y)
        return choose(condition, x, y) if result is None else result

    semantic.where = where


def operators(semantic: Any) -> dict[str, Any]:
    """Members of ``tensor`` that hand an operator's operands to ``semantic``."""
    found = {}
    for name in ARITHMETIC:
        quick = _pointed if name == "add" else None
        pair = _operator(getattr(semantic, name), (True,), quick)
        found[f"__{name}__"], found[f"__r{name}__"] = pair
    for name in BITWISE:
        pair = _operator(getattr(semantic, f"{name}_"))
        found[f"__{name}__"], found[f"__r{name}__"] = pair
    for name, (step, compute) in COMPARISONS.items():
        found[f"__{name}__"] = _comparison(semantic, step, compute)
    return found


def _operator(
    step: Any, flags: tuple[Any, ...] = (), quick: Operation | None = None
) -> tuple[Operation, Operation]:
    """Of a value with another on its right, and on its left."""

    def left(self: Any, other: Any) -> Any:
        if type(other) is core.constexpr:
            other = other.value
        result = None if quick is None else quick(self, other)
        return step(self, other, *flags) if result is None else result

    def right(self: Any, other: Any) -> Any:
        return step(other.value if type(other) is core.constexpr else other, self, *flags)

    return left, right


def _comparison(semantic: Any, step: str, compute: Operation) -> Operation:
    compare = getattr(semantic, step)

    def compared(self: Any, other: Any) -> Any:
        if type(other) is core.constexpr:
            other = other.value
        result = _result(compute, NUMBERS, core.int1, self, other)
        return compare(self, semantic.to_tensor(other)) if result is None else result

    return compared


def _result(
    compute: Operation, takes: frozenset[str], of_result: Any, lhs: Any, rhs: Any
) -> Any | None:
    operands = _operands(lhs, rhs)
    if operands is None:
        return None
    left, right, dtype, of_handle, is_block = operands
    if dtype.name not in takes:
        return None
    try:
        data = compute(left, right)
    except ValueError:  # of shapes that do not fit
        return None
    return _made(data, of_handle, of_result or dtype, is_block)


def _chosen(condition: Any, x: Any, y: Any) -> Any | None:
    operands = _operands(x, y) if condition.dtype.name == "int1" else None
    if operands is None:
        return None
    left, right, dtype, of_handle, is_block = operands
    try:
        data = np.where(condition.handle.data, left, right)
    except ValueError:
        return None
    if type(y) is not core.tensor:
        of_handle = dtype
    elif y.dtype is dtype:
        of_handle = y.handle.dtype
    return _made(data, of_handle, dtype, is_block or type(condition.type) is core.block_type)


def _pointed(lhs: Any, rhs: Any) -> Any | None:
    """A pointer and an offset."""
    if type(lhs) is not core.tensor or type(lhs.dtype) is not core.pointer_type:
        return None
    is_block = type(lhs.type) is core.block_type
    width = max(1, lhs.handle.get_element_ty().primitive_bitwidth // 8)
    if type(rhs) is core.tensor and rhs.dtype.name in SIGNED:
        is_block = is_block or type(rhs.type) is core.block_type
        offset = width * rhs.handle.data.astype(np.uint64)
    elif type(rhs) is int and -(2**31) <= rhs < 2**31:
        offset = np.uint64(width * rhs & (2**64 - 1))
    else:
        return None
    try:
        data = lhs.handle.data + offset
    except ValueError:
        return None
    return _made(data, lhs.handle.dtype, lhs.dtype, is_block)


def _operands(lhs: Any, rhs: Any) -> Operands | None:
    if type(lhs) is core.tensor:
        dtype, handle = lhs.dtype, lhs.handle
        if type(rhs) is core.tensor:
            is_block = type(lhs.type) is core.block_type or type(rhs.type) is core.block_type
            name, other = dtype.name, rhs.dtype.name
            if name == other:
                if name not in NUMPY:
                    return None
                return handle.data, rhs.handle.data, dtype, handle.dtype, is_block
            common = COMMON.get((name, other))
            if common is None:
                return None
            kind = NUMPY[common.name]
            left, right = handle.data.astype(kind), rhs.handle.data.astype(kind)
            return left, right, common, common, is_block
        number = _number(dtype.name, rhs)
        if number is None:
            return None
        return handle.data, number, dtype, handle.dtype, type(lhs.type) is core.block_type
    if type(rhs) is core.tensor:
        dtype = rhs.dtype
        number = _number(dtype.name, lhs)
        if number is not None:
            return number, rhs.handle.data, dtype, dtype, type(rhs.type) is core.block_type
    return None


def _number(name: str, number: Any) -> Any | None:
    """The number as an operand of a type."""
    kind = type(number)
    if kind is not int and (kind is not float or name != "fp32"):
        return None
    if not number and name in UNSIGNED:
        return None  # the interpreter makes it a signed one
    key = name, kind, number
    result = _numbers.get(key)
    if result is None:
        lowest, end = RANGES.get(name, (0, 0))
        if not lowest <= number < end if kind is int else _is_double(number):
            return None
        if len(_numbers) > MOST_KEPT:
            _numbers.clear()
        result = _numbers[key] = NUMPY[name](number or 0)  # a zero has no sign
    return result


def _is_double(number: float) -> bool:
    """Whether a comparison is one of 64 bits, as the interpreter has it."""
    size = abs(number)
    return 0 < size < SMALLEST or LARGEST < size < math.inf


def _made(data: Any, of_handle: Any, dtype: Any, is_block: bool) -> Any:
    handle = TensorHandle.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, of_handle, {}
    if not is_block:
        return core.tensor(handle, dtype)
    key = id(dtype), data.shape
    block = _blocks.get(key)
    if block is None or block.element_ty is not dtype:
        if len(_blocks) > MOST_KEPT:
            _blocks.clear()
        block = _blocks[key] = core.block_type(dtype, list(data.shape))
    return core.tensor(handle, block)
