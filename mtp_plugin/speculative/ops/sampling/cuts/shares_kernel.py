"""Several programs share a pass over the candidates of one row, and the last of them goes on."""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.speculative.logit_rows.rows_triton import NO_COLUMN, Picked
from mtp_plugin.speculative.ops.sampling.cuts.candidates_kernel import LISTED, PLACES
from mtp_plugin.speculative.ops.sampling.cuts.passes_kernel import (
    Drawn,
    Passed,
    better,
)

UNSHARED = tl.constexpr(64)
"""Picked chunks that one program looks at alone, however many programs a row has."""
TOLD = tl.constexpr(6)
"""Numbers that a program tells of its share of a row."""


class Split(NamedTuple):
    """How programs share a row; pointers stand at the row's own."""

    share: tl.tensor  # this program's
    arrived_ptr: tl.tensor  # how many have told what they found
    told_ptr: tl.tensor  # [TOLD, SHARES]
    chunks_at: tl.tensor  # so far behind all picked chunks those of the share are written


@triton.jit
def dealt(picked, split, ALL_CHUNKS: tl.constexpr, SHARES: tl.constexpr):
    """Which of the picked chunks are a share's: every so many-th, written behind all of them."""
    places = tl.arange(0, ALL_CHUNKS // SHARES)
    at = places * SHARES + split.share
    here = at < picked.number
    chunks = tl.load(picked.ptr + at, mask=here, other=0)
    tl.store(picked.ptr + split.chunks_at + places, chunks, mask=here)
    number = (picked.number + (SHARES - 1) - split.share) // SHARES
    return Picked(picked.ptr + split.chunks_at, number)


@triton.jit
def is_last_of(split, SHARES: tl.constexpr):
    """Tell that what this share found is written; whether it is the last that does."""
    # one thread tells of what all of them wrote
    tl.debug_barrier()
    return tl.atomic_add(split.arrived_ptr, 1, sem="acq_rel") == SHARES - 1


@triton.jit
def joined(passed, split, pair_ptr, SHARES: tl.constexpr):
    """What all shares of a row found, and whether this program is the last that tells: no other
    learns it.

    The list of share s stands PLACES * s behind ``pair_ptr``, that of all behind the last one.
    """
    told_ptr = split.told_ptr + split.share
    tl.store(told_ptr, passed.nearer)
    tl.store(told_ptr + SHARES, passed.within)
    tl.store(told_ptr + 2 * SHARES, passed.found.to(tl.float32, bitcast=True))
    tl.store(told_ptr + 3 * SHARES, passed.drawn.score)
    tl.store(told_ptr + 4 * SHARES, passed.drawn.column.to(tl.float32, bitcast=True))
    tl.store(told_ptr + 5 * SHARES, passed.drawn.mass)
    is_last = is_last_of(split, SHARES)
    nearer = passed.nearer
    within = passed.within
    found = tl.full([], 0, tl.int32)
    best = passed.drawn.score
    drawn = passed.drawn.column
    left = passed.drawn.mass
    if is_last:
        shares = tl.arange(0, SHARES)
        all_ptr = split.told_ptr + shares
        nearer = tl.sum(tl.load(all_ptr), axis=0)
        within = tl.sum(tl.load(all_ptr + SHARES), axis=0)
        numbers = tl.load(all_ptr + 2 * SHARES).to(tl.int32, bitcast=True)
        scores = tl.load(all_ptr + 3 * SHARES)
        columns = tl.load(all_ptr + 4 * SHARES).to(tl.int32, bitcast=True)
        left = tl.sum(tl.load(all_ptr + 5 * SHARES), axis=0)
        best, drawn = better(scores, columns, float("-inf"), NO_COLUMN)
        found = tl.sum(numbers, axis=0)
        if found <= LISTED:
            PAGE: tl.constexpr = LISTED // SHARES
            starts = tl.cumsum(numbers, axis=0) - numbers
            to_ptr = pair_ptr + SHARES * PLACES + starts[:, None]
            from_ptr = pair_ptr + shares[:, None] * PLACES
            for first in range(0, tl.max(numbers, axis=0), PAGE):
                places = first + tl.arange(0, PAGE)[None, :]
                here = places < numbers[:, None]
                pairs = tl.load(from_ptr + places, mask=here, other=0)
                tl.store(to_ptr + places, pairs, mask=here)
            tl.debug_barrier()
    return Passed(nearer, within, found, Drawn(best, drawn, left)), is_last
