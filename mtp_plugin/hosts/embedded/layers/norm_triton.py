"""Triton implementation of `norm`: one launch per function.

`rms_norm_kernel`, grid [T]: a program holds a row.

1. Load the weight, which no kernel writes, before waiting for the previous kernel.
2. Load the row; with ADD add the residual in fp32, round, and store the sum.
3. Divide by the root mean square in fp32, round to the dtype of the row, multiply by the weight.

`join_norms_kernel`, grid (T, 2): one program normalizes the embedding of a row, the other one its
hidden state; both write their half of the joined row. With GATHER the embedding is a row of the
table, whose token ids must be valid, those of padding rows too.

Padding rows are computed like others; programs share nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.hosts.embedded.layers.norm import Norm
from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options


@triton.jit
def _normed(x, weight, width, eps):
    """Divide `x` by its root mean square, cast to the type of `x`, multiply by `weight`."""
    wide = x.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / width
    scaled = (wide * tl.rsqrt(mean_square + eps)).to(x.dtype)
    return scaled.to(tl.float32) * weight.to(tl.float32)


@triton.jit
def rms_norm_kernel(
    # inputs; all floating, of one dtype
    x_ptr,  # [T, width]
    residual_ptr,  # ADD: [T, width]
    weight_ptr,  # [width]
    # outputs
    sum_ptr,  # ADD: [T, width]
    out_ptr,  # [T, width]
    # sizes
    x_stride,
    residual_stride,
    width,
    eps,
    # constants
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two >= width
    PDL: tl.constexpr,
):
    """One row: add the residual if there is one, then normalize."""
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    # weights do not depend on the preceding kernel
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0)
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + offsets, mask=inside, other=0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + offsets, x, mask=inside)
    normed = _normed(x, weight, width, eps)
    tl.store(out_ptr + row * width + offsets, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def join_norms_kernel(
    # inputs; all but the ids floating, of one dtype
    embedding_ptr,  # GATHER: [V, width], else [T, width]
    ids_ptr,  # GATHER: [T] integer: token ids
    hidden_ptr,  # [T, width]
    embedding_weight_ptr,  # [width]
    hidden_weight_ptr,  # [width]
    # output
    out_ptr,  # [T, 2 * width]
    # sizes
    embedding_stride,
    ids_stride,
    hidden_stride,
    width,
    embedding_eps,
    hidden_eps,
    # constants
    GATHER: tl.constexpr,
    EMBEDDING_FIRST: tl.constexpr,  # in the joined row
    BLOCK: tl.constexpr,  # a power of two >= width
    PDL: tl.constexpr,
):
    """Normalize one half of one row: the embedding or the hidden state."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    is_state = tl.program_id(1) == 1
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    if is_state:
        x = tl.load(hidden_ptr + row * hidden_stride + offsets, mask=inside, other=0)
        weight = tl.load(hidden_weight_ptr + offsets, mask=inside, other=0)
        normed = _normed(x, weight, width, hidden_eps)
    else:
        source = row
        if GATHER:
            source = tl.load(ids_ptr + row * ids_stride).to(tl.int64)
        x = tl.load(embedding_ptr + source * embedding_stride + offsets, mask=inside, other=0)
        weight = tl.load(embedding_weight_ptr + offsets, mask=inside, other=0)
        normed = _normed(x, weight, width, embedding_eps)
    second = is_state if EMBEDDING_FIRST else (tl.program_id(1) == 0)
    start = row * 2 * width + tl.where(second, width, 0)
    tl.store(out_ptr + start + offsets, normed.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One launch, one program per row."""
    expect_reachable(rms_norm_kernel, "x", x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out, out)
    return out


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch, one program per row."""
    expect_reachable(rms_norm_kernel, "x", x)
    expect_reachable(rms_norm_kernel, "residual", residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, total, out)
    return out, total


def join_norms_triton(
    embedding: torch.Tensor,
    ids: torch.Tensor | None,
    hidden: torch.Tensor,
    embedding_norm: Norm,
    hidden_norm: Norm,
    embedding_first: bool,
) -> torch.Tensor:
    """One launch, one program per half row."""
    expect_reachable(join_norms_kernel, "embedding", embedding)
    expect_reachable(join_norms_kernel, "hidden", hidden)
    num_rows, width = hidden.shape
    out = torch.empty(num_rows, 2 * width, dtype=hidden.dtype, device=hidden.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        join_norms_kernel[(num_rows, 2)](
            embedding_ptr=embedding,
            ids_ptr=hidden if ids is None else ids,
            hidden_ptr=hidden,
            embedding_weight_ptr=embedding_norm.weight,
            hidden_weight_ptr=hidden_norm.weight,
            out_ptr=out,
            ids_stride=0 if ids is None else ids.stride(0),
            embedding_stride=embedding.stride(0),
            hidden_stride=hidden.stride(0),
            width=width,
            embedding_eps=embedding_norm.eps,
            hidden_eps=hidden_norm.eps,
            GATHER=ids is not None,
            EMBEDDING_FIRST=embedding_first,
            BLOCK=block,
            num_warps=_warps(block),
            **pdl_options(hidden.device),
        )
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    total: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if x.shape[0] == 0:
        return
    block = triton.next_power_of_2(x.shape[1])
    rms_norm_kernel[(x.shape[0],)](
        x_ptr=x,
        residual_ptr=x if residual is None else residual,
        weight_ptr=weight,
        sum_ptr=total,
        out_ptr=out,
        x_stride=x.stride(0),
        residual_stride=x.stride(0) if residual is None else residual.stride(0),
        width=x.shape[1],
        eps=eps,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=_warps(block),
        **pdl_options(x.device),
    )


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)
