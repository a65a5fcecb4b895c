"""The grid of the gated activation."""

from __future__ import annotations

import torch
import triton

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.executor.layers.mlp.kernel import silu_mul_kernel
from mtp_plugin.kernels.launching import expect_reachable
from mtp_plugin.kernels.programmatic_launch import pdl_options

BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As the reference, in one launch."""
    expect_reachable(silu_mul_kernel, "gate_up", gate_up)
    expect(
        gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0 and gate_up.stride(1) == 1,
        TensorContractError,
        f"gate_up: expected [T, 2 * width] with contiguous rows, got {list(gate_up.shape)} with "
        f"strides {list(gate_up.stride())}",
    )
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
