"""Triton kernel of forced acceptance."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize
from mtp_plugin.requests.columns import request_column

NUMBER = tl.constexpr(request_column("number"))


@triton.jit
def _mix(x):
    """As the reference, on unsigned 32-bit numbers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def draw_kernel(
    # inputs
    position_ptr,
    table_ptr,
    slot_ptr,
    threshold_ptr,
    seed_ptr,
    # outputs
    forced_ptr,
    # sizes
    num_generations,
    position_stride,
    table_stride,
    slot_stride,
    # constants
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_NUMBERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of generations: the length of each one's run of draws below their thresholds."""
    grid_dependency_synchronize(PDL)
    generations = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = generations < num_generations
    columns = tl.arange(0, COLUMNS)
    last = tl.load(position_ptr + generations.to(tl.int64) * position_stride, mask=live, other=0)
    numbers = tl.zeros_like(last).to(tl.uint32)
    if HAS_NUMBERS:
        place = generations.to(tl.int64) * slot_stride
        slots = tl.load(slot_ptr + place, mask=live, other=0).to(tl.int64)
    # not behind the numbers, which wait for their slots
    seed = tl.load(seed_ptr)
    thresholds = tl.load(threshold_ptr + columns, mask=columns < K, other=0)
    if HAS_NUMBERS:
        number = table_ptr + slots * table_stride + NUMBER
        numbers = tl.load(number, mask=live, other=0).to(tl.uint32)
    positions = (last.to(tl.int64)[:, None] + columns[None, :] + 1).to(tl.uint32)
    of_seed = _mix((seed + 0x9E3779B9).to(tl.uint32))
    of_request = _mix(of_seed ^ numbers)
    draws = (_mix(of_request[:, None] ^ positions) >> SHIFT).to(tl.int32)
    stands = draws < thresholds[None, :]
    # no column behind K stands
    run = tl.min(tl.where(stands, COLUMNS, columns[None, :]), axis=1)
    tl.store(forced_ptr + generations, run, mask=live)
