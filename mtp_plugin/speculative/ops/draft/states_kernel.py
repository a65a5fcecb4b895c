"""Triton kernel that moves state windows on between two depths."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize


@triton.jit
def place_states_kernel(
    # inputs
    output_ptr,
    row_ptr,
    # outputs
    state_ptr,
    # sizes
    num_requests,
    hidden,
    output_stride,
    state_stride,
    offset,
    chunks,
    # constants
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some columns of a run of chunks of requests, the last chunk first.

    Where ``output`` is ``state`` from row d <= offset on, request i writes row last[i] + offset and
    request j reads row last[j] + d. The two meet only where last[j] >= last[i], that is j >= i: a
    write never falls on what a lower chunk has yet to read. Within a chunk all reads come before
    the barrier and all writes behind it, and other columns belong to other programs.
    """
    grid_dependency_synchronize(PDL)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    behind = (tl.program_id(1) + 1) * chunks
    for back in range(chunks):
        requests = (behind - 1 - back) * REQUESTS + tl.arange(0, REQUESTS)
        live = requests < num_requests
        rows = tl.load(row_ptr + requests, mask=live, other=0).to(tl.int64)
        inside = live[:, None] & (columns < hidden)[None, :]
        read = output_ptr + rows[:, None] * output_stride + columns[None, :]
        states = tl.load(read, mask=inside, other=0.0)
        tl.debug_barrier()
        written = state_ptr + (rows + offset)[:, None] * state_stride + columns[None, :]
        tl.store(written, states, mask=inside)
