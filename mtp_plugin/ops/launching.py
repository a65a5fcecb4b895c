"""Launches Triton kernels: a device check of tensors, and a cache of compiled binaries.

Names in the kernels of this package: ``row``, ``block``, ``chunk``, ``request`` and ``generation``
are the indices of what a program works on, their plurals vectors of these. ``offset`` is the index
of a row in its request. ``columns`` are indices in a row of logits, ``ids`` token ids (with a
reduced vocabulary they differ), ``offsets`` indices within a block, tile or list, ``lanes`` those
of a short dimension padded to a power of two, and ``index`` is the entry to load or store.
``inside`` is the mask of entries that exist, ``is_*`` are other masks. ``x`` are loaded logits,
``num_*`` counts, ``*_ptr`` pointers (``*_row_ptr``: to one row), ``*_stride`` strides in elements.
Shape comments use the letters of `step`, and N rows of logits, P rows of a pool, W table columns.
"""

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
