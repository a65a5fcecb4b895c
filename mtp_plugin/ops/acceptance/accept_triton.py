"""Triton implementation of `accept`: one reduction of the logits, and one launch that accepts.

Launch 1, grid (rows of logits, blocks of the vocabulary): `top1_kernel` reduces each block of a row
to its highest value and the lowest id of it. With a relaxed rule `relaxed_partials_kernel` also
computes, for the drafted rows of thinking requests, the block's sum of exp and the draft's rank in
the block. The launch is left out if the target tokens are given and nothing is relaxed.

Launch 2, grid [R], `accept_kernel`; a request's K+1 rows are the columns of its program:

1. Load what depends on nothing: partials [COLUMNS, NUM_BLOCKS], drafts, target tokens, lengths.
2. Load what depends on the slot or a draft: the thinking phase, limits, stop ids, draft logits.
3. Merge the blocks to the target token of each row: the argmax, unless targets are given.
4. A draft matches if it is present and the target token, or forced and possible.
5. Relaxed, in a phase or before one that begins within the run: from the merged softmax decide
   which other drafts are near enough, then walk the columns, since each accepted draft may begin or
   end the phase.
6. The accepted drafts are those before the first column without a match; the bonus is the target
   token there. Write tokens (then -1), count, status, last token, and the phase after them.

Absent drafts (-1, outside the vocabulary, or at or after the draft length) never match. A context
has one row and no draft; one that does not end its prompt has count 0. A row without a finite value
has no target token: the request fails with the status alone. With RAGGED, rows of no request are
not read. Padding requests are computed like others; those that share a slot write its phase.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from typing_extensions import override

from mtp_plugin.ops.acceptance.types import AcceptanceRules, RelaxedRule
from mtp_plugin.ops.launching import CachedLaunches, expect_reachable
from mtp_plugin.ops.logit_rows.processing_triton import (
    ALLOWED_ROW,
    BIAS_ROW,
    Pools,
    bits_of,
    load_processing,
    num_words,
    process_values,
)
from mtp_plugin.ops.logit_rows.rows_triton import GREEDY_BELOW, load_slot
from mtp_plugin.ops.logits_processor_state import LogitsProcessorState
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.step import Accepted, StepLayout
from mtp_plugin.ops.top1 import Top1Partials, split, top1_partials
from mtp_plugin.requests.columns import request_column
from mtp_plugin.requests.stopping import MAX_STOP_IDS

STOP_IDS = tl.constexpr(request_column("stop_ids"))
TEMPERATURE = tl.constexpr(request_column("temperature"))


@triton.jit
def _phase_of(slot_row, in_force_ptr, thinking_column, limit_column):
    """Whether a request is thinking, and the delta that it has then."""
    in_force = tl.load(in_force_ptr)
    limit = tl.load(slot_row + limit_column).to(tl.float32, bitcast=True)
    thinking = tl.load(slot_row + thinking_column)
    has_delta = in_force > 0
    # the phase of a request whose limit is 0 is in the column alone
    only_in_column = (thinking > 0) & (limit == 0)
    return has_delta | only_in_column, tl.where(has_delta, in_force, limit)


@triton.jit
def _has_temperature(slot_row):
    return tl.load(slot_row + TEMPERATURE).to(tl.float32, bitcast=True) >= GREEDY_BELOW


@triton.jit(do_not_specialize=["num_slots"])
def relaxed_partials_kernel(
    # inputs
    logits_ptr,  # [rows, vocab] floating
    draft_ptr,  # [G, WIDTH - 1] integer, contiguous
    slot_ptr,  # [>= R] integer
    table_ptr,  # [S, W] int32
    delta_ptr,  # [S] float32: the delta in force, 0 outside the thinking phase
    bias_ptr,  # HAS_PROCESSING: [P, pool_vocab] float32
    allowed_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab) + 1] int32: a bit per id, their number
    count_ptr,  # HAS_PROCESSING: [P, pool_vocab] int16, unsigned: token counts
    seen_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab)] int32: a bit per id
    draft_len_ptr,  # RAGGED: [G] integer
    first_row_ptr,  # RAGGED: [R] integer: the first row of each request
    # outputs
    value_ptr,  # [rows, num_blocks] float32: maxima of blocks
    id_ptr,  # [rows, num_blocks] int32: their lowest ids
    weight_ptr,  # [rows, num_blocks] float32: sum of exp(value - block maximum)
    ahead_ptr,  # [rows, num_blocks] int32: tokens that precede the draft
    draft_value_ptr,  # HAS_PROCESSING: [rows] float32: the draft's processed value
    # sizes
    row_stride,
    vocab,
    pool_vocab,
    block_len,
    num_blocks,
    num_contexts,  # C
    slot_stride,
    num_slots,  # S
    table_stride,
    delta_stride,
    thinking_column,  # of the slot table
    limit_column,  # of the slot table
    begin_token,  # of thinking; -1: none
    # constants
    WIDTH: tl.constexpr,  # K+1: rows of a generation
    COLUMNS: tl.constexpr,  # a power of two >= K
    TILE: tl.constexpr,  # values per iteration
    HAS_TARGETS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    RAGGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """As top1_kernel; for drafted rows of thinking requests also the sum of weights and a rank.

    A token precedes the row's draft in descending order of values, then ascending order of ids; the
    number is undefined for a masked draft. Given the target tokens, rows that need no rank are not
    read, and have -inf. With logits processing all values are processed ones.

    One program per row of a uniform step and block of the vocabulary; with RAGGED the programs of
    rows that a request lacks return at once, and outputs are at the rows of the logits.
    """
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    first = block * block_len
    end = tl.minimum(first + block_len, vocab)
    out = row * num_blocks + block

    generation = (row - num_contexts) // WIDTH
    column = (row - num_contexts) % WIDTH
    is_generation = row >= num_contexts
    drafted = is_generation & (column < WIDTH - 1)
    request = tl.where(row < num_contexts, row, num_contexts + generation)
    slot = load_slot(slot_ptr, slot_stride, request, num_slots)
    if RAGGED:
        length = tl.load(draft_len_ptr + generation, mask=is_generation, other=0)
        column = tl.where(is_generation, column, 0)
        if column > tl.maximum(length, 0):
            return
        drafted = drafted & (column < length)
        row = tl.load(first_row_ptr + request).to(tl.int64) + column
        out = row * num_blocks + block
    columns = tl.arange(0, COLUMNS)
    in_run = (columns < WIDTH - 1) & is_generation
    run_ptr = draft_ptr + generation * (WIDTH - 1)
    drafts = tl.load(run_ptr + columns, mask=in_run, other=-1)
    draft = tl.load(run_ptr + column, mask=drafted, other=-1)
    offsets = tl.arange(0, TILE)
    row_ptr = logits_ptr + row * row_stride
    next_x = tl.load(row_ptr + first + offsets, mask=first + offsets < end, other=float("-inf"))

    # 64-bit ids are compared before they are narrowed
    known = (draft >= 0) & (draft < vocab)
    draft = tl.minimum(tl.maximum(draft, -1), vocab).to(tl.int32)
    draft_value = tl.load(row_ptr + draft, mask=known, other=float("-inf")).to(tl.float32)
    in_force_ptr = delta_ptr + slot * delta_stride
    slot_row_ptr = table_ptr + slot * table_stride
    thinking, _ = _phase_of(slot_row_ptr, in_force_ptr, thinking_column, limit_column)
    # a phase that begins within the run needs the later rows too
    begins = tl.max((in_run & (drafts == begin_token)).to(tl.int32), axis=0) == 1
    relaxed = drafted & (thinking | begins)
    if HAS_TARGETS:
        relaxed = relaxed & ~_has_temperature(slot_row_ptr)

    # lanes are independent until the block is read; each prefetches its next value
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = first + offsets
    if relaxed:
        draft_value = tl.where(draft_value == draft_value, draft_value, float("-inf"))
        if HAS_PROCESSING:
            pools = Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab)
            processing = load_processing(slot_row_ptr, pools, run_ptr, column.to(tl.int32))
            draft_value = process_values(draft_value, draft, known, processing)
            tl.store(draft_value_ptr + row, draft_value, mask=block == 0)
        before_draft = tl.minimum(draft, end)
        weight = tl.zeros([TILE], tl.float32)
        ahead = tl.zeros([TILE], tl.int32)
        for start in range(first, end, TILE):
            ids, x = start + offsets, next_x.to(tl.float32)
            next_ids = ids + TILE
            next_x = tl.load(row_ptr + next_ids, mask=next_ids < end, other=float("-inf"))
            if HAS_PROCESSING:
                x = tl.where(x == x, x, float("-inf"))
                x = process_values(x, ids, ids < end, processing)
            # a comparison with NaN is false, so NaN neither wins nor weighs
            better = x > best
            # one exponential per value; equal values differ by zero also where both are infinite
            factor = tl.where(x == best, 1.0, tl.exp(-tl.abs(x - best)))
            factor = tl.where(x > float("-inf"), factor, 0.0)
            weight = tl.where(better, weight * factor + 1.0, weight + factor)
            best = tl.where(better, x, best)
            best_id = tl.where(better, ids, best_id)
            first_of_equals = (x == draft_value) & (ids < before_draft)
            ahead += ((x > draft_value) | first_of_equals).to(tl.int32)
        top = tl.max(best, axis=0)
        scale = tl.where(best == top, 1.0, tl.exp(best - top))
        tl.store(weight_ptr + out, tl.sum(weight * scale, axis=0))
        tl.store(ahead_ptr + out, tl.sum(ahead, axis=0))
    else:
        if not HAS_TARGETS:
            for start in range(first, end, TILE):
                ids, x = start + offsets, next_x.to(tl.float32)
                next_ids = ids + TILE
                next_x = tl.load(row_ptr + next_ids, mask=next_ids < end, other=float("-inf"))
                better = x > best
                best = tl.where(better, x, best)
                best_id = tl.where(better, ids, best_id)
        top = tl.max(best, axis=0)
        tl.store(weight_ptr + out, 1.0)
        tl.store(ahead_ptr + out, 0)
    tl.store(value_ptr + out, top)
    tl.store(id_ptr + out, tl.min(tl.where(best == top, best_id, 2147483647), axis=0))


@triton.jit
def _at(vector, columns, column):
    """The element of ``vector`` in ``column``."""
    return tl.sum(tl.where(columns == column, vector, 0), axis=0)


@triton.jit(do_not_specialize=["num_contexts", "num_slots"])
def accept_kernel(
    # inputs
    value_ptr,  # [rows, num_blocks] float32: maxima of blocks
    id_ptr,  # [rows, num_blocks] int32: their lowest ids
    weight_ptr,  # RELAXED: [rows, num_blocks] float32: sum of exp(value - block maximum)
    ahead_ptr,  # RELAXED: [rows, num_blocks] int32: tokens that precede the draft
    logits_ptr,  # RELAXED or HAS_FORCED: [rows, vocab] floating
    draft_ptr,  # [G, K] integer, contiguous rows
    draft_len_ptr,  # HAS_DRAFT_LENS: [G] integer
    final_ptr,  # HAS_FINAL: [C] bool
    slot_ptr,  # RELAXED or HAS_PROCESSING: [>= R] integer
    forced_ptr,  # HAS_FORCED: [G] integer: number of forced drafts; negative: other rules decide
    target_ptr,  # HAS_TARGETS: [rows] int32: target token of each row, -1: none
    forced_id_ptr,  # HAS_FORCED_IDS: [rows] int32: only allowed token of each row, -1: any
    draft_value_ptr,  # RELAXED and HAS_PROCESSING: [rows] float32: the draft's processed value
    bias_ptr,  # HAS_PROCESSING: [P, pool_vocab] float32
    allowed_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab) + 1] int32: a bit per id, their number
    # outputs
    token_ptr,  # [R, K+1] integer, -1 after the output tokens; FILLS: 0
    count_ptr,  # [R] int32: number of output tokens
    status_ptr,  # [R] int32
    last_ptr,  # HAS_LAST: [R] int32: last output token, 0 without one
    output_row_ptr,  # KEEPS_ROWS: [R, K+1] int32: the row of each output token, then -1
    # updated in place
    table_ptr,  # RELAXED (written) or HAS_PROCESSING: [S, W] int32
    delta_ptr,  # RELAXED: [S] float32: the delta in force, 0 outside the thinking phase
    # input
    first_row_ptr,  # RAGGED: [R] integer: the first row of each request
    # sizes
    num_contexts,  # C
    num_blocks,
    row_stride,
    draft_stride,
    vocab,
    pool_vocab,
    last_stride,
    slot_stride,
    num_slots,  # S
    table_stride,
    delta_stride,
    thinking_column,  # of the slot table
    topk_column,  # of the slot table
    limit_column,  # of the slot table
    begin_token,  # of thinking; -1: none
    end_token,  # of thinking
    # constants
    K: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two >= K+1
    NUM_BLOCKS: tl.constexpr,  # a power of two >= num_blocks
    STOPS: tl.constexpr,  # most stop ids of a request
    RELAXED: tl.constexpr,
    HAS_DRAFT_LENS: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_LAST: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    HAS_FORCED_IDS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    KEEPS_ROWS: tl.constexpr,
    FILLS: tl.constexpr,
    RAGGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per request: its accepted drafts, bonus token, count, status and phase."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0)
    is_context = request < num_contexts
    generation = (request - num_contexts).to(tl.int64)
    first_row = tl.where(is_context, request, num_contexts + generation * (K + 1)).to(tl.int64)
    num_rows = tl.where(is_context, 1, K + 1)
    if RAGGED:
        first_row = tl.load(first_row_ptr + request).to(tl.int64)
        length = tl.load(draft_len_ptr + generation, mask=request >= num_contexts, other=0)
        num_rows = tl.minimum(tl.maximum(length, 0), K) + 1

    # independent loads first, then those that depend on a slot or a draft: the program waits for
    # memory once per level
    if RELAXED or HAS_PROCESSING:
        slot = load_slot(slot_ptr, slot_stride, request, num_slots)
    columns = tl.arange(0, COLUMNS)
    blocks = tl.arange(0, NUM_BLOCKS)
    partial_offsets = (first_row + columns[:, None]) * num_blocks + blocks[None, :]
    inside = (columns[:, None] < num_rows) & (blocks[None, :] < num_blocks)
    values = tl.load(value_ptr + partial_offsets, mask=inside, other=float("-inf"))
    ids = tl.load(id_ptr + partial_offsets, mask=inside, other=2147483647)
    if RELAXED:
        weights = tl.load(weight_ptr + partial_offsets, mask=inside, other=0.0)
        ahead = tl.load(ahead_ptr + partial_offsets, mask=inside, other=0)
    if HAS_TARGETS:
        given_targets = tl.load(target_ptr + first_row + columns, mask=columns < num_rows, other=-1)
    if HAS_FORCED_IDS:
        forced_ids = tl.load(forced_id_ptr + first_row + columns, mask=columns < num_rows, other=-1)
    drafted = (columns < K) & (request >= num_contexts)
    drafts = tl.load(draft_ptr + generation * draft_stride + columns, mask=drafted, other=-1)
    if HAS_DRAFT_LENS:
        draft_len = tl.load(draft_len_ptr + generation, mask=request >= num_contexts, other=0)
    if HAS_FORCED:
        forced = tl.load(forced_ptr + generation, mask=request >= num_contexts, other=-1)
    if HAS_FINAL:
        final = tl.load(final_ptr + request, mask=request < num_contexts, other=1).to(tl.int32)

    # an id outside the vocabulary is no draft; 64-bit ids are compared before they are narrowed
    drafts = tl.where((drafts >= 0) & (drafts < vocab), drafts, -1).to(tl.int32)
    present = drafted
    if HAS_DRAFT_LENS:
        present = present & (columns < draft_len)
    if RELAXED:
        in_force_ptr = delta_ptr + slot * delta_stride
        slot_row_ptr = table_ptr + slot * table_stride
        thinking, delta = _phase_of(slot_row_ptr, in_force_ptr, thinking_column, limit_column)
        topk = tl.load(slot_row_ptr + topk_column)
        stops = tl.load(slot_row_ptr + STOP_IDS + tl.arange(0, STOPS))
        if HAS_TARGETS:
            topk = tl.where(_has_temperature(slot_row_ptr), 0, topk)
    if RELAXED or HAS_FORCED:
        known = present & (drafts >= 0)
        draft_entries = (first_row + columns) * row_stride + drafts
        draft_values = tl.load(logits_ptr + draft_entries, mask=known, other=float("-inf")).to(
            tl.float32
        )
        if HAS_PROCESSING:
            # a dense bias of -inf masks a token, too
            bias_row = tl.load(table_ptr + slot * table_stride + BIAS_ROW).to(tl.int64)
            bias_entries = bias_row * pool_vocab + drafts
            draft_values += tl.load(
                bias_ptr + bias_entries, mask=known & (bias_row >= 0), other=0.0
            )
            allowed_row = tl.load(table_ptr + slot * table_stride + ALLOWED_ROW).to(tl.int64)
            words_ptr = allowed_ptr + allowed_row * (num_words(pool_vocab) + 1)
            has_mask = known & (allowed_row >= 0)
            is_allowed = ~has_mask | (bits_of(words_ptr, drafts, has_mask) != 0)
            draft_values = tl.where(is_allowed, draft_values, float("-inf"))
        # a comparison with NaN is false: neither NaN nor a masked token is accepted
        possible = known & (draft_values > float("-inf"))
        if RELAXED and HAS_PROCESSING:
            draft_values = tl.load(
                draft_value_ptr + first_row + columns, mask=known, other=float("-inf")
            )
    if RELAXED:
        # computed here, since its loads would be waited for once more where it is used
        is_barred = ~possible[:, None] | (drafts[:, None] == stops[None, :])
        is_barred = tl.max(is_barred.to(tl.int32), axis=1) == 1
        if HAS_FORCED_IDS:
            is_barred = is_barred | (forced_ids >= 0)
    if HAS_FORCED and HAS_FORCED_IDS:
        possible = tl.where(forced_ids >= 0, present & (drafts == forced_ids), possible)

    top = tl.max(values, axis=1)
    targets = tl.min(tl.where(values == top[:, None], ids, 2147483647), axis=1)
    has_target = top > float("-inf")
    if HAS_TARGETS:
        targets = tl.maximum(given_targets, 0)
        has_target = given_targets >= 0
    is_target = has_target & (drafts == targets)
    matches = present & is_target
    if HAS_FORCED:
        matches = tl.where(forced >= 0, possible & (columns < forced), matches)

    if RELAXED:
        begins = tl.max((drafted & (drafts == begin_token)).to(tl.int32), axis=0) == 1
        # without a phase now or within the run no probability is compared
        if (thinking | begins) & (request >= num_contexts):
            scale = tl.where(values == top[:, None], 1.0, tl.exp(values - top[:, None]))
            total = tl.sum(tl.where(weights > 0, weights * scale, 0.0), axis=1)
            rank = tl.sum(ahead, axis=1)
            relative = tl.where(draft_values == top, 1.0, tl.exp(draft_values - top))
            distance = relative / total - (1.0 / total - delta)
            eligible = (rank < topk) & ~is_barred
            if HAS_PROCESSING:
                eligible = eligible & (draft_values > float("-inf"))
            eligible = eligible & (drafts != begin_token) & (drafts != end_token)
            if HAS_FORCED:
                eligible = eligible & (forced < 0)
            strict = matches.to(tl.int32)
            by_distance = (eligible & ~matches).to(tl.int32)
            near = (distance >= 0).to(tl.int32)
            # the phase before a column depends on the drafts accepted before it
            phase = tl.where(thinking, 1, 0)
            running = 1
            accepted = 0
            for column in tl.static_range(K):
                decided = running & phase & _at(by_distance, columns, column)
                accepts = _at(strict, columns, column) | (decided & _at(near, columns, column))
                running = running & accepts
                accepted += running
                draft = _at(drafts, columns, column)
                phase = tl.where((running == 1) & (draft == begin_token), 1, phase)
                phase = tl.where((running == 1) & (draft == end_token), 0, phase)
            num_matches = accepted
            thinking_after = phase
        else:
            num_matches = tl.min(tl.where(matches, COLUMNS, columns), axis=0)
            thinking_after = tl.where(thinking, 1, 0)
    else:
        num_matches = tl.min(tl.where(matches, COLUMNS, columns), axis=0)
        thinking_after = 0

    bonus = _at(targets, columns, num_matches)
    has_bonus = _at(has_target.to(tl.int32), columns, num_matches)
    has_output_bonus = has_bonus
    ok = has_bonus
    if HAS_FINAL:
        is_final = tl.where(final != 0, 1, 0)
        has_output_bonus = has_output_bonus & is_final
        ok = ok | (1 - is_final)
    count = num_matches + has_output_bonus
    tokens = tl.where(columns < num_matches, drafts, bonus)
    tokens = tl.where(columns < count, tokens, -1)
    out = request * (K + 1) + columns
    if FILLS:
        tokens = tl.maximum(tokens, 0)
    if KEEPS_ROWS:
        num_tokens = tl.maximum(count, 1)
        rows = tl.where(columns < num_tokens, first_row + columns, -1)
        tl.store(output_row_ptr + out, rows, mask=columns <= K)
        tl.store(count_ptr + request, num_tokens)
    else:
        tl.store(count_ptr + request, count)
    tl.store(token_ptr + out, tokens, mask=columns <= K)
    tl.store(status_ptr + request, 1 - ok)
    if HAS_LAST:
        last = tl.where(count > 0, _at(tokens, columns, count - 1), 0)
        tl.store(last_ptr + request.to(tl.int64) * last_stride, tl.maximum(last, 0))
    if RELAXED:
        is_bonus_output = (count > num_matches) & (ok == 1)
        after = tl.where(is_bonus_output & (bonus == begin_token), 1, thinking_after)
        after = tl.where(is_bonus_output & (bonus == end_token), 0, after)
        tl.store(slot_row_ptr + thinking_column, after)
        tl.store(in_force_ptr, tl.where(after == 1, delta, 0.0))


@dataclass(frozen=True)
class RelaxedPartials(Top1Partials):
    """Also, for drafted rows of thinking requests, the draft's rank and what softmax needs."""

    weights: torch.Tensor  # [rows, blocks] float32: sum of exp(value - block maximum)
    ahead: torch.Tensor  # [rows, blocks] int32: tokens that precede an unmasked draft
    draft_values: torch.Tensor | None = None
    """[rows] float32: the draft's processed value; None: there is no logits processing."""

    @classmethod
    @override
    def unwritten(cls, rows: int, vocab: int, device: torch.device | str) -> RelaxedPartials:
        _, num_blocks, _ = split(rows, vocab, heavy=True)
        return cls(
            values=torch.empty(rows, num_blocks, dtype=torch.float32, device=device),
            ids=torch.empty(rows, num_blocks, dtype=torch.int32, device=device),
            weights=torch.empty(rows, num_blocks, dtype=torch.float32, device=device),
            ahead=torch.empty(rows, num_blocks, dtype=torch.int32, device=device),
        )


