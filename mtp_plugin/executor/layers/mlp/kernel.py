"""Device code of the gated activation."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize


@triton.jit
def silu_mul(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of fp32 values that `dtype` holds, rounded to it after each step."""
    active = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (active * up).to(dtype)


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,  # [T, 2 * width]
    out_ptr,  # [T, width]
    gate_up_stride,
    width,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A piece of one row."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    start = gate_up_ptr + row * gate_up_stride + lanes
    gate = tl.load(start, mask=inside, other=0).to(tl.float32)
    up = tl.load(start + width, mask=inside, other=0).to(tl.float32)
    active = silu_mul(gate, up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + lanes, active, mask=inside)
