"""The device's side of programmatic dependent launch."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def grid_dependency_synchronize(PDL: tl.constexpr):
    """First line of a kernel that is launched with PDL: wait until the primary's writes are seen.

    Above it may stand only loads of what no kernel writes, as weights. It also triggers the
    completion of this kernel's own launch, so that the secondary behind it may start; that one
    synchronizes in the same way, so every kernel still sees all that was written before it.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def grid_dependency_synchronize_ahead(PDL: tl.constexpr):
    """As :func:`grid_dependency_synchronize`, of a kernel whose secondary reads ahead.

    The secondary starts when every program of this kernel has waited: above its own wait may stand
    loads of what this kernel does not write, past the L1 cache (``.cg``), as that may hold what was
    there before.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
