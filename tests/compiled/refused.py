# ruff: noqa: N803 (constants of kernels are in capitals)
"""Kernels that the interpreter runs and the compiler refuses, and one that both take."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def leaves_a_loop(x_ptr, length):
    for i in range(length):
        if tl.load(x_ptr + i) < 0:
            break
        tl.store(x_ptr + i, 0)


@triton.jit
def counts_in_python(x_ptr, length):
    lanes = tl.arange(0, length)
    tl.store(x_ptr + lanes, 0)


@triton.jit
def holds_too_much(x_ptr, y_ptr, WIDTH: tl.constexpr):
    rows, lanes = tl.arange(0, 64), tl.arange(0, WIDTH)
    x = tl.load(x_ptr + rows[:, None] * WIDTH + lanes[None, :])
    y = tl.load(y_ptr + rows[:, None] * WIDTH + lanes[None, :])
    tl.store(x_ptr + rows[:, None] * 64 + rows[None, :], tl.dot(x, tl.trans(y)).to(x.dtype))


@triton.jit
def clears(x_ptr, length, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    tl.store(x_ptr + lanes, 0, mask=lanes < length)


def compile_all() -> None:
    x = torch.zeros(64)
    leaves_a_loop[(1,)](x, 7)
    counts_in_python[(1,)](x, 16)
    holds_too_much[(1,)](x.half(), x.half(), WIDTH=1024)
    for length in (1, 5, 7, 32):
        clears[(1,)](x, length, LANES=64)
    clears[(1,)](x.half(), 5, LANES=64)
