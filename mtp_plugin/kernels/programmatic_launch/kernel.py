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
