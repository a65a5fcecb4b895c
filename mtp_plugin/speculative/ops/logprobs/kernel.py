"""Triton kernels of log-probabilities: a scan of the rows by chunks of ids, and a finish per token.

Of every chunk the scan keeps the highest value, and the sum of weights as multiples of that
value's. Where a draw has left the highest values of chunks and the sum of weights of rows there is
no scan. The finish reads again what ids may come before the token, or are among the most likely
ones: chunks whose highest value is high enough.
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
from mtp_plugin.speculative.logit_rows.rows_triton import (
    LOG2_E,
    NO_COLUMN,
    columns_of,
    masses_of,
    number_of,
    number_or_zero,
    order_of,
    picked_of,
    piece_of,
    row_mass_of,
    thread_tops,
    value_of,
)

LOGPROBS = tl.constexpr(request_column("logprobs"))
ENTRY = tl.constexpr(ENTRY_WIDTH)
TOKEN = tl.constexpr(TOKEN_PLACE)
RANK = tl.constexpr(RANK_PLACE)
VALUE = tl.constexpr(VALUE_PLACE)
TOP_IDS = tl.constexpr(TOP_IDS_PLACE)
TOP_VALUES = tl.constexpr(TOP_VALUES_PLACE)
TOP = tl.constexpr(MAX_LOGPROBS)
LISTED = tl.constexpr(triton.next_power_of_2(MAX_LOGPROBS))
NO_KEY = tl.constexpr(-(2**63))
"""Below the key of every value, as are the next ones, one for each of a list."""
LOWEST_KEY = tl.constexpr(-(2**63) + triton.next_power_of_2(MAX_LOGPROBS))
HIGHEST_KEY = tl.constexpr(2**63 - 1)

CHANGING = ["num_contexts", "width", "num_pieces", "asked"]
CHANGING += ["count_stride", "table_stride", "slot_stride"]
OF_TOKENS = ["token_row_stride", "token_stride"]
SHIFTING = ["count_ptr", "table_ptr", "slot_ptr"]
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
    return number_of(tl.load(pointers, mask=inside, other=float("-inf")).to(tl.float32))


@triton.jit
def keys_of(x, ids):
    """int64 in the order of values, of equals the lowest id highest; no two are equal."""
    return order_of(x).to(tl.int64) * 4294967296 - ids


@triton.jit
def id_of(key):
    """The id of a key."""
    return (-key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def value_of_key(key):
    """The value of a key."""
    return value_of(((key + id_of(key)) >> 32).to(tl.int32))


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=SHIFTING)
def scan_kernel(
    # inputs
    logits_ptr,
    count_ptr,
    table_ptr,
    slot_ptr,
    # outputs
    top_ptr,
    mass_ptr,
    # sizes
    num_contexts,
    width,
    vocab,
    num_pieces,
    asked,
    row_stride,
    count_stride,
    table_stride,
    slot_stride,
    # constants
    LAYOUT: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``PARTS`` pieces of a row: what is kept of their chunks; nothing, where nobody asks for the
    row."""
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    behind = tl.maximum(tl.program_id(0) - num_contexts, 0)
    is_context = row < num_contexts
    request = tl.where(is_context, row, num_contexts + behind // width)
    place = tl.where(is_context, 0, behind % width)
    count = tl.load(count_ptr + request * count_stride)
    asked = tokens_asked(request, table_ptr, table_stride, slot_ptr, slot_stride, asked, HAS_SLOTS)
    if (asked >= 0) & (place < count):
        first_piece = tl.program_id(1) * PARTS
        for piece in range(first_piece, tl.minimum(first_piece + PARTS, num_pieces)):
            x = piece_of(logits_ptr + row * row_stride, piece, vocab, LAYOUT.piece)
            held = tl.reshape(x, [LAYOUT.wraps, LAYOUT.threads, LAYOUT.each])
            thread_top = thread_tops(held)
            by_chunk = tl.reshape(thread_top, [LAYOUT.chunks, LAYOUT.chunk_threads])
            top = tl.max(by_chunk, axis=1)
            below = (by_chunk - number_or_zero(top)[:, None]) * LOG2_E
            out = (row * num_pieces + piece) * LAYOUT.chunks + tl.arange(0, LAYOUT.chunks)
            tl.store(top_ptr + out, top)
            tl.store(mass_ptr + out, masses_of(held, thread_top, below, LOG2_E))


@triton.jit
def _tile_of(row_ptr, vocab, picked, first, TILE: tl.constexpr, LAYOUT: tl.constexpr):
    """Values and columns of some picked chunks, and which of them are, all [TILE, ids of a chunk];
    -inf beyond them."""
    columns, here = columns_of(picked, first, tl.arange(0, LAYOUT.chunk_size), TILE, LAYOUT)
    inside = here[:, None] & (columns < vocab)
    return loaded(row_ptr + columns, inside), columns, inside


@triton.jit
def rank_of(
    row_ptr,
    vocab,
    token,
    own,
    tops,
    is_chunk,
    picked_ptr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One more than the ids in front of a token of value ``own``."""
    SIZE: tl.constexpr = LAYOUT.chunk_size
    picked = picked_of((tops >= own) & is_chunk, picked_ptr)
    # what a thread wrote others read
    tl.debug_barrier()
    ahead = tl.zeros([TILE, SIZE], tl.int32)
    places = tl.arange(0, SIZE)
    x = _tile_of(row_ptr, vocab, picked, 0, TILE, LAYOUT)[0]
    for first in range(0, picked.number, TILE):
        # of the next tile, while this one is counted
        next_x = _tile_of(row_ptr, vocab, picked, first + TILE, TILE, LAYOUT)[0]
        columns, here = columns_of(picked, first, places, TILE, LAYOUT)
        is_equal = here[:, None] & (x == own) & (columns < tl.minimum(token, vocab))
        ahead += ((x > own) | is_equal).to(tl.int32)
        x = next_x
    return 1 + tl.sum(tl.sum(ahead, axis=1), axis=0)


@triton.jit
def most_likely(
    row_ptr,
    vocab,
    number,
    tops,
    chunks,
    is_chunk,
    picked_ptr,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """The ``number`` >= 1 most likely ids of a row and their values [LISTED], -1 behind them."""
    # of so many chunks each has an id that is no lower
    keys = tl.where(is_chunk, keys_of(tops, chunks), NO_KEY)
    least = float("inf")
    for _ in range(number):
        best = tl.max(keys, axis=0)
        least = tl.where(best > NO_KEY, value_of_key(best), float("-inf"))
        keys = tl.where(keys == best, NO_KEY, keys)
    # a rank is counted with what was picked before
    tl.debug_barrier()
    picked = picked_of((tops >= least) & is_chunk, picked_ptr)
    tl.debug_barrier()

    places = tl.arange(0, LISTED)
    # no two are equal, so that one at a time is replaced
    found = NO_KEY + places.to(tl.int64)
    lowest = tl.full([], NO_KEY, tl.int64)
    for first in range(0, picked.number, TILE):
        x, columns, inside = _tile_of(row_ptr, vocab, picked, first, TILE, LAYOUT)
        of_tile = tl.where(inside, keys_of(x, columns), NO_KEY)
        best_of_tile = tl.max(tl.max(of_tile, axis=1), axis=0)
        while best_of_tile > lowest:
            found = tl.where(found == lowest, best_of_tile, found)
            lowest = tl.min(tl.where(places < number, found, HIGHEST_KEY), axis=0)
            of_tile = tl.where(of_tile == best_of_tile, NO_KEY, of_tile)
            best_of_tile = tl.max(tl.max(of_tile, axis=1), axis=0)

    ids = tl.full([LISTED], -1, tl.int32)
    values = tl.full([LISTED], 0.0, tl.float32)
    for place in range(number):
        best = tl.max(found, axis=0)
        is_here = (places == place) & (best >= LOWEST_KEY)
        ids = tl.where(is_here, id_of(best), ids)
        values = tl.where(is_here, value_of_key(best), values)
        found = tl.where(found == best, NO_KEY, found)
    return ids, values


@triton.jit(
    do_not_specialize=[*CHANGING, *OF_TOKENS],
    do_not_specialize_on_alignment=[*SHIFTING, "token_ptr"],
)
def finish_kernel(
    # inputs
    logits_ptr,
    count_ptr,
    table_ptr,
    slot_ptr,
    token_ptr,
    top_ptr,
    mass_ptr,
    # outputs
    entry_ptr,
    # written and read here
    picked_ptr,
    # sizes
    num_contexts,
    width,
    vocab,
    num_pieces,
    asked,
    row_stride,
    count_stride,
    table_stride,
    slot_stride,
    token_row_stride,
    token_stride,
    # constants
    LAYOUT: tl.constexpr,
    ALL_CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (request, place): the entry of its token, or a filled one.

    Of masses there is one per row with sums, else one per chunk.
    """
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
        row_ptr = logits_ptr + row * row_stride
        own = loaded(row_ptr + token, (token >= 0) & (token < vocab))
        num_chunks = num_pieces * LAYOUT.chunks
        chunks = tl.arange(0, ALL_CHUNKS)
        is_chunk = chunks < num_chunks
        kept = row * num_chunks + chunks
        tops = tl.load(top_ptr + kept, mask=is_chunk, other=float("-inf"))
        if HAS_SUMS:
            mass = tl.load(mass_ptr + row)
        else:
            masses = tl.load(mass_ptr + kept, mask=is_chunk, other=0.0)
        top = tl.max(tops, axis=0)
        if top == float("inf"):
            # pieces stand in the order of ids, their chunks do not
            piece = tl.min(tl.where(tops == top, chunks // LAYOUT.chunks, NO_COLUMN), axis=0)
            columns = piece * LAYOUT.piece + tl.arange(0, LAYOUT.piece)
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
            if not HAS_SUMS:
                mass = row_mass_of(masses, tops, top, LOG2_E)
            norm = tl.log(mass)
            value = tl.where(own > float("-inf"), own - top - norm, float("-inf"))
            picked_ptr += tl.program_id(0).to(tl.int64) * num_chunks
            rank = rank_of(row_ptr, vocab, token, own, tops, is_chunk, picked_ptr, TILE, LAYOUT)
            if number > 0:
                ids, values = most_likely(
                    row_ptr, vocab, number, tops, chunks, is_chunk, picked_ptr, TILE, LAYOUT
                )
                lower = tl.where(values > float("-inf"), values - top - norm, float("-inf"))
                values = tl.where(ids >= 0, lower, 0.0)
    entry = entry_ptr + tl.program_id(0).to(tl.int64) * ENTRY
    tl.store(entry + TOKEN, token)
    tl.store(entry + RANK, rank)
    tl.store(entry + VALUE, value.to(tl.int32, bitcast=True))
    tl.store(entry + TOP_IDS + places, ids, mask=places < TOP)
    tl.store(entry + TOP_VALUES + places, values.to(tl.int32, bitcast=True), mask=places < TOP)
