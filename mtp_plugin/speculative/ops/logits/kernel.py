"""Triton kernels that take single logits out of their rows and put them back."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize
from mtp_plugin.requests.columns import request_column
from mtp_plugin.speculative.logit_rows.edits_kernel import ALLOWED_ROW, bits_of, num_words
from mtp_plugin.speculative.logit_rows.rows_kernel import place_of

PROMPT_LEN = tl.constexpr(request_column("prompt_len"))
MIN_TOKENS = tl.constexpr(request_column("min_tokens"))
STOP_IDS = tl.constexpr(request_column("stop_ids"))
WORDS_ROW = tl.constexpr(request_column("words_row"))
RECENT = tl.constexpr(request_column("recent"))


@triton.jit
def _taken(allowed_ptr, ids, pool_vocab):
    """Whether ids are among the allowed ones, 0 or 1."""
    inside = (ids >= 0) & (ids < pool_vocab)
    return bits_of(allowed_ptr, ids, inside)


@triton.jit
def hide_kernel(
    # inputs
    logits_ptr,
    position_ptr,
    draft_ptr,
    table_ptr,
    slot_ptr,
    allowed_ptr,
    words_ptr,
    # outputs, beside the logits
    hidden_id_ptr,
    hidden_value_ptr,
    # sizes
    num_contexts,
    width,
    row_stride,
    vocab,
    pool_vocab,
    position_stride,
    draft_stride,
    table_stride,
    slot_stride,
    # constants
    STOPS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_POOLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of logits: its stop ids, if they come too early, and the ends of bad words, kept
    aside and masked."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    request, offset, slot = place_of(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride
    )
    position = tl.load(position_ptr + request * position_stride).to(tl.int64)
    columns = tl.arange(0, STOPS)
    stops = tl.load(slot + STOP_IDS + columns)
    first = tl.load(slot + PROMPT_LEN).to(tl.int64) + tl.load(slot + MIN_TOKENS)
    early = position + 1 + offset < first
    hidden = early & (stops >= 0) & (stops < vocab)
    kept = row * (STOPS + WORDS)
    row_ptr = logits_ptr + row * row_stride

    if HAS_POOLS:
        words_row = tl.load(slot + WORDS_ROW).to(tl.int64)
        allowed_row = tl.load(slot + ALLOWED_ROW).to(tl.int64)
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
                at = tl.maximum(request - num_contexts, 0) * draft_stride + from_slot - LENGTH
                drafts = tl.load(
                    draft_ptr + at, mask=(back > 0) & (from_slot >= LENGTH), other=-1
                ).to(tl.int64)
                tokens = tl.where(from_slot < LENGTH, tokens, drafts)
            fits = (parts < 0) | (back == 0)[None, :] | (parts == tokens[None, :])
            begins = tl.min(fits.to(tl.int32), axis=1) == 1
            last = tl.max(tl.where((back == 0)[None, :], parts, -1), axis=1)
            ends = tl.where(begins, last, -1)
        if allowed_row >= 0:
            # of what is allowed something must be left, or the stop ids yield
            words = num_words(pool_vocab)
            row_allowed = allowed_ptr + allowed_row * (words + 1)
            held = tl.where(hidden, stops, -1)
            again = (held[:, None] == held[None, :]) & (columns[None, :] < columns[:, None])
            again = tl.max(again.to(tl.int32), axis=1)
            again_word = tl.max((held[:, None] == ends[None, :]).to(tl.int32), axis=1)
            taken = _taken(row_allowed, held, pool_vocab) & (1 - again) & (1 - again_word)
            twice = (ends[:, None] == ends[None, :]) & (lanes[None, :] < lanes[:, None])
            twice = tl.max(twice.to(tl.int32), axis=1)
            left = tl.load(row_allowed + words) - tl.sum(taken, axis=0)
            left -= tl.sum(_taken(row_allowed, ends, pool_vocab) & (1 - twice), axis=0)
            hidden = hidden & (left > 0)
        is_end = (ends >= 0) & (ends < vocab)
        end_entries = row_ptr + tl.where(is_end, ends, 0)
        end_values = tl.load(end_entries, mask=is_end, other=0.0)
        tl.store(hidden_id_ptr + kept + STOPS + lanes, tl.where(is_end, ends, -1))
        tl.store(hidden_value_ptr + kept + STOPS + lanes, end_values)
    else:
        lanes = tl.arange(0, WORDS)
        tl.store(hidden_id_ptr + kept + STOPS + lanes, tl.full([WORDS], -1, tl.int32))
    entries = row_ptr + tl.where(hidden, stops, 0)
    values = tl.load(entries, mask=hidden, other=0.0)
    # an id may stand twice: all must be read before one is masked
    tl.debug_barrier()
    tl.store(entries, float("-inf"), mask=hidden)
    if HAS_POOLS:
        tl.store(end_entries, float("-inf"), mask=is_end)
    tl.store(hidden_id_ptr + kept + columns, tl.where(hidden, stops, -1))
    tl.store(hidden_value_ptr + kept + columns, values)


@triton.jit
def restore_kernel(
    # inputs
    hidden_id_ptr,
    hidden_value_ptr,
    # outputs
    logits_ptr,
    # sizes
    row_stride,
    # constants
    KEPT: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of logits: what was kept aside, back in its place."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    inside = columns < KEPT
    kept = row * KEPT + columns
    ids = tl.load(hidden_id_ptr + kept, mask=inside, other=-1)
    hidden = ids >= 0
    values = tl.load(hidden_value_ptr + kept, mask=hidden, other=0.0)
    tl.store(logits_ptr + row * row_stride + tl.where(hidden, ids, 0), values, mask=hidden)
