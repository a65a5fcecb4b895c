"""Logits processing on the device: bias, allowed ids, penalties and disallowed next tokens.

Values are processed where they are loaded, so no kernel writes processed logits to memory. No
launch of its own; a kernel that loads logits calls:

1. `load_processing`: options of the request, and its rows of the pools.
2. `process_values`, for any ids: apply the options that read the value alone; add the bias; set ids
   that are not allowed to -inf; apply the repetition penalty, then presence and frequency
   penalties. Drafts before the row count as output.

A scan of whole blocks does the same with fewer instructions:

1. `load_block_processing`: four neighbouring ids share a load of their bits.
   `load_shared_processing`: the inverse of the repetition penalty, and whether a draft is near.
2. `process_block`: the steps above, without drafts.
3. `_process_drafts`: process the ids of the few drafts in the block again, with these counted.

For the next token of a request, `early_stops`, `word_ends` and `leaves_some` find the ids that are
disallowed, and `update_draft_mask` keeps them cleared in the draft's copy of the allowed ids.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from typing import NamedTuple

import triton
import triton.language as tl

from mtp_plugin.ops import logits_processor_state
from mtp_plugin.requests.columns import LOGIT_CHANGE, request_column

CHANGE = tl.constexpr(request_column(LOGIT_CHANGE))
BIAS_ROW = tl.constexpr(request_column("bias_row"))
ALLOWED_ROW = tl.constexpr(request_column("allowed_row"))
COUNT_ROW = tl.constexpr(request_column("count_row"))
REPETITION = tl.constexpr(request_column("repetition_penalty"))
PRESENCE = tl.constexpr(request_column("presence_penalty"))
FREQUENCY = tl.constexpr(request_column("frequency_penalty"))
PROMPT_LEN = tl.constexpr(request_column("prompt_len"))
MIN_TOKENS = tl.constexpr(request_column("min_tokens"))
STOP_IDS = tl.constexpr(request_column("stop_ids"))
WORDS_ROW = tl.constexpr(request_column("words_row"))
RECENT = tl.constexpr(request_column("recent"))
MOST_COUNTED = tl.constexpr(logits_processor_state.MOST_COUNTED)
WORD_BITS = tl.constexpr(logits_processor_state.WORD_BITS)
WORD_SHIFT = tl.constexpr(logits_processor_state.WORD_BITS.bit_length() - 1)
"""``id >> WORD_SHIFT`` is the word that holds the bit of an id."""
NO_ID = tl.constexpr(2147483647)
DRAFT_TILE = tl.constexpr(16)
"""Draft tokens before a row that are compared with a block at once."""
MAX_INVERTED = tl.constexpr(1e30)
"""The largest divisor whose inverse is a normal number."""
COUNT_BASE = tl.constexpr(2.0**23)
"""A float32 whose last bit has the value 1."""
MAX_SCALED = tl.constexpr(1e30)
"""The largest factor whose product with COUNT_BASE is finite."""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Pools(NamedTuple):
    """Pointers to the pools of per-token state, one row per request."""

    bias_ptr: tl.tensor  # [P, vocab] float32
    allowed_ptr: tl.tensor  # [P, num_words(vocab) + 1] int32: a bit per id, then their number
    count_ptr: tl.tensor  # [P, vocab] int16, unsigned: token counts of the output
    seen_ptr: tl.tensor  # [P, num_words(vocab)] int32: a bit per id of prompt and output
    vocab: tl.tensor


class RowProcessing(NamedTuple):
    """Logits processing of one row; pointers are those of the request's rows of the pools."""

    slot_row_ptr: tl.tensor  # [W] int32
    pools: Pools
    bias_row: tl.tensor  # below 0: not used
    allowed_row: tl.tensor
    count_row: tl.tensor
    bias_ptr: tl.tensor  # [vocab] float32
    allowed_ptr: tl.tensor  # [num_words(vocab) + 1] int32
    count_ptr: tl.tensor  # [vocab] int16
    seen_ptr: tl.tensor  # [num_words(vocab)] int32
    repetition: tl.tensor
    presence: tl.tensor
    frequency: tl.tensor
    draft_ptr: tl.tensor  # [>= num_before] integer: drafts of the request
    num_before: tl.tensor  # draft tokens before the row


@triton.jit
def num_words(vocab):
    """Number of words that hold a bit per id."""
    return (vocab + (WORD_BITS - 1)) // WORD_BITS


