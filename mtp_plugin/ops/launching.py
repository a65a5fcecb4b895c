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
from functools import partial
from typing import Any

import torch
import triton

from mtp_plugin.errors import TensorContractError, expect

ALIGNMENT = 16
"""Triton specializes binaries on arguments that are divisible by it."""
MOST_LAUNCHES = 4096
"""Launches of a kernel that are kept: of all sizes of batches."""


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


class Launch:
    """Launches one grid of a kernel with the same sizes and constants, and any tensors of a device.

    Triton binds and inspects every argument at each launch, and compares every global that the
    kernel uses, which takes 60 microseconds with four dozen arguments. Here tensors alone select a
    compiled binary, by dtype and alignment, and it gets their pointers: of a tensor it would ask
    the driver in which memory it is.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], sizes: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._sizes = sizes
        self._named = named
        self._binaries: dict[Hashable, Any] = {}
        self._constants = sizes
        if isinstance(kernel, triton.JITFunction):
            names = [parameter.name for parameter in kernel.params]
            # the last ones are given by name, all or none
            first = next((i for i, name in enumerate(names) if name in named), len(names))
            self._constants += tuple(named[name] for name in names[first:])

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch it; None is the pointer of a tensor that its constants leave out."""
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        key = (
            *[None if tensor is None else tensor.dtype for tensor in tensors],
            *[pointer is None or pointer % ALIGNMENT == 0 for pointer in pointers],
        )
        binary = self._binaries.get(key)
        if binary is None:
            launch = self._kernel[self._grid]
            self._binaries[key] = launch(*tensors, *self._sizes, **self._named)
            return
        binary[(*self._grid, 1, 1)[:3]](*pointers, *self._constants)


class CachedLaunches:
    """Launches one kernel, whose pointers are its first parameters, and caches the launches."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._is_compiled = isinstance(kernel, triton.JITFunction)
        self._launches: dict[Hashable, Launch] = {}
        names = [parameter.name for parameter in kernel.params] if self._is_compiled else []
        self._num_tensors = sum(name.endswith("_ptr") for name in names)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return a function that launches ``grid`` programs, as that of the kernel does.

        Given by name are the constants at the end of the kernel's arguments, all or none, and the
        compiler's options.
        """
        return partial(self._launch, grid) if self._is_compiled else self._kernel[grid]

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        sizes = arguments[self._num_tensors :]
        key = (grid, arguments[0].device, sizes, *named.items())
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) == MOST_LAUNCHES:
                self._launches.clear()
            launch = self._launches[key] = Launch(self._kernel, grid, sizes, named)
        launch(*arguments[: self._num_tensors])
