"""Rows behind their temperature and cuts, on the device."""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.speculative.logit_rows.processing_triton import Pools, edits_of
from mtp_plugin.speculative.logit_rows.rows_triton import GREEDY_BELOW, NO_COLUMN
from mtp_plugin.speculative.ops.sampling.noise_kernel import Row, options_of, values_of

NUM_CUTS = tl.constexpr(4)


class Batch(NamedTuple):
    """What all rows of a launch share."""

    logits_ptr: tl.tensor
    row_stride: tl.tensor
    vocab: tl.tensor
    vocab_ids_ptr: tl.tensor
    cut_ptr: tl.tensor
    pools: Pools


class Kept(NamedTuple):
    """A row, and what the draw left of it."""

    row: Row
    temperature: tl.tensor
    min_p: tl.tensor
    top: tl.tensor
    limit: tl.tensor
    last: tl.tensor
    mass: tl.tensor
    only: tl.tensor  # the one id that stays, -1: any may


@triton.jit
def kept_of(batch, row, slot, draft_ptr, num_before, only):
    """A row of a batch; ``draft_ptr``: the first of its request's drafts; ``only``: the id that the
    row forces, below 0: none."""
    edits = edits_of(slot, batch.pools, draft_ptr, num_before)
    options = options_of(slot, batch.vocab)
    cut = batch.cut_ptr + row * NUM_CUTS
    return Kept(
        Row(batch.logits_ptr + row * batch.row_stride, batch.vocab, batch.vocab_ids_ptr, edits),
        options.temperature,
        options.min_p,
        tl.load(cut),
        tl.load(cut + 1),
        tl.load(cut + 2).to(tl.int32),
        tl.where(only >= 0, 1.0, tl.load(cut + 3)),
        only,
    )


@triton.jit
def score_of(kept, columns, inside, HAS_IDS: tl.constexpr, HAS_EDITS: tl.constexpr):
    """Of columns the scores behind the cuts, -inf where nothing stays."""
    x = values_of(kept.row, columns, inside, HAS_IDS, HAS_EDITS)
    depth = tl.div_rn(kept.top - x, tl.maximum(kept.temperature, GREEDY_BELOW))
    # the difference of two that are not finite is no number
    depth = tl.where(kept.top == float("inf"), tl.where(x == float("inf"), 0.0, 1.0), depth)
    stays = (depth < kept.limit) | ((depth == kept.limit) & (columns <= kept.last))
    stays = stays & (tl.exp(-depth) >= kept.min_p) & inside
    score = tl.where(stays, -depth, float("-inf"))
    at_only = tl.where((columns == kept.only) & inside, 0.0, float("-inf"))
    score = tl.where(kept.only >= 0, at_only, score)
    return tl.where(kept.mass > 0, score, float("-inf"))


@triton.jit
def share_of(kept, score):
    """The probability that a score stands for."""
    weight = tl.where(score > float("-inf"), tl.exp(score), 0.0)
    return tl.where(kept.mass > 0, tl.div_rn(weight, kept.mass), 0.0)


@triton.jit
def only_of(forced_ptr, row, forced_stride, HAS_FORCED: tl.constexpr):
    """The id that a row forces, -1: none."""
    if HAS_FORCED:
        only = tl.load(forced_ptr + row * forced_stride)
        return tl.minimum(tl.maximum(only, -1), NO_COLUMN).to(tl.int32)
    else:
        return tl.full([], -1, tl.int32)