@triton.jit
def bits_of(words_ptr, ids, inside):
    """Bits of ids in a row of a pool, 0 or 1; 0 for ids that are not ``inside``."""
    words = tl.load(words_ptr + (ids >> WORD_SHIFT), mask=inside, other=0)
    return (words >> (ids & (WORD_BITS - 1))) & 1


@triton.jit
def _load_draft(draft_ptr, index):
    """A draft token as int32; NO_ID for one that is no valid id."""
    draft = tl.load(draft_ptr + index).to(tl.int64)  # a narrow type does not hold NO_ID
    return tl.where((draft >= 0) & (draft < NO_ID), draft, NO_ID).to(tl.int32)


@triton.jit
def _allowed_row_ptr(row, pools):
    """Pointer to the allowed ids of a row of the pool."""
    return pools.allowed_ptr + row * (num_words(pools.vocab) + 1)


@triton.jit
def _seen_row_ptr(row, pools):
    """Pointer to the seen ids of a row of the pool."""
    return pools.seen_ptr + row * num_words(pools.vocab)


@triton.jit
def load_processing(slot_row_ptr, pools, draft_ptr, num_before):
    """Load the logits processing of a row from its request's slot."""
    bias_row = tl.load(slot_row_ptr + BIAS_ROW).to(tl.int64)
    allowed_row = tl.load(slot_row_ptr + ALLOWED_ROW).to(tl.int64)
    count_row = tl.load(slot_row_ptr + COUNT_ROW).to(tl.int64)
    return RowProcessing(
        slot_row_ptr,
        pools,
        bias_row,
        allowed_row,
        count_row,
        pools.bias_ptr + bias_row * pools.vocab,
        _allowed_row_ptr(allowed_row, pools),
        pools.count_ptr + count_row * pools.vocab,
        _seen_row_ptr(count_row, pools),
        tl.load(slot_row_ptr + REPETITION).to(tl.float32, bitcast=True),
        tl.load(slot_row_ptr + PRESENCE).to(tl.float32, bitcast=True),
        tl.load(slot_row_ptr + FREQUENCY).to(tl.float32, bitcast=True),
        draft_ptr,
        num_before,
    )


@triton.jit
def is_processed(slot_row_ptr):
    """Whether the logits of a request are changed at all."""
    return tl.load(slot_row_ptr + CHANGE) != 0


@triton.jit
def _add_bias(x, ids, inside, row, bias_ptr):
    """Add a row of bias; a row below 0 adds none."""
    if row >= 0:
        x += tl.load(bias_ptr + ids, mask=inside, other=0.0)
        x = tl.where(x == x, x, float("-inf"))
    return x


@triton.jit
def _apply_repetition(x, seen, processing):
    """Apply the repetition penalty to the values that were ``seen``."""
    if processing.repetition != 1:
        lowered = tl.where(x > 0, tl.div_rn(x, processing.repetition), x * processing.repetition)
        x = tl.where(seen, lowered, x)
    return x


@triton.jit
def _apply_counts(x, count, processing):
    """Apply the presence and frequency penalties to values with these counts."""
    count = tl.minimum(count, MOST_COUNTED)
    if processing.presence != 0:
        x = x - tl.where(count > 0, processing.presence, 0.0)
    # the select keeps the product apart: fused with the subtraction it would round differently
    return x - tl.where(count > 0, processing.frequency * count.to(tl.float32), 0.0)


@triton.jit
def _load_counts(count_ptr, ids, is_read):
    """Counts of ids; only those that were seen are read, as most of a row was not."""
    return tl.load(count_ptr + ids, mask=is_read, other=0).to(tl.int32) & MOST_COUNTED


@triton.jit
def _count_drafts(ids, processing):
    """How often ids are among the draft tokens before the row."""
    times = tl.zeros_like(ids)
    for draft_index in range(processing.num_before):
        times += (ids == _load_draft(processing.draft_ptr, draft_index)).to(tl.int32)
    return times


@triton.jit
def penalize_in_place(row_ptr, ids, inside, processing):
    """Penalize the logits of ids of a row with counts, in memory: presence and frequency penalties
    before the repetition penalty. Only ids that were seen or drafted are read and written."""
    in_slot = bits_of(processing.seen_ptr, ids, inside)
    times = _count_drafts(ids, processing)
    seen = ((in_slot | times) != 0) & inside
    x = tl.load(row_ptr + ids, mask=seen, other=0.0)
    if (processing.presence != 0) | (processing.frequency != 0):
        counts = _load_counts(processing.count_ptr, ids, in_slot != 0) + times
        x = _apply_counts(x, counts, processing)
    x = _apply_repetition(x, seen, processing)
    x = tl.where(x == x, x, float("-inf"))
    tl.store(row_ptr + ids, x, mask=seen)


