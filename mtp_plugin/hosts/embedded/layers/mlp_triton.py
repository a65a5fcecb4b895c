"""Triton implementation of `mlp`: one launch, grid (T, blocks of columns).

1. Load a block of gates and of the values to be gated, in fp32.
2. Compute silu(gate), round it to the dtype of the rows, multiply, round again: as the model does.

Padding rows are computed like others; programs share nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options

BLOCK = 1024


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of fp32 values that `dtype` holds, rounded to it after each step."""
    active = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (active * up).to(dtype)


@triton.jit
def silu_mul_kernel(
    # input
    gate_up_ptr,  # [T, 2 * width] floating, gates first
    # output
    out_ptr,  # [T, width], as the input
    # sizes
    gate_up_stride,
    width,
    # constants
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of columns of one row."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    row_ptrs = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(row_ptrs, mask=inside, other=0).to(tl.float32)
    up = tl.load(row_ptrs + width, mask=inside, other=0).to(tl.float32)
    active = silu_mul(gate, up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + columns, active, mask=inside)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """One launch, one program per row and block of columns."""
    expect_reachable(silu_mul_kernel, "gate_up", gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        silu_mul_kernel[(num_rows, triton.cdiv(width, block))](
            gate_up_ptr=gate_up,
            out_ptr=out,
            gate_up_stride=gate_up.stride(0),
            width=width,
            BLOCK=block,
            num_warps=4,
            **pdl_options(gate_up.device),
        )
    return out
