"""What kernels share."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def inputs_written(EARLY: tl.constexpr):
    """First line of a kernel that may be launched early: wait for the kernel before it.

    Above it may stand only loads of what no kernel writes, as weights. The kernel behind may be
    launched from here on; it waits in the same way, so that every kernel still sees all that was
    written before it.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
