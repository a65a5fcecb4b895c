"""Triton implementation of `rotary`."""

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
    qkv_ptr,  # [T, (Hq + 2 * Hk) * HEAD], changed in place
    cos_ptr,  # [rows, HALF and more]
    sin_ptr,  # [rows, HALF and more]
    index_ptr,  # [T]
    q_weight_ptr,  # [HEAD]
    k_weight_ptr,  # [HEAD]
    qkv_stride,
    index_stride,
    cos_stride,
    num_rows,  # of cos and sin
    num_q_heads,
    num_heads,  # Hq + Hk
    q_eps,
    k_eps,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INDEXED: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A few heads of one row: normalize them if the model does, then rotate."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lanes = tl.arange(0, LANES)
    there = (heads < num_heads)[:, None] & (lanes < HALF)[None, :]
    start = qkv_ptr + row * qkv_stride + (heads * HEAD)[:, None]
    at_first = start + lanes[None, :]
    at_second = at_first + HALF
    first = tl.load(at_first, mask=there, other=0)
    second = tl.load(at_second, mask=there, other=0)
    dtype = first.dtype

    place = row
    if INDEXED:
        place = tl.load(index_ptr + row * index_stride).to(tl.int64)
        place = tl.minimum(tl.maximum(place, 0), num_rows - 1)
    angle = place * cos_stride + lanes
    cos = tl.load(cos_ptr + angle, mask=lanes < HALF, other=0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=lanes < HALF, other=0).to(tl.float32)[None, :]

    if NORMED:
        is_q = (heads < num_q_heads)[:, None]
        wide_first = first.to(tl.float32)
        wide_second = second.to(tl.float32)
        total = tl.sum(wide_first * wide_first + wide_second * wide_second, axis=1)
        if HEAD > 2 * HALF:
            rest_lanes = 2 * HALF + tl.arange(0, REST_LANES)
            in_rest = rest_lanes < HEAD
            rest_there = (heads < num_heads)[:, None] & in_rest[None, :]
            at_rest = start + rest_lanes[None, :]
            rest = tl.load(at_rest, mask=rest_there, other=0).to(tl.float32)
            total += tl.sum(rest * rest, axis=1)
        eps = tl.where(heads < num_q_heads, q_eps, k_eps)
        scale = tl.rsqrt(total / HEAD + eps)[:, None]
        in_half = lanes < HALF
        q_first = tl.load(q_weight_ptr + lanes, mask=in_half, other=0)[None, :]
        k_first = tl.load(k_weight_ptr + lanes, mask=in_half, other=0)[None, :]
        q_second = tl.load(q_weight_ptr + HALF + lanes, mask=in_half, other=0)[None, :]
        k_second = tl.load(k_weight_ptr + HALF + lanes, mask=in_half, other=0)[None, :]
        weight_first = tl.where(is_q, q_first, k_first).to(tl.float32)
        weight_second = tl.where(is_q, q_second, k_second).to(tl.float32)
        first = ((wide_first * scale).to(dtype).to(tl.float32) * weight_first).to(dtype)
        second = ((wide_second * scale).to(dtype).to(tl.float32) * weight_second).to(dtype)
        if HEAD > 2 * HALF:
            q_rest = tl.load(q_weight_ptr + rest_lanes, mask=in_rest, other=0)[None, :]
            k_rest = tl.load(k_weight_ptr + rest_lanes, mask=in_rest, other=0)[None, :]
            weight_rest = tl.where(is_q, q_rest, k_rest).to(tl.float32)
            rest = (rest * scale).to(dtype).to(tl.float32) * weight_rest
            tl.store(at_rest, rest.to(dtype), mask=rest_there)

    wide_first = first.to(tl.float32)
    wide_second = second.to(tl.float32)
    # products are rounded before they are added, as the model's own code does
    turned_first = (wide_first * cos).to(dtype).to(tl.float32)
    turned_first += (-wide_second * sin).to(dtype).to(tl.float32)
    turned_second = (wide_second * cos).to(dtype).to(tl.float32)
    turned_second += (wide_first * sin).to(dtype).to(tl.float32)
    tl.store(at_first, turned_first.to(dtype), mask=there)
    tl.store(at_second, turned_second.to(dtype), mask=there)


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
