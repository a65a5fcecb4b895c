"""Edits of logits on the device, where values are loaded: bias, allowed ids, penalties."""

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.requests.columns import request_column
from mtp_plugin.speculative import edit_pools

BIAS_ROW = tl.constexpr(request_column("bias_row"))
ALLOWED_ROW = tl.constexpr(request_column("allowed_row"))
COUNT_ROW = tl.constexpr(request_column("count_row"))
REPETITION = tl.constexpr(request_column("repetition_penalty"))
PRESENCE = tl.constexpr(request_column("presence_penalty"))
FREQUENCY = tl.constexpr(request_column("frequency_penalty"))
MOST_COUNTED = tl.constexpr(edit_pools.MOST_COUNTED)
WORD_BITS = tl.constexpr(edit_pools.WORD_BITS)
WORD_SHIFT = tl.constexpr(edit_pools.WORD_BITS.bit_length() - 1)
"""An id so far to the right is the number of its word."""
NO_ID = tl.constexpr(2147483647)
DRAFTS = tl.constexpr(16)
"""In front of a row, that are compared with a piece at once."""
MOST_INVERTED = tl.constexpr(1e30)
"""The highest divisor whose inverse is a number of full precision."""
COUNT_BASE = tl.constexpr(2.0**23)
"""A float32 whose last bit counts ones."""
MOST_SCALED = tl.constexpr(1e30)
"""The largest factor whose product with that is a number."""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Pools(NamedTuple):
    """What requests' edits need per id, a row each."""

    bias_ptr: tl.tensor
    allowed_ptr: tl.tensor
    count_ptr: tl.tensor
    seen_ptr: tl.tensor
    vocab: tl.tensor


class Edits(NamedTuple):
    """What is done to one row; pointers stand at the request's rows of the pools."""

    slot: tl.tensor
    pools: Pools
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
def _draft_of(draft_ptr, place):
    """A draft as int32, NO_ID of one that is no id."""
    draft = tl.load(draft_ptr + place)
    return tl.where((draft >= 0) & (draft < NO_ID), draft, NO_ID).to(tl.int32)


@triton.jit
def _allowed_of(row, pools):
    """Where the allowed ids of a pool's row stand."""
    return pools.allowed_ptr + row * (num_words(pools.vocab) + 1)


@triton.jit
def _seen_of(row, pools):
    """Where the ids seen of a pool's row stand."""
    return pools.seen_ptr + row * num_words(pools.vocab)


@triton.jit
def edits_of(slot, pools, draft_ptr, num_before):
    """The edits of a row, of its request's slot."""
    bias_row = tl.load(slot + BIAS_ROW).to(tl.int64)
    allowed_row = tl.load(slot + ALLOWED_ROW).to(tl.int64)
    count_row = tl.load(slot + COUNT_ROW).to(tl.int64)
    return Edits(
        slot,
        pools,
        bias_row,
        allowed_row,
        count_row,
        pools.bias_ptr + bias_row * pools.vocab,
        _allowed_of(allowed_row, pools),
        pools.count_ptr + count_row * pools.vocab,
        _seen_of(count_row, pools),
        tl.load(slot + REPETITION).to(tl.float32, bitcast=True),
        tl.load(slot + PRESENCE).to(tl.float32, bitcast=True),
        tl.load(slot + FREQUENCY).to(tl.float32, bitcast=True),
        draft_ptr,
        num_before,
    )


@triton.jit
def is_edited(slot):
    """Whether anything is done to the rows of a request."""
    row = tl.maximum(tl.load(slot + BIAS_ROW), tl.load(slot + ALLOWED_ROW))
    return tl.maximum(row, tl.load(slot + COUNT_ROW)) >= 0


@triton.jit
def only_lower(edits):
    """Whether no value of a row is higher edited than it was."""
    is_lowered = (edits.repetition >= 1) & (edits.presence >= 0) & (edits.frequency >= 0)
    return (edits.bias_row < 0) & ((edits.count_row < 0) | is_lowered)


@triton.jit
def allowed_fours(edits, ids, inside):
    """The bits of the ids from ``ids`` on, of four each, in the row of what is allowed; of those
    inside."""
    words = tl.load(edits.allowed_ptr + (ids >> WORD_SHIFT), mask=inside, other=0)
    return words >> (ids & (WORD_BITS - 1))


@triton.jit
def _biased(x, ids, inside, row, bias_ptr):
    """Values of ids with a row of bias; a row below 0: without."""
    if row >= 0:
        x += tl.load(bias_ptr + ids, mask=inside, other=0.0)
        x = tl.where(x == x, x, float("-inf"))
    return x


