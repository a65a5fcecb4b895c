"""Edits of logits on the device, where values are loaded: bias, allowed ids, penalties."""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.requests.columns import request_column
from mtp_plugin.speculative import step

BIAS_ROW = tl.constexpr(request_column("bias_row"))
ALLOWED_ROW = tl.constexpr(request_column("allowed_row"))
COUNT_ROW = tl.constexpr(request_column("count_row"))
REPETITION = tl.constexpr(request_column("repetition_penalty"))
PRESENCE = tl.constexpr(request_column("presence_penalty"))
FREQUENCY = tl.constexpr(request_column("frequency_penalty"))
MOST_COUNTED = tl.constexpr(step.MOST_COUNTED)
WORD_BITS = tl.constexpr(step.WORD_BITS)
WORD_SHIFT = tl.constexpr(step.WORD_BITS.bit_length() - 1)
"""An id so far to the right is the number of its word."""


class Edits(NamedTuple):
    """What is done to one row; pointers stand at the request's rows of the pools."""

    bias_row: tl.tensor  # a row below 0: nothing is done
    allowed_row: tl.tensor
    count_row: tl.tensor
    bias_ptr: tl.tensor
    allowed_ptr: tl.tensor
    count_ptr: tl.tensor
    seen_ptr: tl.tensor
    repetition: tl.tensor
    presence: tl.tensor
    frequency: tl.tensor
    draft_ptr: tl.tensor
    num_before: tl.tensor  # drafts in front of the row


@triton.jit
def num_words(vocab):
    """Words that hold a bit per id."""
    return (vocab + (WORD_BITS - 1)) // WORD_BITS


@triton.jit
def bits_of(words_ptr, ids, inside):
    """Bits of ids in a row of a pool, 0 or 1; 0 of ids that are not ``inside``."""
    words = tl.load(words_ptr + (ids >> WORD_SHIFT), mask=inside, other=0)
    return (words >> (ids & (WORD_BITS - 1))) & 1


@triton.jit
def edits_of(
    slot,
    bias_ptr,
    allowed_ptr,
    count_ptr,
    seen_ptr,
    pool_vocab,
    draft_ptr,
    num_before,
):
    """The edits of a row, of its request's slot."""
    bias_row = tl.load(slot + BIAS_ROW).to(tl.int64)
    allowed_row = tl.load(slot + ALLOWED_ROW).to(tl.int64)
    count_row = tl.load(slot + COUNT_ROW).to(tl.int64)
    words = num_words(pool_vocab)
    return Edits(
        bias_row,
        allowed_row,
        count_row,
        bias_ptr + bias_row * pool_vocab,
        allowed_ptr + allowed_row * (words + 1),
        count_ptr + count_row * pool_vocab,
        seen_ptr + count_row * words,
        tl.load(slot + REPETITION).to(tl.float32, bitcast=True),
        tl.load(slot + PRESENCE).to(tl.float32, bitcast=True),
        tl.load(slot + FREQUENCY).to(tl.float32, bitcast=True),
        draft_ptr,
        num_before,
    )


@triton.jit
def edited(x, ids, inside, edits):
    """Values of ids as the row's edits change them; float32, none of them NaN, as before."""
    if edits.bias_row >= 0:
        x += tl.load(edits.bias_ptr + ids, mask=inside, other=0.0)
        x = tl.where(x == x, x, float("-inf"))
    if edits.allowed_row >= 0:
        x = tl.where(bits_of(edits.allowed_ptr, ids, inside) != 0, x, float("-inf"))
    if edits.count_row >= 0:
        seen = bits_of(edits.seen_ptr, ids, inside)
        # what was never seen was never counted: most of the row is not read
        counted = inside & (seen != 0)
        count = tl.load(edits.count_ptr + ids, mask=counted, other=0).to(tl.int32) & MOST_COUNTED
        for place in range(0, edits.num_before):
            hit = (ids == tl.load(edits.draft_ptr + place)).to(tl.int32)
            seen = seen | hit
            count += hit
        count = tl.minimum(count, MOST_COUNTED)
        repeated = tl.where(x > 0, tl.div_rn(x, edits.repetition), x * edits.repetition)
        x = tl.where(seen != 0, repeated, x)
        x = x - tl.where(count > 0, edits.presence, 0.0)
        # chosen, not subtracted at once: a product that is rounded with the difference differs
        x = x - tl.where(count > 0, edits.frequency * count.to(tl.float32), 0.0)
        x = tl.where(x == x, x, float("-inf"))
    return x
