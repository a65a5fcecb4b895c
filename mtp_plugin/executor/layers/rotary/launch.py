"""The rotary embedding on the device: its grid."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.executor.layers.rotary.contract import Angles, HeadLayout, HeadNorms
from mtp_plugin.executor.layers.rotary.kernel import rotate_kernel
from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options

HEADS = 8
"""Heads that one program turns."""


def rotate(qkv: torch.Tensor, layout: HeadLayout, angles: Angles, norms: HeadNorms | None) -> None:
    """As at the door, in one launch."""
    expect_reachable(rotate_kernel, "qkv", qkv)
    rest = layout.head_dim - 2 * angles.num_angles
    rotate_kernel[(qkv.shape[0], triton.cdiv(layout.num_turned, HEADS))](
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
        num_heads=layout.num_turned,
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
        # one instruction for product and sum would leave out the rounding between them
        enable_fp_fusion=False,
        **pdl_options(qkv.device),
    )
