"""Programmatic dependent launch (PDL): a secondary kernel starts while its primary still runs.

Between small kernels most of the time is launch latency. See CUDA's programming guide,
"Programmatic Dependent Launch and Synchronization".
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def _supports_pdl(device: torch.device) -> bool:
    # ROCm devices are named cuda too, with capability numbers of their own
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Return launch options of a kernel that begins with :func:`grid_dependency_synchronize`.

    With compute capability 9.0 and later its launch overlaps the end of the previous kernel.
    """
    return {"PDL": True, "launch_pdl": True} if _supports_pdl(device) else {"PDL": False}


@triton.jit
def grid_dependency_synchronize(PDL: tl.constexpr):
    """Wait until the writes of the primary kernel are visible; the first line of a PDL kernel.

    Only loads of memory that no kernel writes, such as weights, may precede it. It also triggers
    the completion of this kernel's own launch, so that its secondary may start; that one
    synchronizes in the same way, so every kernel still sees all earlier writes.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def grid_dependency_synchronize_ahead(PDL: tl.constexpr):
    """As :func:`grid_dependency_synchronize`, for a kernel whose secondary reads ahead.

    The secondary starts when every program of this kernel has waited. Before its own wait it may
    load what this kernel does not write, bypassing the L1 cache (``.cg``), which may be stale.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