_launches = CachedLaunches(accept_kernel)


def accept_triton(
    layout: StepLayout,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    rules: AcceptanceRules,
    *,
    draft_lens: torch.Tensor | None,
    final_context: torch.Tensor | None,
    last_tokens: torch.Tensor | None,
    first_rows: torch.Tensor | None,
    keeps_rows: bool,
    fills: torch.dtype | None,
) -> Accepted:
    """Two launches; one where the target tokens are given and nothing is relaxed."""
    expect_reachable(accept_kernel, "logits", logits)
    rule, k = rules.relaxed, layout.draft_len
    drafts, draft_stride = draft_tokens, k
    if rule is None and drafts.shape == (layout.num_generations, k) and drafts.stride(1) == 1:
        draft_stride = drafts.stride(0)
    else:
        drafts = drafts.reshape(-1).contiguous()
    lens = None if draft_lens is None else draft_lens.contiguous()
    rows = None if first_rows is None else first_rows.contiguous()
    accepted = Accepted.unwritten(
        *(layout.num_requests, k, logits.device),
        keeps_rows=keeps_rows,
        dtype=fills or torch.int32,
    )
    pools = None if rules.processed_slots is None else rules.processed_slots.pools
    if rule is None:
        # given the target tokens, only the logits of forced drafts are read
        partials = top1_partials(logits) if rules.choices is None else Top1Partials(logits, logits)
    else:
        partials = relaxed_partials(
            layout,
            logits,
            drafts,
            rule,
            has_targets=rules.choices is not None,
            pools=pools,
            draft_lens=lens,
            first_rows=rows,
        )
    if layout.num_requests == 0:
        return accepted
    num_blocks = 0 if partials.values is logits else partials.num_blocks
    forced = rules.forced_matches
    columns = None if rule is None else rule.slots.columns
    relaxed = partials if isinstance(partials, RelaxedPartials) else None
    slots = rules.processed_slots if rule is None else rule.slots
    unused = accepted.num_accepted  # a pointer that the kernel never reads
    _launches[(layout.num_requests,)](
        # inputs
        partials.values,
        partials.ids,
        unused if relaxed is None else relaxed.weights,
        unused if relaxed is None else relaxed.ahead,
        logits,
        drafts if drafts.numel() else unused,
        lens if lens is not None else unused,
        final_context.contiguous() if final_context is not None else unused,
        slots.slot_ids if slots is not None else unused,
        forced.contiguous() if forced is not None else unused,
        rules.choices.contiguous() if rules.choices is not None else unused,
        rules.forced_ids.contiguous() if rules.forced_ids is not None else unused,
        unused if relaxed is None or relaxed.draft_values is None else relaxed.draft_values,
        unused if pools is None else pools.bias,
        unused if pools is None else pools.allowed,
        # outputs
        accepted.tokens,
        accepted.num_accepted,
        accepted.status,
        last_tokens if last_tokens is not None else unused,
        accepted.rows if accepted.rows is not None else unused,
        # updated in place
        slots.table if slots is not None else unused,
        rule.delta_in_force if rule is not None else unused,
        # input, no parameter of the kernel of uniform rows
        rows,
        # sizes
        layout.num_contexts,
        num_blocks,
        logits.stride(0),
        draft_stride,
        logits.shape[1],
        0 if pools is None else pools.vocab_size,
        0 if last_tokens is None else last_tokens.stride(0),
        slots.slot_ids.stride(0) if slots is not None else 0,
        slots.table.shape[0] if slots is not None else 0,
        slots.table.stride(0) if slots is not None else 0,
        rule.delta_in_force.stride(0) if rule is not None else 0,
        columns.offset("thinking") if columns is not None else 0,
        columns.offset("relaxed_topk") if columns is not None else 0,
        columns.offset("relaxed_limit") if columns is not None else 0,
        rule.begin_token if rule is not None else -1,
        rule.end_token if rule is not None else -1,
        # constants
        K=k,
        COLUMNS=triton.next_power_of_2(k + 1),
        NUM_BLOCKS=triton.next_power_of_2(max(num_blocks, 1)),
        STOPS=MAX_STOP_IDS,
        RELAXED=rule is not None,
        HAS_DRAFT_LENS=lens is not None,
        HAS_FINAL=final_context is not None,
        HAS_LAST=last_tokens is not None,
        HAS_FORCED=forced is not None,
        HAS_TARGETS=rules.choices is not None,
        HAS_FORCED_IDS=rules.forced_ids is not None,
        HAS_PROCESSING=pools is not None and (rule is not None or forced is not None),
        KEEPS_ROWS=keeps_rows,
        FILLS=keeps_rows or fills is not None,
        RAGGED=rows is not None,
        num_warps=1 if k < 8 else 4,
        **pdl_options(logits.device),
    )
    return accepted


