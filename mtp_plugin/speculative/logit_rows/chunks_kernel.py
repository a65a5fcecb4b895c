"""Rows of logits by chunks, as `row_sums.ChunkLayout` has them, on the device."""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


class Picked(NamedTuple):
    """Some of a row's chunks."""

    ptr: tl.tensor  # their numbers
    number: tl.tensor  # how many they are


@triton.jit
def piece_of(row_ptr, piece, vocab, PIECE: tl.constexpr):
    """The values of a piece of a row, float32; -inf behind the row."""
    first = piece * PIECE
    places = tl.arange(0, PIECE)
    if first + PIECE <= vocab:
        x = tl.load(row_ptr + first + places)
    else:
        x = tl.load(row_ptr + first + places, mask=places < vocab - first, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def number_of(x):
    """-inf for what is no number."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def number_or_zero(x):
    """0 for -inf: where all values are -inf no difference to the highest is a number."""
    return tl.where(x > float("-inf"), x, 0.0)


@triton.jit
def thread_tops(held):
    """The highest value of each thread, of what threads hold [..., threads, each]; NaN as -inf."""
    # what is no number loses against every other, so that few are looked at
    return number_of(tl.max(tl.max(held, axis=0), axis=1))


@triton.jit
def masses_of(held, thread_top, below, scale):
    """The weights of each chunk, as multiples of its highest value's; 0 for NaN.

    Of what threads hold [..., threads, each], and how far below the chunk's highest value theirs
    lie, in log2 [chunks, threads of a chunk].
    """
    base = number_or_zero(thread_top)
    weights = tl.exp2((held - base[None, :, None]) * scale)
    weights = tl.where(held == held, weights, 0.0)
    mass = tl.sum(tl.sum(weights, axis=0), axis=1)
    return tl.sum(tl.reshape(mass, below.shape) * tl.exp2(below), axis=1)


@triton.jit
def row_mass_of(masses, tops, top, scale):
    """The weights of a row, as multiples of its highest value's, of what its chunks have."""
    weights = tl.exp2((tops - top) * scale)
    return tl.sum(tl.where(tops > float("-inf"), masses * weights, 0.0), axis=0)


@triton.jit
def starts_of(chunks, LAYOUT: tl.constexpr):
    """The first column of each chunk."""
    # without a sign a division is a shift
    pieces = (chunks.to(tl.uint32) // LAYOUT.chunks).to(tl.int32)
    return pieces * (LAYOUT.piece - LAYOUT.chunks * LAYOUT.segment) + chunks * LAYOUT.segment


@triton.jit
def spread_of(places, LAYOUT: tl.constexpr):
    """How far behind a chunk's first column its places are."""
    wraps = places // LAYOUT.segment
    return wraps * (LAYOUT.threads * LAYOUT.each) + places % LAYOUT.segment


@triton.jit
def columns_of(picked, first, places, TILE: tl.constexpr, LAYOUT: tl.constexpr):
    """Columns of places in ``TILE`` picked chunks [TILE, places], and which of the chunks are."""
    at = first + tl.arange(0, TILE)
    chunks = tl.load(picked.ptr + at, mask=at < picked.number, other=0)
    starts = starts_of(chunks, LAYOUT)
    return starts[:, None] + spread_of(places, LAYOUT)[None, :], at < picked.number


@triton.jit
def picked_of(here, picked_ptr):
    """Write which of all chunks are ``here``, in their order: `Picked`.

    By fours of neighbours, which a thread holds.
    """
    FOURS: tl.constexpr = here.shape[0] // 4
    here02, here13 = tl.split(tl.reshape(here.to(tl.int32), [FOURS, 2, 2]))
    here0, here2 = tl.split(here02)
    here1, here3 = tl.split(here13)
    number = here0 + here1 + here2 + here3
    place = tl.cumsum(number, axis=0) - number
    chunks = tl.arange(0, FOURS) * 4
    tl.store(picked_ptr + place, chunks, mask=here0 != 0)
    place += here0
    tl.store(picked_ptr + place, chunks + 1, mask=here1 != 0)
    place += here1
    tl.store(picked_ptr + place, chunks + 2, mask=here2 != 0)
    place += here2
    tl.store(picked_ptr + place, chunks + 3, mask=here3 != 0)
    return Picked(picked_ptr, tl.sum(number, axis=0))
