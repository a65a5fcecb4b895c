"""Triton kernels that take single logits out of their rows and put them back."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize
from mtp_plugin.speculative.logit_rows.bans_kernel import early_stops, leaves_some, word_ends
from mtp_plugin.speculative.logit_rows.edits_kernel import ALLOWED_ROW, num_words
from mtp_plugin.speculative.logit_rows.rows_kernel import place_of


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
    stops, hidden = early_stops(slot, position + 1 + offset, vocab, STOPS)
    kept = row * (STOPS + WORDS)
    row_ptr = logits_ptr + row * row_stride

    if HAS_POOLS:
        lanes = tl.arange(0, WORDS)
        drafts = draft_ptr + tl.maximum(request - num_contexts, 0) * draft_stride
        ends = word_ends(slot, offset, words_ptr, drafts, WORDS, LENGTH, HAS_DRAFTS)
        allowed_row = tl.load(slot + ALLOWED_ROW).to(tl.int64)
        if allowed_row >= 0:
            # of what is allowed something must be left, or the stop ids yield
            row_allowed = allowed_ptr + allowed_row * (num_words(pool_vocab) + 1)
            hidden = hidden & leaves_some(
                row_allowed, stops, hidden, ends, pool_vocab, STOPS, WORDS
            )
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
