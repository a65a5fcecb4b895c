"""Triton implementation of `synthetic_acceptance`: one launch, BLOCK generations per program.

1. Load the last position and, with slots, the number of each generation of the block.
2. Hash (seed, number, position) to a random number per draft: a tile [BLOCK, COLUMNS].
3. A draft is accepted if its random number is below its threshold. Lanes from K on have threshold
   0, which no random number is below.
4. Write the number of leading accepted drafts: the column of the first one that is not accepted.

A random number depends on no other request, so lanes past the last generation are masked, and
padding requests get a number that nothing reads. Absent drafts are not known here; acceptance stops
at the first of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.launching import CachedLaunches, expect_reachable
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.ops.synthetic_acceptance import RANDOM_BITS, SyntheticRule
from mtp_plugin.requests.columns import request_column

NUMBER = tl.constexpr(request_column("number"))
BLOCK = 32
"""Generations per program."""


@triton.jit
def _mix(x):
    """Hash as the reference does, on unsigned 32-bit numbers."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["num_slots"])
def synthetic_acceptance_kernel(
    # inputs
    position_ptr,  # [G] integer: of the last token of each generation
    table_ptr,  # HAS_NUMBERS: [S, W] int32
    slot_ptr,  # HAS_NUMBERS: [G] integer
    threshold_ptr,  # [>= K] int32
    seed_ptr,  # [1] int64
    # outputs
    accepted_ptr,  # [G] int32: number of accepted drafts
    # sizes
    num_generations,  # G
    position_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    # constants
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two >= K
    BLOCK: tl.constexpr,  # generations per program
    SHIFT: tl.constexpr,  # that leaves RANDOM_BITS of 32 bits
    HAS_NUMBERS: tl.constexpr,  # False: all requests have number 0
    PDL: tl.constexpr,
):
    """A block of requests: how many leading random numbers are below their thresholds."""
    grid_dependency_synchronize(PDL)
    generations = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = generations < num_generations
    columns = tl.arange(0, COLUMNS)
    last = tl.load(position_ptr + generations.to(tl.int64) * position_stride, mask=inside, other=0)
    numbers = tl.zeros_like(last).to(tl.uint32)
    if HAS_NUMBERS:
        offset = generations.to(tl.int64) * slot_stride
        slots = tl.load(slot_ptr + offset, mask=inside, other=0).to(tl.int64)
        # an id outside the table is the last slot
        slots = tl.where((slots >= 0) & (slots < num_slots), slots, num_slots - 1)
    # before the numbers, whose load waits for that of the slots
    seed = tl.load(seed_ptr)
    thresholds = tl.load(threshold_ptr + columns, mask=columns < K, other=0)
    if HAS_NUMBERS:
        number_ptr = table_ptr + slots * table_stride + NUMBER
        numbers = tl.load(number_ptr, mask=inside, other=0).to(tl.uint32)
    positions = (last.to(tl.int64)[:, None] + columns[None, :] + 1).to(tl.uint32)
    of_seed = _mix((seed + 0x9E3779B9).to(tl.uint32))
    of_request = _mix(of_seed ^ numbers)
    random_numbers = (_mix(of_request[:, None] ^ positions) >> SHIFT).to(tl.int32)
    accepted = random_numbers < thresholds[None, :]
    # columns >= K have threshold 0 and are never accepted
    run = tl.min(tl.where(accepted, COLUMNS, columns[None, :]), axis=1)
    tl.store(accepted_ptr + generations, run, mask=inside)


_launches = CachedLaunches(synthetic_acceptance_kernel)


def synthetic_acceptance_triton(
    last_positions: torch.Tensor, rule: SyntheticRule, slots: SlotRows | None, draft_len: int
) -> torch.Tensor:
    """One launch, one program per `BLOCK` requests."""
    expect_reachable(synthetic_acceptance_kernel, "positions", last_positions)
    generations = last_positions.shape[0]
    unused = last_positions  # never read
    table, slot_ids = (unused, unused) if slots is None else (slots.table, slots.slot_ids)
    accepted = torch.empty(generations, dtype=torch.int32, device=last_positions.device)
    if generations == 0:
        return accepted
    _launches[(triton.cdiv(generations, BLOCK),)](
        # inputs
        last_positions,
        table,
        slot_ids,
        rule.thresholds.contiguous(),
        rule.seed,
        # outputs
        accepted,
        # sizes
        generations,
        last_positions.stride(0),
        table.stride(0),
        slot_ids.stride(0),
        table.shape[0],
        # constants
        K=draft_len,
        COLUMNS=triton.next_power_of_2(max(draft_len, 1)),
        BLOCK=BLOCK,
        SHIFT=32 - RANDOM_BITS,
        HAS_NUMBERS=slots is not None,
        num_warps=1,
        **pdl_options(last_positions.device),
    )
    return accepted
