"""Triton kernels of log-probabilities: a scan of the rows by chunks of ids, and a finish per token.

Of every chunk the scan keeps the highest value, the sum of weights as multiples of that value's,
and how many of its ids come before the token. Chunks are ids in a row: the n most likely ids stand
in the n chunks whose highest values are highest.
"""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize
from mtp_plugin.requests.columns import request_column
from mtp_plugin.requests.logprobs import (
    ENTRY_WIDTH,
    RANK_PLACE,
    TOKEN_PLACE,
    TOP_IDS_PLACE,
    TOP_VALUES_PLACE,
    VALUE_PLACE,
)
from mtp_plugin.requests.options import MAX_LOGPROBS

LOGPROBS = tl.constexpr(request_column("logprobs"))
ENTRY = tl.constexpr(ENTRY_WIDTH)
TOKEN = tl.constexpr(TOKEN_PLACE)
RANK = tl.constexpr(RANK_PLACE)
VALUE = tl.constexpr(VALUE_PLACE)
TOP_IDS = tl.constexpr(TOP_IDS_PLACE)
TOP_VALUES = tl.constexpr(TOP_VALUES_PLACE)
TOP = tl.constexpr(MAX_LOGPROBS)
LISTED = tl.constexpr(triton.next_power_of_2(MAX_LOGPROBS))
LOG2_E = tl.constexpr(1.4426950408889634)
NO_COLUMN = tl.constexpr(2147483647)
NO_KEY = tl.constexpr(-(2**63))
"""Below the key of every value."""

CHANGING = ["num_contexts", "width", "num_pieces", "asked"]
CHANGING += ["token_row_stride", "token_stride", "count_stride", "table_stride", "slot_stride"]
SHIFTING = ["token_ptr", "count_ptr", "table_ptr", "slot_ptr"]
"""Of what is another number, or stands elsewhere, in every batch no binary is made."""


@triton.jit
def tokens_asked(
    request, table_ptr, table_stride, slot_ptr, slot_stride, asked, HAS_SLOTS: tl.constexpr
):
    """How many most likely ids a request asks for; below 0: nothing."""
    if HAS_SLOTS:
        slot = tl.load(slot_ptr + request * slot_stride).to(tl.int64)
        return tl.load(table_ptr + slot * table_stride + LOGPROBS)
    else:
        return asked


@triton.jit
def loaded(pointers, inside):
    """Values in float32, NaN and what is outside as -inf."""
    x = tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def finite_or_zero(x):
    """What may be subtracted from any value that is no higher."""
    return tl.where((x > float("-inf")) & (x < float("inf")), x, 0.0)


