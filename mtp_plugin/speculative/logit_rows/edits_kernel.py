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
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LEAST_INVERTED, MOST_INVERTED = tl.constexpr(1e-30), tl.constexpr(1e30)
"""Divisors whose inverses are numbers of full precision."""


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
def _quotient(x, divisor):
    """x / divisor, rounded as a division is, of a divisor that all values share.

    A product with the rounded inverse is off by units in the last place, and what it leaves of x
    tells by how many: see Markstein, "Computation of elementary functions on the IBM RISC
    System/6000", 1990. Values below 1e-30, whose remainders are not numbers of full precision, may
    be one unit off, and one above the largest float's 0.9999998 may become infinite.
    """
    # the interpreter rounds a product before it adds
    if INTERPRETED or divisor < LEAST_INVERTED or divisor > MOST_INVERTED:
        quotient = tl.div_rn(x, divisor)
    else:
        inverse = tl.div_rn(1.0, divisor)
        about = x * inverse
        exact = tl.fma(tl.fma(about, -divisor, x), inverse, about)
        quotient = tl.where(tl.abs(about) < float("inf"), exact, about)
    return quotient


@triton.jit
def _repeated(x, seen, edits, ARE_MANY: tl.constexpr):
    """Values of which some were ``seen``, with the row's repetition penalty."""
    if edits.repetition != 1:
        if ARE_MANY:  # noqa: SIM108 - known when it is compiled
            quotient = _quotient(x, edits.repetition)
        else:
            quotient = tl.div_rn(x, edits.repetition)
        x = tl.where(seen, tl.where(x > 0, quotient, x * edits.repetition), x)
    return x


@triton.jit
def _counted(x, count, edits):
    """Values of ids that were counted so often, with the row's presence and frequency penalties."""
    count = tl.minimum(count, MOST_COUNTED)
    if edits.presence != 0:
        x = x - tl.where(count > 0, edits.presence, 0.0)
    # chosen, not subtracted at once: a product that is rounded with the difference differs
    return x - tl.where(count > 0, edits.frequency * count.to(tl.float32), 0.0)


@triton.jit
def _counts_of(count_ptr, ids, is_read):
    """How often ids were counted; what was never seen never was: most of a row is not read."""
    return tl.load(count_ptr + ids, mask=is_read, other=0).to(tl.int32) & MOST_COUNTED


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
        x = _repeated(x, seen, edits, False)
        if (edits.presence != 0) | (edits.frequency != 0):
            count = _counts_of(edits.count_ptr, ids, in_slot != 0)
            count += (ids == edits.draft0).to(tl.int32) + (ids == edits.draft1).to(tl.int32)
            count += (ids == edits.draft2).to(tl.int32) + (ids == edits.draft3).to(tl.int32)
            draft = edits.draft4
            place = 4
            while draft >= 0:
                count += (ids == draft).to(tl.int32)
                place += 1
                draft = _draft_before(edits.draft_ptr, edits.num_before, place)
            x = _counted(x, count, edits)
        x = tl.where(x == x, x, float("-inf"))
    return x


@triton.jit
def _fours_of(words_ptr, fours, vocab):
    """The bits of ids 4f to 4f + 3 in a row of a pool, as a number of each f; 0 behind the row."""
    words = tl.load(words_ptr + (fours >> (WORD_SHIFT - 2)), mask=fours * 4 < vocab, other=0)
    return (words >> ((fours & (WORD_BITS // 4 - 1)) * 4)) & 15


@triton.jit
def _bits_of_fours(fours):
    """0 or 1 of each id [F, 4]."""
    return (fours[:, None] >> tl.arange(0, 4)[None, :]) & 1


@triton.jit
def _is_in(draft, first, SIZE: tl.constexpr):
    """Whether a draft is one of the ids from ``first`` on."""
    return (draft >= first) & (draft < first + SIZE)


@triton.jit
def _penalised(x, fours, vocab, edits, HAS_DRAFTS: tl.constexpr):
    """Penalised values [F, 4] of fours of ids; with the drafts in front of the row, or knowing that
    no id of theirs is here."""
    ids = fours[:, None] * 4 + tl.arange(0, 4)[None, :]
    in_slot = _fours_of(edits.seen_ptr, fours, vocab)
    seen = _bits_of_fours(in_slot)
    if HAS_DRAFTS:
        times = tl.zeros_like(seen)
        place = 0
        draft = edits.draft0
        while draft >= 0:
            times += (ids == draft).to(tl.int32)
            place += 1
            draft = _draft_before(edits.draft_ptr, edits.num_before, place)
        seen = seen | times
    x = _repeated(x, seen != 0, edits, True)
    if (edits.presence != 0) | (edits.frequency != 0):
        # by fours, so that a thread reads four at once
        count = _counts_of(edits.count_ptr, ids, (in_slot[:, None] != 0) & (ids < vocab))
        if HAS_DRAFTS:
            count += times
        x = _counted(x, count, edits)
    return x


@triton.jit
def edited_piece(x, ids, first, vocab, edits):
    """As `edited`, of the ids from ``first`` on, which begins a word, of whole words.

    Bits are read by fours of ids, which a thread holds. Drafts are few, so most pieces hold none.
    """
    SIZE: tl.constexpr = x.shape[0]
    fours = first // 4 + tl.arange(0, SIZE // 4)
    if (edits.bias_row >= 0) | (edits.allowed_row >= 0):
        x = _biased(x, ids, ids < vocab, edits)
        if edits.allowed_row >= 0:
            bits = _bits_of_fours(_fours_of(edits.allowed_ptr, fours, vocab))
            x = tl.where(tl.reshape(bits, [SIZE]) != 0, x, float("-inf"))
    if edits.count_row >= 0:
        has_draft = _is_in(edits.draft0, first, SIZE) | _is_in(edits.draft1, first, SIZE)
        has_draft = (
            has_draft | _is_in(edits.draft2, first, SIZE) | _is_in(edits.draft3, first, SIZE)
        )
        draft = edits.draft4
        place = 4
        while draft >= 0:
            has_draft = has_draft | _is_in(draft, first, SIZE)
            place += 1
            draft = _draft_before(edits.draft_ptr, edits.num_before, place)
        x = tl.reshape(x, [SIZE // 4, 4])
        if has_draft:
            x = _penalised(x, fours, vocab, edits, True)
        else:
            x = _penalised(x, fours, vocab, edits, False)
        x = tl.reshape(x, [SIZE])
        x = tl.where(x == x, x, float("-inf"))
    return x
