"""Launches Triton kernels: a device check of tensors, and a cache of compiled binaries."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton

from mtp_plugin.errors import TensorContractError, expect


def expect_reachable(kernel: Any, name: str, tensor: torch.Tensor) -> None:
    """Check that ``kernel`` can access ``tensor``: it is on a CUDA device, or the kernel runs in
    Triton's interpreter."""
    interpreted = not isinstance(kernel, triton.JITFunction)
    expect(
        tensor.is_cuda or interpreted,
        TensorContractError,
        f"{name}: expected a CUDA tensor (on the CPU kernels run only with TRITON_INTERPRET=1, set "
        f"before they are imported), got one on {tensor.device}",
    )


class CachedLaunches:
    """Launches one kernel, and caches its compiled binaries by a key that the caller computes.

    Triton inspects every argument at each launch, which takes longer than the rest of the launch if
    there are two dozen. The kernel must not be specialized on values of its integer arguments,
    which must fit 32 bits, or on pointer alignment; then only types and constants select the
    binary.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._binaries: dict[Hashable, Any] = {}

    def launch(self, key: Hashable, programs: int, *arguments: Any, **options: Any) -> None:
        """Launch ``programs`` programs.

        Args:
            key: of device, types and constants; equal only for launches of the same binary.
            arguments: all arguments of the kernel in order, including constants.
            options: compiler options, the same for equal keys.
        """
        binary = self._binaries.get(key)
        if binary is not None:
            binary[(programs, 1, 1)](*arguments)
            return
        binary = self._kernel[(programs,)](*arguments, **options)
        if isinstance(self._kernel, triton.JITFunction):
            self._binaries[key] = binary
