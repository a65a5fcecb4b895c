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
NO_ID = tl.constexpr(2147483647)


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
    draft0: tl.tensor  # the first of them, asked for at once; -1 where there is none
    draft1: tl.tensor
    draft2: tl.tensor
    draft3: tl.tensor
    draft4: tl.tensor


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
def _draft_before(draft_ptr, num_before, place):
    """A draft in front of a row as int32, NO_ID of one that is no id; -1 where there is none."""
    is_there = place < num_before
    draft = tl.load(draft_ptr + place, mask=is_there, other=0)
    draft = tl.where((draft >= 0) & (draft < NO_ID), draft, NO_ID).to(tl.int32)
    return tl.where(is_there, draft, -1)


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
        _draft_before(draft_ptr, num_before, 0),
        _draft_before(draft_ptr, num_before, 1),
        _draft_before(draft_ptr, num_before, 2),
        _draft_before(draft_ptr, num_before, 3),
        _draft_before(draft_ptr, num_before, 4),
    )


@triton.jit
def is_edited(slot):
    """Whether anything is done to the rows of a request."""
    row = tl.maximum(tl.load(slot + BIAS_ROW), tl.load(slot + ALLOWED_ROW))
    return tl.maximum(row, tl.load(slot + COUNT_ROW)) >= 0


@triton.jit
def _biased(x, ids, inside, edits):
    """Values of ids with the row's bias."""
    if edits.bias_row >= 0:
        x += tl.load(edits.bias_ptr + ids, mask=inside, other=0.0)
        x = tl.where(x == x, x, float("-inf"))
    return x


@triton.jit
def _repeated(x, seen, edits):
    """Values of which some were ``seen``, with the row's repetition penalty."""
    if edits.repetition != 1:
        changed = tl.where(x > 0, tl.div_rn(x, edits.repetition), x * edits.repetition)
        x = tl.where(seen, changed, x)
    return x


@triton.jit
def _counted(x, ids, in_slot, edits):
    """Values of ids, of which the slot has some, with the row's presence and frequency
    penalties."""
    # what was never seen was never counted: most of the row is not read
    count = tl.load(edits.count_ptr + ids, mask=in_slot != 0, other=0).to(tl.int32) & MOST_COUNTED
    count += (ids == edits.draft0).to(tl.int32) + (ids == edits.draft1).to(tl.int32)
    count += (ids == edits.draft2).to(tl.int32) + (ids == edits.draft3).to(tl.int32)
    draft = edits.draft4
    place = 4
    while draft >= 0:
        count += (ids == draft).to(tl.int32)
        place += 1
        draft = _draft_before(edits.draft_ptr, edits.num_before, place)
    count = tl.minimum(count, MOST_COUNTED)
    x = x - tl.where(count > 0, edits.presence, 0.0)
    # chosen, not subtracted at once: a product that is rounded with the difference differs
    return x - tl.where(count > 0, edits.frequency * count.to(tl.float32), 0.0)


@triton.jit
def edited(x, ids, inside, edits):
    """Values of ids as the row's edits change them; float32, none of them NaN, as before."""
    if (edits.bias_row >= 0) | (edits.allowed_row >= 0):
        x = _biased(x, ids, inside, edits)
        if edits.allowed_row >= 0:
            x = tl.where(bits_of(edits.allowed_ptr, ids, inside) != 0, x, float("-inf"))
    if edits.count_row >= 0:
        in_slot = bits_of(edits.seen_ptr, ids, inside)
        seen = (in_slot != 0) | (ids == edits.draft0) | (ids == edits.draft1)
        seen = seen | (ids == edits.draft2) | (ids == edits.draft3)
        draft = edits.draft4
        place = 4
        while draft >= 0:
            seen = seen | (ids == draft)
            place += 1
            draft = _draft_before(edits.draft_ptr, edits.num_before, place)
        x = _repeated(x, seen, edits)
        if (edits.presence != 0) | (edits.frequency != 0):
            x = _counted(x, ids, in_slot, edits)
        x = tl.where(x == x, x, float("-inf"))
    return x


@triton.jit
def _bits_of_words(words, SIZE: tl.constexpr):
    """The bits of words, in their order [SIZE]."""
    return tl.reshape((words[:, None] >> tl.arange(0, WORD_BITS)[None, :]) & 1, [SIZE])


@triton.jit
def _bit_in(draft, starts):
    """The bit of a draft in the words that begin with these ids."""
    return tl.where(starts == (draft & -WORD_BITS), 1 << (draft & (WORD_BITS - 1)), 0)


@triton.jit
def edited_piece(x, ids, first, vocab, edits):
    """As `edited`, of the ids from ``first`` on, which begins a word, of whole words: each is read
    once."""
    SIZE: tl.constexpr = x.shape[0]
    starts = first + tl.arange(0, SIZE // WORD_BITS) * WORD_BITS
    if (edits.bias_row >= 0) | (edits.allowed_row >= 0):
        x = _biased(x, ids, ids < vocab, edits)
        if edits.allowed_row >= 0:
            words_ptr = edits.allowed_ptr + (starts >> WORD_SHIFT)
            words = tl.load(words_ptr, mask=starts < vocab, other=0)
            x = tl.where(_bits_of_words(words, SIZE) != 0, x, float("-inf"))
    if edits.count_row >= 0:
        words_ptr = edits.seen_ptr + (starts >> WORD_SHIFT)
        in_slot = tl.load(words_ptr, mask=starts < vocab, other=0)
        words = in_slot | _bit_in(edits.draft0, starts) | _bit_in(edits.draft1, starts)
        words = words | _bit_in(edits.draft2, starts) | _bit_in(edits.draft3, starts)
        draft = edits.draft4
        place = 4
        while draft >= 0:
            words = words | _bit_in(draft, starts)
            place += 1
            draft = _draft_before(edits.draft_ptr, edits.num_before, place)
        x = _repeated(x, _bits_of_words(words, SIZE) != 0, edits)
        if (edits.presence != 0) | (edits.frequency != 0):
            x = _counted(x, ids, _bits_of_words(in_slot, SIZE), edits)
        x = tl.where(x == x, x, float("-inf"))
    return x
