"""The interpreter's short cuts give what it gives without them."""

from __future__ import annotations

import functools
import itertools
import operator
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.language.semantic import TritonSemantic  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from tests.interpreter.arithmetic import COMPARISONS, operators  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

NUMBERS = (0, 1, -1, 7, 2**31 - 1, -(2**31), 2**31, 2**40, True, False, 0.0, -0.0, 0.5, 1e300)
TYPES = (tl.int1, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.float32, tl.float64)
SHAPES = ((), (1,), (4,), (1, 4), (2, 1), (2, 4))


WHOLE = (3, 0, -1, 2**31 - 1, -(2**31), 1, 2**63 - 1, 31)
REAL = (1.5, 0.0, float("nan"), float("inf"), -0.0, 3e38, float("-inf"), -2.0)

Both = tuple[TritonSemantic, TritonSemantic]


@pytest.fixture
def both() -> Both:
    """With the short cuts, and without."""
    return interpreter.interpreter_semantic, TritonSemantic(interpreter.interpreter_builder)


def a_value(dtype: tl.dtype, shape: tuple[int, ...], first: int = 0) -> tl.tensor:
    numpy_type = interpreter._get_np_dtype(dtype)
    numbers = np.roll(REAL if dtype.is_floating() else WHOLE, first)
    data = np.resize(numbers, shape or (1,)).astype(numpy_type)
    return value_of(data, dtype, shape)


