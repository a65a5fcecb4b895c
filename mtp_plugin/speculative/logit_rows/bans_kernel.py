"""Ids that must not come next, on the device."""

import triton
import triton.language as tl

from mtp_plugin.requests.columns import request_column
from mtp_plugin.speculative.logit_rows.edits_kernel import (
    ALLOWED_ROW,
    WORD_BITS,
    WORD_SHIFT,
    bits_of,
    num_words,
)

PROMPT_LEN = tl.constexpr(request_column("prompt_len"))
MIN_TOKENS = tl.constexpr(request_column("min_tokens"))
STOP_IDS = tl.constexpr(request_column("stop_ids"))
WORDS_ROW = tl.constexpr(request_column("words_row"))
RECENT = tl.constexpr(request_column("recent"))


@triton.jit
def early_stops(slot, index, vocab, STOPS: tl.constexpr):
    """The stop ids of a request [STOPS], and whether each must not be token ``index`` yet."""
    stops = tl.load(slot + STOP_IDS + tl.arange(0, STOPS))
    first = tl.load(slot + PROMPT_LEN).to(tl.int64) + tl.load(slot + MIN_TOKENS)
    return stops, (index < first) & (stops >= 0) & (stops < vocab)


@triton.jit
def word_ends(
    slot,
    offset,
    words_ptr,
    draft_ptr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
):
    """The last tokens of bad words that would be completed behind the slot's tokens and ``offset``
    drafts of the request [WORDS], -1 where there is none."""
    words_row = tl.load(slot + WORDS_ROW).to(tl.int64)
    lanes = tl.arange(0, WORDS)
    ends = tl.full([WORDS], -1, tl.int32)
    if words_row >= 0:
        places = tl.arange(0, LENGTH)
        word_ptr = words_ptr + words_row * (WORDS * LENGTH)
        parts = tl.load(word_ptr + lanes[:, None] * LENGTH + places[None, :])
        # in front of a word's last token stand the slot's last tokens, then drafts
        back = LENGTH - 1 - places
        from_slot = LENGTH + offset - back
        tokens = tl.load(
            slot + RECENT + from_slot,
            mask=(back > 0) & (from_slot < LENGTH),
            other=-1,
        ).to(tl.int64)
        if HAS_DRAFTS:
            at = from_slot - LENGTH
            drafts = tl.load(draft_ptr + at, mask=(back > 0) & (from_slot >= LENGTH), other=-1).to(
                tl.int64
            )
            tokens = tl.where(from_slot < LENGTH, tokens, drafts)
        fits = (parts < 0) | (back == 0)[None, :] | (parts == tokens[None, :])
        begins = tl.min(fits.to(tl.int32), axis=1) == 1
        last = tl.max(tl.where((back == 0)[None, :], parts, -1), axis=1)
        ends = tl.where(begins, last, -1)
    return ends


@triton.jit
def _taken(row_allowed, ids, pool_vocab):
    """Whether ids are among the allowed ones, 0 or 1."""
    inside = (ids >= 0) & (ids < pool_vocab)
    return bits_of(row_allowed, ids, inside)


@triton.jit
def leaves_some(
    row_allowed, stops, hidden, ends, pool_vocab, STOPS: tl.constexpr, WORDS: tl.constexpr
):
    """Whether an id of a row of allowed ones is left without ``hidden`` stops and ends of words."""
    columns = tl.arange(0, STOPS)
    lanes = tl.arange(0, WORDS)
    held = tl.where(hidden, stops, -1)
    again = (held[:, None] == held[None, :]) & (columns[None, :] < columns[:, None])
    again = tl.max(again.to(tl.int32), axis=1)
    again_word = tl.max((held[:, None] == ends[None, :]).to(tl.int32), axis=1)
    taken = _taken(row_allowed, held, pool_vocab) & (1 - again) & (1 - again_word)
    twice = (ends[:, None] == ends[None, :]) & (lanes[None, :] < lanes[:, None])
    twice = tl.max(twice.to(tl.int32), axis=1)
    left = tl.load(row_allowed + num_words(pool_vocab)) - tl.sum(taken, axis=0)
    left -= tl.sum(_taken(row_allowed, ends, pool_vocab) & (1 - twice), axis=0)
    return left > 0


@triton.jit
def _take_out(row_allowed, ids):
    """Clear the bits of ids, -1 for none; the ids whose bits were set, each once."""
    is_id = ids >= 0
    known = tl.where(is_id, ids, 0)
    bit = 1 << (known & (WORD_BITS - 1))
    old = tl.atomic_and(row_allowed + (known >> WORD_SHIFT), ~bit, mask=is_id)
    return tl.where(is_id & ((old & bit) != 0), ids, -1)


@triton.jit
def _put_back(row_allowed, ids):
    """Set the bits of ids, -1 for none."""
    is_id = ids >= 0
    known = tl.where(is_id, ids, 0)
    bit = 1 << (known & (WORD_BITS - 1))
    tl.atomic_or(row_allowed + (known >> WORD_SHIFT), bit, mask=is_id)


@triton.jit
def ban_next(
    slot,
    index,
    offset,
    allowed_ptr,
    hidden_ptr,
    words_ptr,
    draft_ptr,
    pool_vocab,
    STOPS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
):
    """Let the draft of a request that is token ``index``, behind ``offset`` others, be no id that
    must not come there; what was banned before it no longer is.

    What stands in front of it may have been written by this program: its threads have met since.
    """
    allowed_row = tl.load(slot + ALLOWED_ROW).to(tl.int64)
    if allowed_row >= 0:
        row_allowed = allowed_ptr + allowed_row * (num_words(pool_vocab) + 1)
        columns = tl.arange(0, STOPS)
        lanes = tl.arange(0, WORDS)
        row_hidden = hidden_ptr + allowed_row * (STOPS + WORDS)
        _put_back(row_allowed, tl.load(row_hidden + columns))
        _put_back(row_allowed, tl.load(row_hidden + STOPS + lanes))
        tl.debug_barrier()
        stops, hidden = early_stops(slot, index, pool_vocab, STOPS)
        ends = word_ends(slot, offset, words_ptr, draft_ptr, WORDS, LENGTH, HAS_DRAFTS)
        hidden = hidden & leaves_some(row_allowed, stops, hidden, ends, pool_vocab, STOPS, WORDS)
        tl.debug_barrier()
        ends = tl.where(ends < pool_vocab, ends, -1)
        tl.store(row_hidden + columns, _take_out(row_allowed, tl.where(hidden, stops, -1)))
        tl.store(row_hidden + STOPS + lanes, _take_out(row_allowed, ends))