@triton.jit
def keys_of(x, ids):
    """int64 in the order of values, of equals the lowest id highest; no two are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return order.to(tl.int64) * 4294967296 - ids


@triton.jit
def id_of(key):
    """The id of a key."""
    return (-key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def value_of(key):
    """The value of a key."""
    order = ((key + id_of(key)) >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=SHIFTING)
def scan_kernel(
    # inputs
    logits_ptr,
    token_ptr,
    count_ptr,
    table_ptr,
    slot_ptr,
    # outputs
    top_ptr,
    mass_ptr,
    ahead_ptr,
    # sizes
    num_contexts,
    width,
    vocab,
    num_pieces,
    asked,
    row_stride,
    token_row_stride,
    token_stride,
    count_stride,
    table_stride,
    slot_stride,
    # constants
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (row, piece): what is kept of its chunks; nothing, where nobody asks for the row.

    A piece is read in STEPS parts.
    """
    grid_dependency_synchronize(PDL)
    row = (tl.program_id(0) // num_pieces).to(tl.int64)
    piece = tl.program_id(0) % num_pieces
    behind = tl.maximum(row - num_contexts, 0)
    is_context = row < num_contexts
    request = tl.where(is_context, row, num_contexts + behind // width)
    place = tl.where(is_context, 0, behind % width)
    count = tl.load(count_ptr + request * count_stride)
    asked = tokens_asked(request, table_ptr, table_stride, slot_ptr, slot_stride, asked, HAS_SLOTS)
    if (asked >= 0) & (place < count):
        token = tl.load(token_ptr + request * token_row_stride + place * token_stride)
        row_ptr = logits_ptr + row * row_stride
        own = loaded(row_ptr + token, (token >= 0) & (token < vocab))
        for step in range(STEPS):
            chunks = (piece * STEPS + step) * CHUNKS + tl.arange(0, CHUNKS)
            columns = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
            x = loaded(row_ptr + columns, columns < vocab)
            top = tl.max(x, axis=1)
            weights = tl.exp2((x - finite_or_zero(top)[:, None]) * LOG2_E)
            ahead = (x > own) | ((x == own) & (columns < token))
            out = row * (num_pieces * STEPS * CHUNKS) + chunks
            tl.store(top_ptr + out, top)
            tl.store(mass_ptr + out, tl.sum(weights, axis=1))
            tl.store(ahead_ptr + out, tl.sum(ahead.to(tl.int32), axis=1))


@triton.jit
def most_likely(row_ptr, vocab, tops, chunks, number, num_chunks, CHUNK: tl.constexpr):
    """The ``number`` most likely ids of a row and their values [LISTED], -1 behind them."""
    places = tl.arange(0, LISTED)
    keys = tl.where(chunks < num_chunks, keys_of(tops, chunks), NO_KEY)
    chosen = tl.full([LISTED], NO_COLUMN, tl.int32)
    for place in range(number):
        best = tl.max(keys, axis=0)
        chosen = tl.where((places == place) & (best > NO_KEY), id_of(best), chosen)
        keys = tl.where(keys == best, NO_KEY, keys)

    inside = chosen < num_chunks
    columns = tl.where(inside, chosen, 0)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = inside[:, None] & (columns < vocab)
    held = tl.where(inside, keys_of(loaded(row_ptr + columns, inside), columns), NO_KEY)
    ids = tl.full([LISTED], -1, tl.int32)
    values = tl.full([LISTED], 0.0, tl.float32)
    for place in range(number):
        best = tl.max(tl.max(held, axis=1), axis=0)
        is_here = (places == place) & (best > NO_KEY)
        ids = tl.where(is_here, id_of(best), ids)
        values = tl.where(is_here, value_of(best), values)
        held = tl.where(held == best, NO_KEY, held)
    return ids, values


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=SHIFTING)
def finish_kernel(
    # inputs
    logits_ptr,
    token_ptr,
    count_ptr,
    table_ptr,
    slot_ptr,
    top_ptr,
    mass_ptr,
    ahead_ptr,
    # outputs
    entry_ptr,
    # sizes
    num_contexts,
    width,
    vocab,
    num_pieces,
    asked,
    row_stride,
    token_row_stride,
    token_stride,
    count_stride,
    table_stride,
    slot_stride,
    # constants
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (request, place): the entry of its token, or a filled one."""
    grid_dependency_synchronize(PDL)
    request = (tl.program_id(0) // width).to(tl.int64)
    place = tl.program_id(0) % width
    is_context = request < num_contexts
    row = tl.where(is_context, request, num_contexts + (request - num_contexts) * width + place)
    count = tl.load(count_ptr + request * count_stride)
    asked = tokens_asked(request, table_ptr, table_stride, slot_ptr, slot_stride, asked, HAS_SLOTS)
    places = tl.arange(0, LISTED)
    token = tl.full([], -1, tl.int32)
    rank = tl.full([], 0, tl.int32)
    value = tl.full([], 0.0, tl.float32)
    ids = tl.full([LISTED], -1, tl.int32)
    values = tl.full([LISTED], 0.0, tl.float32)
    if (asked >= 0) & (place < count) & ((place == 0) | (request >= num_contexts)):
        number = tl.minimum(asked, TOP)
        token = tl.load(token_ptr + request * token_row_stride + place * token_stride).to(tl.int32)
        num_chunks = num_pieces * STEPS * CHUNKS
        chunks = tl.arange(0, ALL_CHUNKS)
        kept = row * num_chunks + chunks
        tops = tl.load(top_ptr + kept, mask=chunks < num_chunks, other=float("-inf"))
        masses = tl.load(mass_ptr + kept, mask=chunks < num_chunks, other=0.0)
        rank = 1 + tl.sum(tl.load(ahead_ptr + kept, mask=chunks < num_chunks, other=0), axis=0)
        top = tl.max(tops, axis=0)
        row_ptr = logits_ptr + row * row_stride
        if top == float("inf"):
            chunk = tl.min(tl.where(tops == top, chunks, NO_COLUMN), axis=0)
            columns = chunk * CHUNK + tl.arange(0, CHUNK)
            x = loaded(row_ptr + columns, columns < vocab)
            first = tl.min(tl.where(x == top, columns, NO_COLUMN), axis=0)
            # behind it all others, by id
            others = places - 1 + (places > first).to(tl.int32)
            ids = tl.where(places == 0, first, others)
            values = tl.where(places == 0, 0.0, float("-inf"))
            value = tl.where(token == first, 0.0, float("-inf"))
            rank = tl.where(token == first, 1, token + 1 + (token < first).to(tl.int32))
            is_told = (places < number) & (places < vocab)
            ids = tl.where(is_told, ids, -1)
            values = tl.where(is_told, values, 0.0)
        else:
            base = finite_or_zero(top)
            mass = tl.sum(masses * tl.exp2((tops - base) * LOG2_E), axis=0)
            norm = tl.log(mass)
            own = loaded(row_ptr + token, (token >= 0) & (token < vocab))
            value = tl.where(own > float("-inf"), own - base - norm, float("-inf"))
            if number > 0:
                ids, values = most_likely(row_ptr, vocab, tops, chunks, number, num_chunks, CHUNK)
                lower = tl.where(values > float("-inf"), values - base - norm, float("-inf"))
                values = tl.where(ids >= 0, lower, 0.0)
    entry = entry_ptr + tl.program_id(0).to(tl.int64) * ENTRY
    tl.store(entry + TOKEN, token)
    tl.store(entry + RANK, rank)
    tl.store(entry + VALUE, value.to(tl.int32, bitcast=True))
    tl.store(entry + TOP_IDS + places, ids, mask=places < TOP)
    tl.store(entry + TOP_VALUES + places, values.to(tl.int32, bitcast=True), mask=places < TOP)
