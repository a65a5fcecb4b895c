"""Where Triton kernels can run: one check for every launch file."""

from __future__ import annotations

from typing import Any

import torch
import triton

from mtp_plugin.errors import TensorContractError, expect


def expect_reachable(kernel: Any, name: str, tensor: torch.Tensor) -> None:
    """Check that ``kernel`` can read ``tensor``: on a CUDA device, or interpreted.

    Raises:
        TensorContractError: a CPU tensor for a compiled kernel.
    """
    interpreted = not isinstance(kernel, triton.JITFunction)
    expect(
        tensor.is_cuda or interpreted,
        TensorContractError,
        f"{name}: expected a CUDA tensor (on the CPU kernels run only with TRITON_INTERPRET=1, set "
        f"before they are imported), got one on {tensor.device}",
    )
