"""The gated activation on the device: its grid."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.executor.layers.mlp.kernel import silu_mul_kernel
from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options

BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As at the door, in one launch."""
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