@triton.jit
def _repeated(x, seen, edits):
    """Values of which some were ``seen``, with the row's repetition penalty."""
    if edits.repetition != 1:
        lowered = tl.where(x > 0, tl.div_rn(x, edits.repetition), x * edits.repetition)
        x = tl.where(seen, lowered, x)
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
        x = _biased(x, ids, inside, edits.bias_row, edits.bias_ptr)
        if edits.allowed_row >= 0:
            x = tl.where(bits_of(edits.allowed_ptr, ids, inside) != 0, x, float("-inf"))
    if edits.count_row >= 0:
        in_slot = bits_of(edits.seen_ptr, ids, inside)
        times = tl.zeros_like(ids)
        for place in range(edits.num_before):
            times += (ids == _draft_of(edits.draft_ptr, place)).to(tl.int32)
        x = _repeated(x, (in_slot | times) != 0, edits)
        if (edits.presence != 0) | (edits.frequency != 0):
            x = _counted(x, _counts_of(edits.count_ptr, ids, in_slot != 0) + times, edits)
        x = tl.where(x == x, x, float("-inf"))
    return x


class PieceEdits(NamedTuple):
    """What is done to some ids in a row, asked for before their values are needed."""

    bias_row: tl.tensor  # a row below 0: nothing is done
    allowed_row: tl.tensor
    count_row: tl.tensor
    repetition: tl.tensor
    presence: tl.tensor
    frequency: tl.tensor
    allowed: tl.tensor  # bits of fours of ids, as a number of each four [F]
    seen: tl.tensor
    counts: tl.tensor  # [F, 4]


class SharedEdits(NamedTuple):
    """What is done to ids of a row wherever they stand."""

    inverse: tl.tensor  # of the repetition penalty
    is_near_draft: tl.tensor  # one of them may be a draft in front of the row


