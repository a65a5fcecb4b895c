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
INT32 = (-(2**31), 2**31)


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
    """Launches one kernel, and caches its compiled binaries.

    Triton binds and inspects every argument at each launch, and compares every global that the
    kernel uses: of the 60 microseconds of a kernel with four dozen arguments this saves most.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._is_compiled = isinstance(kernel, triton.JITFunction)
        self._binaries: dict[Hashable, Any] = {}
        if self._is_compiled:
            self._names = [parameter.name for parameter in kernel.params]
            self._kinds = [
                (p.is_constexpr, not p.do_not_specialize, not p.do_not_specialize_on_alignment)
                for p in kernel.params
            ]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return a function that launches ``grid`` programs, as that of the kernel does.

        Given by name are the constants at the end of the kernel's arguments, all or none, and the
        compiler's options.
        """
        return partial(self._launch, grid) if self._is_compiled else self._kernel[grid]

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        key: list[Hashable] = [arguments[0].device, *named.items()]
        kinds = zip(arguments, self._kinds, strict=False)
        for value, (is_constant, is_specialized, is_aligned) in kinds:
            if isinstance(value, torch.Tensor):
                key.append(value.dtype)
                if is_specialized and is_aligned:
                    key.append(value.data_ptr() % ALIGNMENT == 0)
            elif is_constant or type(value) is not int:
                key.append((type(value), value))
            else:
                key.append(INT32[0] <= value < INT32[1])
                if is_specialized:
                    key.append("one" if value == 1 else value % ALIGNMENT == 0)
        binary = self._binaries.get(tuple(key))
        if binary is None:
            self._binaries[tuple(key)] = self._kernel[grid](*arguments, **named)
            return
        constants = [named[name] for name in self._names[len(arguments) :]]
        binary[(*grid, 1, 1)[:3]](*arguments, *constants)