def value_of(data: np.ndarray, dtype: tl.dtype, shape: tuple[int, ...]) -> tl.tensor:
    handle = interpreter.TensorHandle(data, dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


def describe_value(value: tl.tensor) -> tuple[object, ...]:
    return (
        *(str(value.type), str(value.shape), value.numel.value),
        *(value.dtype.name, value.handle.dtype.name, value.handle.data.dtype.str),
        *(value.handle.data.shape, value.handle.data.tobytes()),
    )


def format_value(operation: Callable[..., object], *operands: object, **flags: object) -> object:
    """What becomes of the operands of an operation, or the error that they end in."""
    try:
        values = operation(*operands, **flags)
    except Exception as error:
        return type(error), str(error)
    return [describe_value(value) for value in (values if isinstance(values, tuple) else (values,))]


def pairs(name: str) -> Iterator[tuple[object, object]]:
    """A fifth of all pairs of operands; which one depends on the name of the operation."""
    left, right = (
        [a_value(dtype, shape, first) for dtype in TYPES for shape in SHAPES] for first in (0, 5)
    )
    every = itertools.chain(
        itertools.product(left, NUMBERS),
        itertools.product(NUMBERS, left),
        itertools.product(left, right),
        [(left[14], left[14])],
    )
    return itertools.islice(every, zlib.crc32(name.encode()) % 5, None, 5)


@pytest.mark.parametrize("flags", [{}, {"div_or_mod": True}, {"arithmetic_check": False}], ids=str)
def test_operands(flags: dict[str, bool], both: Both) -> None:
    quick, plain = (semantic.binary_op_type_checking_impl for semantic in both)
    for lhs, rhs in pairs(str(flags)):
        assert format_value(quick, lhs, rhs, **flags) == format_value(plain, lhs, rhs, **flags), (
            lhs,
            rhs,
        )


def unsigned(operand: object) -> bool:
    return isinstance(operand, tl.tensor) and operand.dtype.is_int_unsigned()


OPERATIONS = [
    *((name, (True,)) for name in ("add", "sub", "mul")),
    *((name, ()) for name in ("and_", "or_", "xor_", "shl", "ashr", "lshr")),
    *((name, ()) for name, _ in COMPARISONS.values()),
]


@pytest.mark.parametrize(("name", "flags"), OPERATIONS)
def test_operations(name: str, flags: tuple[bool, ...], both: Both) -> None:
    quick, plain = (getattr(semantic, name) for semantic in both)
    for lhs, rhs in pairs(name):
        if name == "ashr" and any(unsigned(each) for each in (lhs, rhs)):
            continue  # that of unsigned numbers is another operation
        assert format_value(quick, lhs, rhs, *flags) == format_value(plain, lhs, rhs, *flags), (
            lhs,
            rhs,
        )


@pytest.mark.parametrize("name", [*operators(interpreter.interpreter_semantic)])
def test_operators(name: str, both: Both) -> None:
    """Of a value and another, a number or a constant."""
    quick = operators(both[0])[name]
    plain = functools.partial(getattr(tl.tensor, name), _semantic=both[1])
    for lhs, rhs in pairs(name):
        if isinstance(lhs, tl.tensor):
            assert format_value(quick, lhs, rhs) == format_value(plain, lhs, rhs), (lhs, rhs)
            if not isinstance(rhs, tl.tensor):
                rhs = tl.constexpr(rhs)
                assert format_value(quick, lhs, rhs) == format_value(plain, lhs, rhs), (lhs, rhs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("points_to", [tl.int1, tl.int16, tl.float32, tl.int64], ids=str)
def test_pointers(points_to: tl.dtype, shape: tuple[int, ...], both: Both) -> None:
    quick = operators(both[0])["__add__"]
    plain = functools.partial(tl.tensor.__add__, _semantic=both[1])
    numbers = np.resize(np.array([2**40, 2**63 + 8], dtype=np.uint64), shape or (1,))
    pointer = value_of(numbers, tl.pointer_type(points_to), shape)
    offsets = [a_value(dtype, other) for dtype in TYPES for other in SHAPES]
    for offset in (*offsets, *NUMBERS, tl.constexpr(7), pointer):
        assert format_value(quick, pointer, offset) == format_value(plain, pointer, offset), offset


@pytest.mark.parametrize("shape", SHAPES)
def test_a_choice(shape: tuple[int, ...], both: Both) -> None:
    quick, plain = (semantic.where for semantic in both)
    for dtype in (tl.int1, tl.int32):
        condition = a_value(dtype, shape)
        for x, y in pairs(f"{dtype} {shape}"):
            assert format_value(quick, condition, x, y) == format_value(plain, condition, x, y), (
                x,
                y,
            )


def test_numbers_of_a_type(both: Both) -> None:
    numbers = [number for number in NUMBERS if number != 1e300]
    for dtype, number, _ in itertools.product(TYPES, numbers, range(2)):
        quick, plain = (format_value(semantic.scalar_constant, number, dtype) for semantic in both)
        assert quick == plain, (dtype, number)


def test_shapes_of_values_and_types() -> None:
    for sizes in (SHAPES * 2)[1:]:
        value = a_value(tl.float32, sizes)
        assert [size.value for size in value.shape] == list(sizes)
        assert value.numel.value == np.prod(sizes, dtype=int)
        if sizes:
            assert [*value.type.shape] == list(sizes)
            assert value.type.numel == value.numel.value
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.int32, [3])
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.int32, [3])
    with pytest.raises(TypeError, match="0d block_type"):
        tl.block_type(tl.int32, [])


@triton.jit
def _doubled(value):
    return tl.where(value > 2, value * 2, value)


@triton.jit
def _kernel(out, fail: tl.constexpr):
    rows = tl.arange(0, 4)
    tl.static_assert(not fail, "requested failure")
    tl.store(out + rows, _doubled(_doubled(rows)))


def test_replacements_are_removed_after_the_launch() -> None:
    members = tl.load, tl.core.load, tl.tensor.__add__, tl.range, tl.reduce, tl.dtype.to_ir
    for fail in (False, True, False):
        out = torch.zeros(4, dtype=torch.int32)
        if fail:
            with pytest.raises(interpreter.InterpreterError, match="requested failure"):
                _kernel[(1,)](out, fail=True)
        else:
            _kernel[(2,)](out, fail=False)
            assert out.tolist() == [0, 1, 2, 12]
        found = tl.load, tl.core.load, tl.tensor.__add__, tl.range, tl.reduce, tl.dtype.to_ir
        assert all(map(operator.is_, found, members))