@triton.jit
def _fours_of(words_ptr, is_read, FOURS: tl.constexpr):
    """The bits of the ids 4f to 4f + 3 behind a word's first, as a number of each f; 0 of what is
    not read."""
    fours = tl.arange(0, FOURS)
    words = tl.load(words_ptr + (fours >> (WORD_SHIFT - 2)), mask=is_read, other=0)
    return (words >> ((fours & (WORD_BITS // 4 - 1)) * 4)) & 15


@triton.jit
def edits_of_piece(first, vocab, edits, SIZE: tl.constexpr):
    """What a row's edits do to the ids from ``first`` on, which begins a word, of whole words.

    Where it stands is asked anew for every piece: to remember that takes registers. Bits are read
    by fours of ids, which a thread holds.
    """
    slot, pools = edits.slot, edits.pools
    bias_row = tl.load(slot + BIAS_ROW)
    allowed_row = tl.load(slot + ALLOWED_ROW)
    count_row = tl.load(slot + COUNT_ROW)
    presence = tl.load(slot + PRESENCE).to(tl.float32, bitcast=True)
    frequency = tl.load(slot + FREQUENCY).to(tl.float32, bitcast=True)
    FOURS: tl.constexpr = SIZE // 4
    # counted from the first id, so that what each thread reads lies evenly apart
    inside = tl.arange(0, FOURS) * 4 < vocab - first
    words = first // WORD_BITS
    allowed = tl.zeros([FOURS], tl.int32)
    seen = tl.zeros([FOURS], tl.int32)
    counts = tl.zeros([FOURS, 4], tl.int16)
    if allowed_row >= 0:
        allowed_ptr = _allowed_of(allowed_row.to(tl.int64), pools) + words
        allowed = _fours_of(allowed_ptr, inside, FOURS)
    if count_row >= 0:
        seen_ptr = _seen_of(count_row.to(tl.int64), pools) + words
        seen = _fours_of(seen_ptr, inside, FOURS)
        if (presence != 0) | (frequency != 0):
            ids = tl.arange(0, FOURS)[:, None] * 4 + tl.arange(0, 4)[None, :]
            count_ptr = pools.count_ptr + count_row.to(tl.int64) * pools.vocab + first
            counts = tl.load(count_ptr + ids, mask=ids < vocab - first, other=0)
    return PieceEdits(
        bias_row,
        allowed_row,
        count_row,
        tl.load(slot + REPETITION).to(tl.float32, bitcast=True),
        presence,
        frequency,
        allowed,
        seen,
        counts,
    )


@triton.jit
def _bits_of_fours(fours):
    """Whether the bit of each id is set [F, 4]."""
    return ((fours[:, None] >> tl.arange(0, 4)[None, :]) & 1) != 0


@triton.jit
def _repeated_piece(x, seen, repetition, inverse):
    """As `_repeated`, of values [F, 4] of fours of ids, whose bits ``seen`` are.

    A quotient whose divisor all values share is the product with the rounded inverse, corrected by
    what that leaves of x: see Markstein, "Computation of elementary functions on the IBM RISC
    System/6000", 1990. With a penalty of 1 or more the lower of quotient and product counts,
    whatever sign x has. Values below 1e-30, whose remainders are not numbers of full precision, may
    be one unit off.
    """
    # the interpreter rounds a product before it adds; with a penalty below 1 a quotient may be
    # infinite
    if INTERPRETED or repetition < 1 or repetition > MOST_INVERTED:
        product = tl.fma(x, repetition, 0.0)  # not the other branch's, or both would keep it
        lowered = tl.where(x > 0, tl.div_rn(x, repetition), product)
    else:
        about = x * inverse
        quotient = tl.fma(tl.fma(about, -repetition, x), inverse, about)
        # of infinite x it is no number, and loses
        lowered = tl.minimum(quotient, x * repetition)
    # the bits are taken apart here: above the branch they would be kept for it, packed again
    return tl.where(_bits_of_fours(seen), lowered, x)


@triton.jit
def _above_base(counts):
    """COUNT_BASE and counts, which are uint16 in int16: a count is a float's last bits, so that
    nothing is converted, which a device does at an eighth of the rate of additions."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0x4B00, 0x5410; prmt.b32 $1, $2, 0x4B00, 0x5432;",
        "=&r,=&r,r",  # the first is written before the last is read again
        [counts],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _products_of(counts, frequency):
    """Products of counts and a penalty, rounded as such, in one step each.

    What is subtracted for the base is exact, so that it is rounded once.
    """
    # the interpreter rounds a product before it adds
    if INTERPRETED or tl.abs(frequency) > MOST_SCALED:
        numbers = (counts.to(tl.int32) & MOST_COUNTED).to(tl.float32)
        products = tl.fma(numbers, frequency, 0.0)
    else:
        products = tl.fma(_above_base(counts), frequency, -COUNT_BASE * frequency)
    return products


@triton.jit
def _penalised(x, piece, inverse):
    """Penalised values [F, 4] of fours of ids, as if there were no drafts."""
    if piece.repetition != 1:
        x = _repeated_piece(x, piece.seen, piece.repetition, inverse)
    if (piece.presence != 0) | (piece.frequency != 0):
        if piece.presence != 0:
            x = x - tl.where(piece.counts != 0, piece.presence, 0.0)
        x = x - _products_of(piece.counts, piece.frequency)
    return x


@triton.jit
def _has_draft(edits, first, end):
    """Whether a draft in front of a row is one of the ids from ``first`` to ``end``, or may be."""
    places = tl.arange(0, DRAFTS)
    drafts = tl.load(edits.draft_ptr + places, mask=places < edits.num_before, other=-1)
    is_here = (drafts >= first) & (drafts < end)
    return (tl.max(is_here.to(tl.int32), axis=0) > 0) | (edits.num_before > DRAFTS)


@triton.jit
def shared_edits(edits, first, end):
    """What edits of all pieces between two ids share."""
    return SharedEdits(tl.div_rn(1.0, edits.repetition), _has_draft(edits, first, end))


@triton.jit
def unknown_shared_edits():
    """Stands for that until it is asked for."""
    return SharedEdits(tl.full([], 1.0, tl.float32), tl.full([], 1, tl.int1))


@triton.jit
def _drafted(x, first, vocab, row_ptr, edits):
    """Values of the ids from ``first`` on, those of drafts in front of the row edited anew."""
    SIZE: tl.constexpr = x.shape[0]
    if _has_draft(edits, first, first + SIZE):
        again = edits_of(edits.slot, edits.pools, edits.draft_ptr, edits.num_before)
        for place in range(edits.num_before):
            draft = _draft_of(edits.draft_ptr, place)
            is_here = (draft >= first) & (draft < first + SIZE) & (draft < vocab)
            value = tl.load(row_ptr + draft, mask=is_here, other=0.0).to(tl.float32)
            value = edited(tl.where(value == value, value, float("-inf")), draft, is_here, again)
            x = tl.where(is_here & (tl.arange(0, SIZE) == draft - first), value, x)
    return x


@triton.jit
def edited_piece(x, piece, first, vocab, row_ptr, edits, shared):
    """As `edited`, of the ids from ``first`` on that `edits_of_piece` was asked for; what was NaN
    may be.

    Drafts are few, so most pieces hold none.
    """
    SIZE: tl.constexpr = x.shape[0]
    if piece.bias_row >= 0:
        places = tl.arange(0, SIZE)
        bias_ptr = edits.pools.bias_ptr + piece.bias_row.to(tl.int64) * edits.pools.vocab + first
        x = _biased(x, places, places < vocab - first, piece.bias_row, bias_ptr)
    if piece.allowed_row >= 0:
        x = tl.where(tl.reshape(_bits_of_fours(piece.allowed), [SIZE]), x, float("-inf"))
    if piece.count_row >= 0:
        x = tl.reshape(_penalised(tl.reshape(x, [SIZE // 4, 4]), piece, shared.inverse), [SIZE])
        if shared.is_near_draft:
            x = _drafted(x, first, vocab, row_ptr, edits)
    return x