def relaxed_partials(
    layout: StepLayout,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    rule: RelaxedRule,
    *,
    has_targets: bool = False,
    pools: LogitsProcessorState | None = None,
    draft_lens: torch.Tensor | None = None,
    first_rows: torch.Tensor | None = None,
) -> RelaxedPartials:
    """As `top1_partials`, and what relaxed acceptance needs of drafted rows, in the same pass.

    Args:
        drafts: [G*K] contiguous.
        has_targets: target tokens are given: rows that cannot be relaxed are not read.
        pools: of logits processing, with the rule's slots; None: there is none.
        draft_lens: [G] contiguous. first_rows: [R] contiguous; None: rows are uniform.
    """
    rows, vocab = logits.shape
    block_len, num_blocks, tile = split(rows, vocab, heavy=True)
    partials = RelaxedPartials.unwritten(rows, vocab, logits.device)
    if pools is not None:
        draft_values = torch.empty(rows, dtype=torch.float32, device=logits.device)
        partials = replace(partials, draft_values=draft_values)
    if rows == 0 or layout.num_requests == 0:
        return partials
    slots, columns = rule.slots, rule.slots.columns
    relaxed_partials_kernel[(layout.num_logit_rows, num_blocks)](
        # inputs
        logits,
        drafts if drafts.numel() else partials.ids,
        slots.slot_ids,
        slots.table,
        rule.delta_in_force,
        *(
            (partials.ids,) * 4  # never read
            if pools is None
            else (pools.bias, pools.allowed, pools.counts, pools.seen)
        ),
        # None adds no parameter to the kernel of uniform rows
        None if first_rows is None else draft_lens,
        first_rows,
        # outputs
        partials.values,
        partials.ids,
        partials.weights,
        partials.ahead,
        partials.weights if partials.draft_values is None else partials.draft_values,
        # sizes
        logits.stride(0),
        vocab,
        0 if pools is None else pools.vocab_size,
        block_len,
        num_blocks,
        layout.num_contexts,
        slots.slot_ids.stride(0),
        slots.table.shape[0],
        slots.table.stride(0),
        rule.delta_in_force.stride(0),
        columns.offset("thinking"),
        columns.offset("relaxed_limit"),
        rule.begin_token,
        # constants
        WIDTH=layout.step_rows,
        COLUMNS=triton.next_power_of_2(max(layout.draft_len, 1)),
        TILE=tile,
        HAS_TARGETS=has_targets,
        HAS_PROCESSING=pools is not None,
        RAGGED=first_rows is not None,
        num_warps=4,
        **pdl_options(logits.device),
    )
    return partials
