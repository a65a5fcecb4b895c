"""Which request a row of logits belongs to, on the device."""

import triton
import triton.language as tl

from mtp_plugin.requests import options

GREEDY_BELOW = tl.constexpr(options.GREEDY_BELOW)
NO_COLUMN = tl.constexpr(2147483647)
"""Behind every column of a row."""
CACHED = tl.constexpr("")
"""A load by way of all caches; ``.cg`` is past the L1 cache."""


@triton.jit
def place_of(
    row,
    num_contexts,
    width,
    table_ptr,
    table_stride,
    slot_ptr,
    slot_stride,
    CACHE: tl.constexpr = CACHED,
):
    """The request of a row, the row's number in it, and where the request's slot stands."""
    # a division of 64 bits takes ten times as many instructions
    row = row.to(tl.int32)
    behind = tl.maximum(row - num_contexts, 0)
    is_context = row < num_contexts
    request = tl.where(is_context, row, num_contexts + behind // width).to(tl.int64)
    offset = tl.where(is_context, 0, behind % width)
    slot = tl.load(slot_ptr + request * slot_stride, cache_modifier=CACHE).to(tl.int64)
    return request, offset, table_ptr + slot * table_stride
