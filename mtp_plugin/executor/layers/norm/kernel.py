"""Device code of the norms."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize


@triton.jit
def _normed(x, weight, width, eps):
    """`x` over its root mean square, times `weight`; cast to the type of `x` in between."""
    wide = x.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / width
    scaled = (wide * tl.rsqrt(mean_square + eps)).to(x.dtype)
    return scaled.to(tl.float32) * weight.to(tl.float32)


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [T, width]
    residual_ptr,  # [T, width]
    weight_ptr,  # [width]
    sum_ptr,  # [T, width]
    out_ptr,  # [T, width]
    x_stride,
    residual_stride,
    width,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: the residual added where there is one, then normed."""
    lanes = tl.arange(0, BLOCK)
    inside = lanes < width
    # weights are there before the kernel in front has ended
    weight = tl.load(weight_ptr + lanes, mask=inside, other=0)
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + lanes, mask=inside, other=0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + lanes, mask=inside, other=0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + lanes, x, mask=inside)
    normed = _normed(x, weight, width, eps)
    tl.store(out_ptr + row * width + lanes, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def join_kernel(
    embedding_ptr,  # [V, width], or [T, width] without ids
    ids_ptr,  # [T]
    hidden_ptr,  # [T, width]
    embedding_weight_ptr,  # [width]
    hidden_weight_ptr,  # [width]
    out_ptr,  # [T, 2 * width]
    embedding_stride,
    ids_stride,
    hidden_stride,
    width,
    embedding_eps,
    hidden_eps,
    GATHER: tl.constexpr,
    EMBEDDING_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row and one half of it: the embedding normed, or the state normed."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    is_state = tl.program_id(1) == 1
    lanes = tl.arange(0, BLOCK)
    inside = lanes < width
    if is_state:
        x = tl.load(hidden_ptr + row * hidden_stride + lanes, mask=inside, other=0)
        weight = tl.load(hidden_weight_ptr + lanes, mask=inside, other=0)
        normed = _normed(x, weight, width, hidden_eps)
    else:
        source = row
        if GATHER:
            source = tl.load(ids_ptr + row * ids_stride).to(tl.int64)
        x = tl.load(embedding_ptr + source * embedding_stride + lanes, mask=inside, other=0)
        weight = tl.load(embedding_weight_ptr + lanes, mask=inside, other=0)
        normed = _normed(x, weight, width, embedding_eps)
    second = is_state if EMBEDDING_FIRST else (tl.program_id(1) == 0)
    start = row * 2 * width + tl.where(second, width, 0)
    tl.store(out_ptr + start + lanes, normed.to(out_ptr.dtype.element_ty), mask=inside)