@triton.jit
def _apply_value_options(x, slot_row_ptr):  # noqa: ARG001 - options will
    """Apply the options that read the value alone, of any shape; there is none at present.

    A NaN of ``x`` must stay NaN or become -inf, as it does with comparisons and sums.
    """
    return x


@triton.jit
def process_values(x, ids, inside, processing):
    """Process values of ids; float32 without NaN, before and after."""
    x = _apply_value_options(x, processing.slot_row_ptr)
    if (processing.bias_row >= 0) | (processing.allowed_row >= 0):
        x = _add_bias(x, ids, inside, processing.bias_row, processing.bias_ptr)
        if processing.allowed_row >= 0:
            x = tl.where(bits_of(processing.allowed_ptr, ids, inside) != 0, x, float("-inf"))
    if processing.count_row >= 0:
        in_slot = bits_of(processing.seen_ptr, ids, inside)
        times = _count_drafts(ids, processing)
        x = _apply_repetition(x, (in_slot | times) != 0, processing)
        if (processing.presence != 0) | (processing.frequency != 0):
            x = _apply_counts(
                x, _load_counts(processing.count_ptr, ids, in_slot != 0) + times, processing
            )
        x = tl.where(x == x, x, float("-inf"))
    return x


class BlockProcessing(NamedTuple):
    """Processing of a block of a row, loaded before the values are needed."""

    bias_row: tl.tensor  # below 0: not used
    allowed_row: tl.tensor
    count_row: tl.tensor
    repetition: tl.tensor
    presence: tl.tensor
    frequency: tl.tensor
    allowed: tl.tensor  # [GROUPS] four bits per group of four ids
    seen: tl.tensor  # [GROUPS]
    counts: tl.tensor  # [GROUPS, 4]


class SharedProcessing(NamedTuple):
    """Processing that all blocks of a row share."""

    inverse: tl.tensor  # of the repetition penalty
    is_near_draft: tl.tensor  # a draft token before the row may be in one of the blocks


