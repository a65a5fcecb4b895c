"""The interpreter's short cuts give what it gives without them."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.language.semantic import TritonSemantic  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")

NUMBERS = (0, 1, -1, 7, 2**31 - 1, -(2**31), 2**31, 2**40, True, False, 0.0, -0.0, 0.5, 1e300)
TYPES = (tl.int1, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.float16, tl.float32, tl.float64)
SHAPES = ((), (1,), (4,), (1, 4), (2, 1), (2, 4))


def a_value(dtype: tl.dtype, shape: tuple[int, ...]) -> tl.tensor:
    numpy_type = interpreter._get_np_dtype(dtype)
    data = np.arange(np.prod(shape, dtype=int)).reshape(shape or (1,)).astype(numpy_type)
    handle = interpreter.TensorHandle(data, dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


def told(semantic: TritonSemantic, *operands: object, **flags: bool) -> object:
    """What becomes of the operands of an operation, or the error that they end in."""
    try:
        values = semantic.binary_op_type_checking_impl(*operands, **flags)
    except Exception as error:
        return type(error), str(error)
    return [
        (
            *(str(value.type), str(value.shape), value.numel.value),
            *(value.dtype.name, value.handle.dtype.name, value.handle.data.dtype.str),
            *(value.handle.data.shape, value.handle.data.tobytes()),
        )
        for value in values
    ]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("flags", [{}, {"div_or_mod": True}, {"arithmetic_check": False}], ids=str)
def test_operands(flags: dict[str, bool]) -> None:
    quick, plain = (
        interpreter.interpreter_semantic,
        TritonSemantic(interpreter.interpreter_builder),
    )
    values = [a_value(dtype, shape) for dtype in TYPES for shape in SHAPES]
    pairs = itertools.chain(
        itertools.product(values, NUMBERS),
        itertools.product(NUMBERS, values),
        itertools.product(values, values),
        [(values[14], values[14])],
    )
    for lhs, rhs in pairs:
        assert told(quick, lhs, rhs, **flags) == told(plain, lhs, rhs, **flags), (lhs, rhs)


def test_numbers_of_a_type() -> None:
    quick, plain = (
        interpreter.interpreter_semantic,
        TritonSemantic(interpreter.interpreter_builder),
    )
    numbers = [number for number in NUMBERS if number != 1e300]
    for dtype, number, _ in itertools.product(TYPES, numbers, range(2)):
        told_twice = []
        for semantic in (quick, plain):
            try:
                value = semantic.scalar_constant(number, dtype)
            except Exception as error:
                told_twice.append((type(error), str(error)))
            else:
                told_twice.append((value.dtype.name, value.handle.data.tobytes()))
        assert operator.eq(*told_twice), (dtype, number)


def test_what_a_shape_tells() -> None:
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
    tl.static_assert(not fail, "asked to")
    tl.store(out + rows, _doubled(_doubled(rows)))


def test_stand_ins_leave_with_the_launch() -> None:
    members = tl.load, tl.core.load, tl.tensor.__add__, tl.range, tl.reduce, tl.dtype.to_ir
    for fail in (False, True, False):
        out = torch.zeros(4, dtype=torch.int32)
        if fail:
            with pytest.raises(interpreter.InterpreterError, match="asked to"):
                _kernel[(1,)](out, fail=True)
        else:
            _kernel[(2,)](out, fail=False)
            assert out.tolist() == [0, 1, 2, 12]
        found = tl.load, tl.core.load, tl.tensor.__add__, tl.range, tl.reduce, tl.dtype.to_ir
        assert all(map(operator.is_, found, members))
