"""What a generation's drafts were drawn from, what tests them, and what pieces of the rows behind
them found."""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.speculative.logit_rows.rows_triton import NO_COLUMN
from mtp_plugin.speculative.ops.sampling.contract import Role
from mtp_plugin.speculative.ops.sampling.noise_kernel import stream_of, unit, words_of

ACCEPTANCE_ROLE = tl.constexpr(int(Role.ACCEPTANCE))
FOUND = tl.constexpr(5)
"""Numbers that a piece leaves: the residual's mass, its best noisy score, that one's column, and
the same two of the target."""


class Noise(NamedTuple):
    """What a generation's drafts are tested with."""

    slot: tl.tensor
    request: tl.tensor
    step: tl.tensor
    position_ptr: tl.tensor
    position_stride: tl.tensor


class Found(NamedTuple):
    """What pieces left, those of a row together."""

    ptr: tl.tensor
    num_pieces: tl.tensor
    pieces: tl.tensor  # all, and as many behind them as fill a power of two


@triton.jit
def draft_share(prob_ptr, token, told, is_drawn, inside):
    """q of a token: of a draft that was not drawn all is on it."""
    q = tl.load(prob_ptr + token, mask=inside & is_drawn, other=0.0)
    return tl.where(is_drawn, q, (token == told).to(tl.float32))


@triton.jit
def chance_of(noise, offset):
    """The uniform number that tests the draft behind ``offset`` others."""
    stream = stream_of(
        noise.slot,
        noise.request,
        offset,
        tl.full([], ACCEPTANCE_ROLE, tl.int32),
        noise.step,
        noise.position_ptr,
        noise.position_stride,
        noise.position_ptr,
        0,
        False,
    )
    return unit(words_of(tl.full([], 0, tl.int32), stream))


@triton.jit
def mass_of(found, row):
    """The mass of the residual behind a row's drafts."""
    at = found.ptr + (row.to(tl.int64) * found.num_pieces + found.pieces) * FOUND
    return tl.sum(tl.load(at, mask=found.pieces < found.num_pieces, other=0.0), axis=0)


@triton.jit
def best_of(found, row, which):
    """The column of the best score of all pieces; the lowest of equals."""
    at = found.ptr + (row.to(tl.int64) * found.num_pieces + found.pieces) * FOUND + which
    inside = found.pieces < found.num_pieces
    scores = tl.load(at, mask=inside, other=float("-inf"))
    columns = tl.load(at + 1, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    best = tl.max(scores, axis=0)
    here = (scores == best) & (scores > float("-inf"))
    return tl.min(tl.where(here, columns, NO_COLUMN), axis=0)