@triton.jit
def _load_nibbles(words_ptr, is_read, GROUPS: tl.constexpr):
    """Four bits per group f of ids 4f to 4f + 3, counted from a word's first id; 0 if not read."""
    groups = tl.arange(0, GROUPS)
    words = tl.load(words_ptr + (groups >> (WORD_SHIFT - 2)), mask=is_read, other=0)
    return (words >> ((groups & (WORD_BITS // 4 - 1)) * 4)) & 15


@triton.jit
def load_block_processing(first, vocab, processing, SIZE: tl.constexpr):
    """Load the processing of the ``SIZE`` ids from ``first`` on; both are multiples of a word.

    The rows of the pools are loaded again for every block, since keeping them takes registers. A
    thread reads the bits of four neighbouring ids.
    """
    slot_row_ptr, pools = processing.slot_row_ptr, processing.pools
    bias_row = tl.load(slot_row_ptr + BIAS_ROW)
    allowed_row = tl.load(slot_row_ptr + ALLOWED_ROW)
    count_row = tl.load(slot_row_ptr + COUNT_ROW)
    presence = tl.load(slot_row_ptr + PRESENCE).to(tl.float32, bitcast=True)
    frequency = tl.load(slot_row_ptr + FREQUENCY).to(tl.float32, bitcast=True)
    GROUPS: tl.constexpr = SIZE // 4
    # relative to the first id, so that the accesses of threads have an even stride
    inside = tl.arange(0, GROUPS) * 4 < vocab - first
    words = first // WORD_BITS
    allowed = tl.zeros([GROUPS], tl.int32)
    seen = tl.zeros([GROUPS], tl.int32)
    counts = tl.zeros([GROUPS, 4], tl.int16)
    if allowed_row >= 0:
        allowed_ptr = _allowed_row_ptr(allowed_row.to(tl.int64), pools) + words
        allowed = _load_nibbles(allowed_ptr, inside, GROUPS)
    if count_row >= 0:
        seen_ptr = _seen_row_ptr(count_row.to(tl.int64), pools) + words
        seen = _load_nibbles(seen_ptr, inside, GROUPS)
        if (presence != 0) | (frequency != 0):
            ids = tl.arange(0, GROUPS)[:, None] * 4 + tl.arange(0, 4)[None, :]
            count_ptr = pools.count_ptr + count_row.to(tl.int64) * pools.vocab + first
            counts = tl.load(count_ptr + ids, mask=ids < vocab - first, other=0)
    return BlockProcessing(
        bias_row,
        allowed_row,
        count_row,
        tl.load(slot_row_ptr + REPETITION).to(tl.float32, bitcast=True),
        presence,
        frequency,
        allowed,
        seen,
        counts,
    )


@triton.jit
def _unpack_nibbles(groups):
    """Whether the bit of each id is set [GROUPS, 4]."""
    return ((groups[:, None] >> tl.arange(0, 4)[None, :]) & 1) != 0


@triton.jit
def _apply_repetition_block(x, seen, repetition, inverse):
    """`_apply_repetition` for values [GROUPS, 4], with ``seen`` as four bits per group.

    All values share the divisor, so the quotient is the product with its rounded inverse, corrected
    by the remainder: see Markstein, "Computation of elementary functions on the IBM RISC
    System/6000", 1990. With a penalty of 1 or more, the smaller of quotient and product is the
    result for either sign of x. Values below 1e-30 have denormal remainders and may be one unit in
    the last place off.
    """
    # the interpreter has no fused multiply-add; with a penalty below 1 a quotient may be infinite
    if INTERPRETED or repetition < 1 or repetition > MAX_INVERTED:
        product = tl.fma(x, repetition, 0.0)  # apart from the other branch's, or both keep it
        lowered = tl.where(x > 0, tl.div_rn(x, repetition), product)
    else:
        estimate = x * inverse
        quotient = tl.fma(tl.fma(estimate, -repetition, x), inverse, estimate)
        # the quotient of an infinite x is NaN, which minimum drops
        lowered = tl.minimum(quotient, x * repetition)
    # unpacked here: before the branch the bits would be packed again to keep them
    return tl.where(_unpack_nibbles(seen), lowered, x)


@triton.jit
def _counts_plus_base(counts):
    """COUNT_BASE plus counts (uint16 in int16) as float32.

    The count is the mantissa's last bits, so no conversion is needed, which runs at an eighth of
    the rate of additions.
    """
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0x4B00, 0x5410; prmt.b32 $1, $2, 0x4B00, 0x5432;",
        "=&r,=&r,r",  # early clobber: $0 is written before $2 is read again
        [counts],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _count_products(counts, frequency):
    """Products of counts and a penalty, rounded once.

    The product with the base is exact, so one fused multiply-add gives the rounded product.
    """
    # the interpreter has no fused multiply-add
    if INTERPRETED or tl.abs(frequency) > MAX_SCALED:
        values = (counts.to(tl.int32) & MOST_COUNTED).to(tl.float32)
        products = tl.fma(values, frequency, 0.0)
    else:
        products = tl.fma(_counts_plus_base(counts), frequency, -COUNT_BASE * frequency)
    return products


@triton.jit
def _apply_penalties(x, block, inverse):
    """Apply penalties to values [GROUPS, 4], without the draft tokens before the row."""
    if block.repetition != 1:
        x = _apply_repetition_block(x, block.seen, block.repetition, inverse)
    if (block.presence != 0) | (block.frequency != 0):
        if block.presence != 0:
            x = x - tl.where(block.counts != 0, block.presence, 0.0)
        x = x - _count_products(block.counts, block.frequency)
    return x


@triton.jit
def _has_draft(processing, first, end):
    """Whether a draft token before the row is, or may be, one of the ids ``first`` to ``end``."""
    offsets = tl.arange(0, DRAFT_TILE)
    drafts = tl.load(processing.draft_ptr + offsets, mask=offsets < processing.num_before, other=-1)
    in_block = (drafts >= first) & (drafts < end)
    return (tl.max(in_block.to(tl.int32), axis=0) > 0) | (processing.num_before > DRAFT_TILE)


@triton.jit
def load_shared_processing(processing, first, end):
    """Load what all blocks between two ids share."""
    return SharedProcessing(
        tl.div_rn(1.0, processing.repetition), _has_draft(processing, first, end)
    )


@triton.jit
def neutral_shared_processing():
    """A neutral value until `load_shared_processing` is loaded."""
    return SharedProcessing(tl.full([], 1.0, tl.float32), tl.full([], 1, tl.int1))


@triton.jit
def _process_drafts(x, first, vocab, row_ptr, processing):
    """Process the ids of draft tokens before the row again, with these drafts counted."""
    SIZE: tl.constexpr = x.shape[0]
    if _has_draft(processing, first, first + SIZE):
        row_processing = load_processing(
            processing.slot_row_ptr, processing.pools, processing.draft_ptr, processing.num_before
        )
        for draft_index in range(processing.num_before):
            draft = _load_draft(processing.draft_ptr, draft_index)
            in_block = (draft >= first) & (draft < first + SIZE) & (draft < vocab)
            value = tl.load(row_ptr + draft, mask=in_block, other=0.0).to(tl.float32)
            value = process_values(
                tl.where(value == value, value, float("-inf")), draft, in_block, row_processing
            )
            x = tl.where(in_block & (tl.arange(0, SIZE) == draft - first), value, x)
    return x


@triton.jit
def process_block(x, block, first, vocab, row_ptr, processing, shared):
    """`process_values` for a block whose processing `load_block_processing` loaded; NaN may remain.

    Draft tokens are few, so most blocks hold none.
    """
    SIZE: tl.constexpr = x.shape[0]
    x = _apply_value_options(x, processing.slot_row_ptr)
    if block.bias_row >= 0:
        offsets = tl.arange(0, SIZE)
        bias_ptr = (
            processing.pools.bias_ptr + block.bias_row.to(tl.int64) * processing.pools.vocab + first
        )
        x = _add_bias(x, offsets, offsets < vocab - first, block.bias_row, bias_ptr)
    if block.allowed_row >= 0:
        x = tl.where(tl.reshape(_unpack_nibbles(block.allowed), [SIZE]), x, float("-inf"))
    if block.count_row >= 0:
        x = tl.reshape(
            _apply_penalties(tl.reshape(x, [SIZE // 4, 4]), block, shared.inverse), [SIZE]
        )
        if shared.is_near_draft:
            x = _process_drafts(x, first, vocab, row_ptr, processing)
    return x


@triton.jit
def early_stops(slot_row_ptr, index, vocab, STOPS: tl.constexpr):
    """The stop ids of a request [STOPS], and which ones ``min_tokens`` disallows at ``index``."""
    stops = tl.load(slot_row_ptr + STOP_IDS + tl.arange(0, STOPS))
    first = tl.load(slot_row_ptr + PROMPT_LEN).to(tl.int64) + tl.load(slot_row_ptr + MIN_TOKENS)
    return stops, (index < first) & (stops >= 0) & (stops < vocab)


@triton.jit
def word_ends(
    slot_row_ptr,
    offset,
    words_ptr,
    draft_ptr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
):
    """The ids [WORDS] that would complete a bad word after the slot's recent tokens and ``offset``
    draft tokens; -1: none."""
    words_row = tl.load(slot_row_ptr + WORDS_ROW).to(tl.int64)
    word_lanes = tl.arange(0, WORDS)
    ends = tl.full([WORDS], -1, tl.int32)
    if words_row >= 0:
        offsets = tl.arange(0, LENGTH)
        word_ptr = words_ptr + words_row * (WORDS * LENGTH)
        word_tokens = tl.load(word_ptr + word_lanes[:, None] * LENGTH + offsets[None, :])
        # a word's last token follows the slot's recent tokens, then draft tokens
        back = LENGTH - 1 - offsets
        from_slot = LENGTH + offset - back
        tokens = tl.load(
            slot_row_ptr + RECENT + from_slot,
            mask=(back > 0) & (from_slot < LENGTH),
            other=-1,
        ).to(tl.int64)
        if HAS_DRAFTS:
            draft_index = from_slot - LENGTH
            drafts = tl.load(
                draft_ptr + draft_index, mask=(back > 0) & (from_slot >= LENGTH), other=-1
            ).to(tl.int64)
            tokens = tl.where(from_slot < LENGTH, tokens, drafts)
        matches = (word_tokens < 0) | (back == 0)[None, :] | (word_tokens == tokens[None, :])
        begins = tl.min(matches.to(tl.int32), axis=1) == 1
        last = tl.max(tl.where((back == 0)[None, :], word_tokens, -1), axis=1)
        ends = tl.where(begins, last, -1)
    return ends


@triton.jit
def _allowed_bits(allowed_row_ptr, ids, pool_vocab):
    """Whether ids are allowed, 0 or 1."""
    inside = (ids >= 0) & (ids < pool_vocab)
    return bits_of(allowed_row_ptr, ids, inside)


@triton.jit
def leaves_some(
    allowed_row_ptr,
    stops,
    is_disallowed,
    ends,
    pool_vocab,
    STOPS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Whether an allowed id remains without disallowed stop ids and the ends of bad words."""
    stop_lanes = tl.arange(0, STOPS)
    word_lanes = tl.arange(0, WORDS)
    disallowed_stops = tl.where(is_disallowed, stops, -1)
    is_repeated = (disallowed_stops[:, None] == disallowed_stops[None, :]) & (
        stop_lanes[None, :] < stop_lanes[:, None]
    )
    is_repeated = tl.max(is_repeated.to(tl.int32), axis=1)
    is_word_end = tl.max((disallowed_stops[:, None] == ends[None, :]).to(tl.int32), axis=1)
    is_removed = (
        _allowed_bits(allowed_row_ptr, disallowed_stops, pool_vocab)
        & (1 - is_repeated)
        & (1 - is_word_end)
    )
    is_repeated_end = (ends[:, None] == ends[None, :]) & (word_lanes[None, :] < word_lanes[:, None])
    is_repeated_end = tl.max(is_repeated_end.to(tl.int32), axis=1)
    left = tl.load(allowed_row_ptr + num_words(pool_vocab)) - tl.sum(is_removed, axis=0)
    left -= tl.sum(_allowed_bits(allowed_row_ptr, ends, pool_vocab) & (1 - is_repeated_end), axis=0)
    return left > 0


@triton.jit
def _clear_bits(allowed_row_ptr, ids):
    """Clear the bits of ids (-1: none); returns the ids whose bits were set, each once."""
    is_id = ids >= 0
    known = tl.where(is_id, ids, 0)
    bit = 1 << (known & (WORD_BITS - 1))
    old = tl.atomic_and(allowed_row_ptr + (known >> WORD_SHIFT), ~bit, mask=is_id)
    return tl.where(is_id & ((old & bit) != 0), ids, -1)


@triton.jit
def _set_bits(allowed_row_ptr, ids):
    """Set the bits of ids (-1: none)."""
    is_id = ids >= 0
    known = tl.where(is_id, ids, 0)
    bit = 1 << (known & (WORD_BITS - 1))
    tl.atomic_or(allowed_row_ptr + (known >> WORD_SHIFT), bit, mask=is_id)


@triton.jit
def update_draft_mask(
    slot_row_ptr,
    index,
    offset,
    allowed_ptr,
    masked_ids_ptr,
    words_ptr,
    draft_ptr,
    pool_vocab,
    STOPS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
):
    """Update the draft mask of a request for its draft at ``index``, after ``offset`` other drafts.

    Ids masked for the previous draft are allowed again. The caller synchronizes the program's
    threads if it wrote the tokens before this draft.
    """
    allowed_row = tl.load(slot_row_ptr + ALLOWED_ROW).to(tl.int64)
    if allowed_row >= 0:
        allowed_row_ptr = allowed_ptr + allowed_row * (num_words(pool_vocab) + 1)
        stop_lanes = tl.arange(0, STOPS)
        word_lanes = tl.arange(0, WORDS)
        masked_ids_row_ptr = masked_ids_ptr + allowed_row * (STOPS + WORDS)
        _set_bits(allowed_row_ptr, tl.load(masked_ids_row_ptr + stop_lanes))
        _set_bits(allowed_row_ptr, tl.load(masked_ids_row_ptr + STOPS + word_lanes))
        tl.debug_barrier()
        stops, is_disallowed = early_stops(slot_row_ptr, index, pool_vocab, STOPS)
        ends = word_ends(slot_row_ptr, offset, words_ptr, draft_ptr, WORDS, LENGTH, HAS_DRAFTS)
        is_disallowed = is_disallowed & leaves_some(
            allowed_row_ptr, stops, is_disallowed, ends, pool_vocab, STOPS, WORDS
        )
        tl.debug_barrier()
        ends = tl.where(ends < pool_vocab, ends, -1)
        tl.store(
            masked_ids_row_ptr + stop_lanes,
            _clear_bits(allowed_row_ptr, tl.where(is_disallowed, stops, -1)),
        )
        tl.store(masked_ids_row_ptr + STOPS + word_lanes, _clear_bits(allowed_row_ptr, ends))
