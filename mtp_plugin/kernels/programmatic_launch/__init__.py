"""Programmatic dependent launch (PDL): a secondary kernel starts while its primary drains.

Between small kernels most of the time is launches. See CUDA's programming guide, "Programmatic
Dependent Launch and Synchronization".
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def _supports_pdl(device: torch.device) -> bool:
    # devices of other makers go by the name of cuda too, with numbers of their own
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that begins with :func:`~.kernel.grid_dependency_synchronize`.

    With compute capability 9.0 and later its launch overlaps the end of the kernel before it.
    """
    return {"PDL": True, "launch_pdl": True} if _supports_pdl(device) else {"PDL": False}
