"""Launches of kernels: a check of their tensors, and a cache of compiled binaries."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton

from mtp_plugin.errors import TensorContractError, expect


def expect_reachable(kernel: Any, name: str, tensor: torch.Tensor) -> None:
    """Check that ``kernel`` can read ``tensor``: on a CUDA device, or in the interpreter."""
    interpreted = not isinstance(kernel, triton.JITFunction)
    expect(
        tensor.is_cuda or interpreted,
        TensorContractError,
        f"{name}: expected a CUDA tensor (on the CPU kernels run only with TRITON_INTERPRET=1, set "
        f"before they are imported), got one on {tensor.device}",
    )


class CachedLaunches:
    """Launches of one kernel, with its binaries cached by a key of the caller.

    Triton's own inspection of two dozen arguments takes longer than the rest of a launch. The
    kernel must specialize neither its numbers, which fit 32 bits, nor the alignment of its
    pointers: then types and constants alone decide which binary runs.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._seen: dict[Hashable, Any] = {}

    def launch(self, like: Hashable, programs: int, *arguments: Any, **options: Any) -> None:
        """Launch ``programs`` programs.

        Args:
            like: key of device, types and constants; equal only for launches of the same binary.
            arguments: of the kernel, in its order, constants included.
            options: for the compiler, the same for equal ``like``.
        """
        binary = self._seen.get(like)
        if binary is not None:
            binary[(programs, 1, 1)](*arguments)
            return
        binary = self._kernel[(programs,)](*arguments, **options)
        if isinstance(self._kernel, triton.JITFunction):
            self._seen[like] = binary
