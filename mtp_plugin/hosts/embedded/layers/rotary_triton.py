"""Triton implementation of `rotary`: one launch, grid (T, blocks of HEADS heads), in place.

A head has HEAD numbers; HALF pairs (i, i + HALF) of them are rotated, the rest stays as it is.

1. Load both halves of the block's heads: queries and keys alike, which are adjacent in a row.
2. Load the row's cosines and sines, by its index if there is one.
3. With norms, divide each head by its root mean square (over all HEAD numbers) and multiply by the
   weight of queries or keys; the rest is stored here.
4. Rotate the pairs, rounding products before they are added, and store both halves.

The index of a padding row is clamped to the rows of cosines, so that row is computed like others.
Each program reads and writes its own heads alone; values are not touched.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.hosts.embedded.layers.rotary import Angles, HeadLayout, HeadNorms
from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options

HEADS = 8
"""Heads per program."""


@triton.jit
def rotate_kernel(
    # updated in place
    qkv_ptr,  # [T, (Hq + 2 * Hk) * HEAD] floating
    # inputs
    cos_ptr,  # [num_rows, >= HALF] floating
    sin_ptr,  # [num_rows, >= HALF] floating
    index_ptr,  # INDEXED: [T] integer: row of cos and sin
    q_weight_ptr,  # NORMED: [HEAD] floating
    k_weight_ptr,  # NORMED: [HEAD] floating
    # sizes
    qkv_stride,
    index_stride,
    cos_stride,
    num_rows,  # of cos and sin
    num_q_heads,  # Hq
    num_heads,  # Hq + Hk
    q_eps,
    k_eps,
    # constants
    HEAD: tl.constexpr,  # head width
    HALF: tl.constexpr,  # rotated pairs of a head
    INDEXED: tl.constexpr,  # False: row t of cos and sin
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,  # per program
    LANES: tl.constexpr,  # a power of two >= HALF
    REST_LANES: tl.constexpr,  # a power of two >= HEAD - 2 * HALF
    PDL: tl.constexpr,
):
    """A few heads of one row: normalize them if the model does, then rotate."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    offsets = tl.arange(0, LANES)
    inside = (heads < num_heads)[:, None] & (offsets < HALF)[None, :]
    head_ptrs = qkv_ptr + row * qkv_stride + (heads * HEAD)[:, None]
    first_ptrs = head_ptrs + offsets[None, :]
    second_ptrs = first_ptrs + HALF
    first = tl.load(first_ptrs, mask=inside, other=0)
    second = tl.load(second_ptrs, mask=inside, other=0)
    dtype = first.dtype

    index = row
    if INDEXED:
        index = tl.load(index_ptr + row * index_stride).to(tl.int64)
        index = tl.minimum(tl.maximum(index, 0), num_rows - 1)
    angle_offsets = index * cos_stride + offsets
    cos = tl.load(cos_ptr + angle_offsets, mask=offsets < HALF, other=0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle_offsets, mask=offsets < HALF, other=0).to(tl.float32)[None, :]

    if NORMED:
        is_q = (heads < num_q_heads)[:, None]
        wide_first = first.to(tl.float32)
        wide_second = second.to(tl.float32)
        total = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
        if HEAD > 2 * HALF:
            rest_offsets = 2 * HALF + tl.arange(0, REST_LANES)
            in_rest = rest_offsets < HEAD
            rest_inside = (heads < num_heads)[:, None] & in_rest[None, :]
            rest_ptrs = head_ptrs + rest_offsets[None, :]
            rest = tl.load(rest_ptrs, mask=rest_inside, other=0).to(tl.float32)
            total += tl.sum(rest * rest, axis=1)
        eps = tl.where(heads < num_q_heads, q_eps, k_eps)
        scale = tl.rsqrt(total / HEAD + eps)[:, None]
        in_half = offsets < HALF
        q_first = tl.load(q_weight_ptr + offsets, mask=in_half, other=0)[None, :]
        k_first = tl.load(k_weight_ptr + offsets, mask=in_half, other=0)[None, :]
        q_second = tl.load(q_weight_ptr + HALF + offsets, mask=in_half, other=0)[None, :]
        k_second = tl.load(k_weight_ptr + HALF + offsets, mask=in_half, other=0)[None, :]
        weight_first = tl.where(is_q, q_first, k_first).to(tl.float32)
        weight_second = tl.where(is_q, q_second, k_second).to(tl.float32)
        first = ((wide_first * scale).to(dtype).to(tl.float32) * weight_first).to(dtype)
        second = ((wide_second * scale).to(dtype).to(tl.float32) * weight_second).to(dtype)
        if HEAD > 2 * HALF:
            q_rest = tl.load(q_weight_ptr + rest_offsets, mask=in_rest, other=0)[None, :]
            k_rest = tl.load(k_weight_ptr + rest_offsets, mask=in_rest, other=0)[None, :]
            weight_rest = tl.where(is_q, q_rest, k_rest).to(tl.float32)
            rest = (rest * scale).to(dtype).to(tl.float32) * weight_rest
            tl.store(rest_ptrs, rest.to(dtype), mask=rest_inside)

    wide_first = first.to(tl.float32)
    wide_second = second.to(tl.float32)
    # products are rounded before they are added, as the model's own code does
    rotated_first = (wide_first * cos).to(dtype).to(tl.float32)
    rotated_first += (-wide_second * sin).to(dtype).to(tl.float32)
    rotated_second = (wide_second * cos).to(dtype).to(tl.float32)
    rotated_second += (wide_first * sin).to(dtype).to(tl.float32)
    tl.store(first_ptrs, rotated_first.to(dtype), mask=inside)
    tl.store(second_ptrs, rotated_second.to(dtype), mask=inside)


def rotate_triton(
    qkv: torch.Tensor, layout: HeadLayout, angles: Angles, norms: HeadNorms | None
) -> None:
    """One launch, one program per row and :data:`HEADS` heads."""
    expect_reachable(rotate_kernel, "qkv", qkv)
    rest = layout.head_dim - 2 * angles.num_angles
    rotate_kernel[(qkv.shape[0], triton.cdiv(layout.num_rotated, HEADS))](
        qkv_ptr=qkv,
        cos_ptr=angles.cos,
        sin_ptr=angles.sin,
        index_ptr=qkv if angles.index is None else angles.index,
        q_weight_ptr=qkv if norms is None else norms.q_weight.contiguous(),
        k_weight_ptr=qkv if norms is None else norms.k_weight.contiguous(),
        qkv_stride=qkv.stride(0),
        index_stride=0 if angles.index is None else angles.index.stride(0),
        cos_stride=angles.cos.stride(0),
        num_rows=angles.cos.shape[0],
        num_q_heads=layout.num_q_heads,
        num_heads=layout.num_rotated,
        q_eps=0.0 if norms is None else norms.q_eps,
        k_eps=0.0 if norms is None else norms.k_eps,
        HEAD=layout.head_dim,
        HALF=angles.num_angles,
        INDEXED=angles.index is not None,
        NORMED=norms is not None,
        HEADS=HEADS,
        LANES=triton.next_power_of_2(angles.num_angles),
        REST_LANES=triton.next_power_of_2(max(rest, 1)),
        num_warps=4,
        # a fused multiply-add would leave out the rounding between product and sum
        enable_fp_fusion=False,
        **pdl_options(qkv.device),
    )
