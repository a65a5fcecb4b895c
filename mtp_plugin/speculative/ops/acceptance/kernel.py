"""Triton kernels of acceptance: a reduction of relaxed rows, and what follows from reductions."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize
from mtp_plugin.requests.columns import request_column
from mtp_plugin.speculative.logit_rows.edits_kernel import (
    ALLOWED_ROW,
    Pools,
    bits_of,
    edited,
    edits_of,
    num_words,
)
from mtp_plugin.speculative.logit_rows.rows_kernel import GREEDY_BELOW

STOP_IDS = tl.constexpr(request_column("stop_ids"))
TEMPERATURE = tl.constexpr(request_column("temperature"))


@triton.jit
def _slot_of(slot_ptr, slot_stride, request):
    """A request's slot. Whoever reads its row waits for this first, so it is asked for early."""
    return tl.load(slot_ptr + request.to(tl.int64) * slot_stride).to(tl.int64)


@triton.jit
def _phase_of(slot_row, in_force_ptr, thinking_column, limit_column):
    """Whether a request thinks, and the delta that it has or would have."""
    in_force = tl.load(in_force_ptr)
    limit = tl.load(slot_row + limit_column).to(tl.float32, bitcast=True)
    noted = tl.load(slot_row + thinking_column)
    begins = in_force > 0
    # one without a delta of its own shows its phase in the column alone
    unseen = (noted > 0) & (limit == 0)
    return begins | unseen, tl.where(begins, in_force, limit)


@triton.jit
def _draws(slot_row):
    """Whether a request has a temperature: its tokens are drawn."""
    return tl.load(slot_row + TEMPERATURE).to(tl.float32, bitcast=True) >= GREEDY_BELOW


@triton.jit
def relaxed_kernel(
    # inputs
    logits_ptr,
    draft_ptr,
    slot_ptr,
    table_ptr,
    delta_ptr,
    bias_ptr,
    allowed_ptr,
    count_ptr,
    seen_ptr,
    # outputs
    value_ptr,
    id_ptr,
    weight_ptr,
    ahead_ptr,
    near_ptr,
    # sizes
    row_stride,
    vocab,
    pool_vocab,
    piece,
    num_pieces,
    num_contexts,
    slot_stride,
    table_stride,
    delta_stride,
    thinking_column,
    limit_column,
    begin_token,
    # constants
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CHOICES: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """As top1_kernel; for drafted rows of requests that think also the sum of weights and a rank.

    ``weight``: sum of exp(value - piece maximum). ``ahead``: tokens of the piece that come before
    the row's draft in order of falling value, then rising id; of a masked draft anything.
    Where the target's tokens are chosen, rows that need none of these are not read, and have -inf.
    With edits all of this is of edited values, and ``near`` the draft's.
    """
    grid_dependency_synchronize(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * piece
    end = tl.minimum(first + piece, vocab)
    out = row * num_pieces + part

    generation = (row - num_contexts) // WIDTH
    column = (row - num_contexts) % WIDTH
    drafted = (row >= num_contexts) & (column < WIDTH - 1)
    request = tl.where(row < num_contexts, row, num_contexts + generation)
    slot = _slot_of(slot_ptr, slot_stride, request)
    columns = tl.arange(0, COLUMNS)
    in_run = (columns < WIDTH - 1) & (row >= num_contexts)
    run_ptr = draft_ptr + generation * (WIDTH - 1)
    drafts = tl.load(run_ptr + columns, mask=in_run, other=-1)
    draft = tl.load(run_ptr + column, mask=drafted, other=-1)
    lanes = tl.arange(0, BLOCK)
    row_ptr = logits_ptr + row * row_stride
    value = tl.load(row_ptr + first + lanes, mask=first + lanes < end, other=float("-inf"))

    # wide ids are judged before they are narrowed
    known = (draft >= 0) & (draft < vocab)
    draft = tl.minimum(tl.maximum(draft, -1), vocab).to(tl.int32)
    draft_value = tl.load(row_ptr + draft, mask=known, other=float("-inf")).to(tl.float32)
    in_force_ptr = delta_ptr + slot * delta_stride
    slot_row = table_ptr + slot * table_stride
    thinking, _ = _phase_of(slot_row, in_force_ptr, thinking_column, limit_column)
    # a phase that begins within the run needs its later rows judged too
    begins = tl.max((in_run & (drafts == begin_token)).to(tl.int32), axis=0) == 1
    judged = drafted & (thinking | begins)
    if HAS_CHOICES:
        judged = judged & ~_draws(slot_row)

    # lanes know nothing of each other until the piece is read; each asks for its next value before
    # it works on the one that it has
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = first + lanes
    if judged:
        draft_value = tl.where(draft_value == draft_value, draft_value, float("-inf"))
        if HAS_EDITS:
            pools = Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab)
            edits = edits_of(slot_row, pools, run_ptr, column.to(tl.int32))
            draft_value = edited(draft_value, draft, known, edits)
            tl.store(near_ptr + row, draft_value, mask=part == 0)
        before_draft = tl.minimum(draft, end)
        weight = tl.zeros([BLOCK], tl.float32)
        ahead = tl.zeros([BLOCK], tl.int32)
        for start in range(first, end, BLOCK):
            ids, mine = start + lanes, value.to(tl.float32)
            following = ids + BLOCK
            value = tl.load(row_ptr + following, mask=following < end, other=float("-inf"))
            if HAS_EDITS:
                mine = tl.where(mine == mine, mine, float("-inf"))
                mine = edited(mine, ids, ids < end, edits)
            # a comparison with NaN is false, so NaN neither wins nor weighs
            better = mine > best
            # one exponential per value; equal values differ by zero also where both are infinite
            apart = tl.where(mine == best, 1.0, tl.exp(-tl.abs(mine - best)))
            apart = tl.where(mine > float("-inf"), apart, 0.0)
            weight = tl.where(better, weight * apart + 1.0, weight + apart)
            best = tl.where(better, mine, best)
            best_id = tl.where(better, ids, best_id)
            first_of_equals = (mine == draft_value) & (ids < before_draft)
            ahead += ((mine > draft_value) | first_of_equals).to(tl.int32)
        top = tl.max(best, axis=0)
        scale = tl.where(best == top, 1.0, tl.exp(best - top))
        tl.store(weight_ptr + out, tl.sum(weight * scale, axis=0))
        tl.store(ahead_ptr + out, tl.sum(ahead, axis=0))
    else:
        if not HAS_CHOICES:
            for start in range(first, end, BLOCK):
                ids, mine = start + lanes, value.to(tl.float32)
                following = ids + BLOCK
                value = tl.load(row_ptr + following, mask=following < end, other=float("-inf"))
                better = mine > best
                best = tl.where(better, mine, best)
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


@triton.jit
def emit_kernel(
    # inputs
    value_ptr,
    id_ptr,
    weight_ptr,
    ahead_ptr,
    logits_ptr,
    draft_ptr,
    draft_len_ptr,
    final_ptr,
    slot_ptr,
    forced_ptr,
    choice_ptr,
    only_ptr,
    near_ptr,
    allowed_ptr,
    # outputs
    token_ptr,
    count_ptr,
    status_ptr,
    last_ptr,
    # read, and moved on
    table_ptr,
    delta_ptr,
    # sizes
    num_contexts,
    num_pieces,
    row_stride,
    vocab,
    pool_vocab,
    last_stride,
    slot_stride,
    table_stride,
    delta_stride,
    thinking_column,
    topk_column,
    limit_column,
    begin_token,
    end_token,
    # constants
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    STOPS: tl.constexpr,
    RELAXED: tl.constexpr,
    HAS_DRAFT_LENS: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_LAST: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    HAS_CHOICES: tl.constexpr,
    HAS_FORCED_IDS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One request: its run of accepted drafts, its bonus token, count, status and phase."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0)
    is_context = request < num_contexts
    generation = (request - num_contexts).to(tl.int64)
    first_row = tl.where(is_context, request, num_contexts + generation * (K + 1)).to(tl.int64)
    num_rows = tl.where(is_context, 1, K + 1)

    # what waits for nothing is asked for first, then what waits for a slot or a draft: that is how
    # often the program waits for memory
    if RELAXED or HAS_EDITS:
        slot = _slot_of(slot_ptr, slot_stride, request)
    columns = tl.arange(0, COLUMNS)
    pieces = tl.arange(0, PIECES)
    offset = (first_row + columns[:, None]) * num_pieces + pieces[None, :]
    inside = (columns[:, None] < num_rows) & (pieces[None, :] < num_pieces)
    values = tl.load(value_ptr + offset, mask=inside, other=float("-inf"))
    ids = tl.load(id_ptr + offset, mask=inside, other=2147483647)
    if RELAXED:
        weights = tl.load(weight_ptr + offset, mask=inside, other=0.0)
        ahead = tl.load(ahead_ptr + offset, mask=inside, other=0)
    if HAS_CHOICES:
        choices = tl.load(choice_ptr + first_row + columns, mask=columns < num_rows, other=-1)
    if HAS_FORCED_IDS:
        only = tl.load(only_ptr + first_row + columns, mask=columns < num_rows, other=-1)
    drafted = (columns < K) & (request >= num_contexts)
    drafts = tl.load(draft_ptr + generation * K + columns, mask=drafted, other=-1)
    if HAS_DRAFT_LENS:
        draft_len = tl.load(draft_len_ptr + generation, mask=request >= num_contexts, other=0)
    if HAS_FORCED:
        forced = tl.load(forced_ptr + generation, mask=request >= num_contexts, other=-1)
    if HAS_FINAL:
        final = tl.load(final_ptr + request, mask=request < num_contexts, other=1).to(tl.int32)

    # an id outside the vocabulary is no draft; wide ids are judged before they are narrowed
    drafts = tl.where((drafts >= 0) & (drafts < vocab), drafts, -1).to(tl.int32)
    present = drafted
    if HAS_DRAFT_LENS:
        present = present & (columns < draft_len)
    if RELAXED:
        in_force_ptr = delta_ptr + slot * delta_stride
        slot_row = table_ptr + slot * table_stride
        thinking, delta = _phase_of(slot_row, in_force_ptr, thinking_column, limit_column)
        topk = tl.load(slot_row + topk_column)
        stops = tl.load(slot_row + STOP_IDS + tl.arange(0, STOPS))
        if HAS_CHOICES:
            # among none
            topk = tl.where(_draws(slot_row), 0, topk)
    if RELAXED or HAS_FORCED:
        known = present & (drafts >= 0)
        entry = (first_row + columns) * row_stride + drafts
        draft_value = tl.load(logits_ptr + entry, mask=known, other=float("-inf")).to(tl.float32)
        if HAS_EDITS:
            allowed_row = tl.load(table_ptr + slot * table_stride + ALLOWED_ROW).to(tl.int64)
            words_ptr = allowed_ptr + allowed_row * (num_words(pool_vocab) + 1)
            asks = known & (allowed_row >= 0)
            is_allowed = ~asks | (bits_of(words_ptr, drafts, asks) != 0)
            draft_value = tl.where(is_allowed, draft_value, float("-inf"))
        # a comparison with NaN is false: neither NaN nor a masked token stands
        possible = known & (draft_value > float("-inf"))
        if RELAXED and HAS_EDITS:
            draft_value = tl.load(near_ptr + first_row + columns, mask=known, other=float("-inf"))
    if RELAXED:
        # here rather than where it decides, which would be one more wait for its loads
        barred = ~possible[:, None] | (drafts[:, None] == stops[None, :])
        barred = tl.max(barred.to(tl.int32), axis=1) == 1
        if HAS_FORCED_IDS:
            barred = barred | (only >= 0)
    if HAS_FORCED and HAS_FORCED_IDS:
        possible = tl.where(only >= 0, present & (drafts == only), possible)

    top = tl.max(values, axis=1)
    top1 = tl.min(tl.where(values == top[:, None], ids, 2147483647), axis=1)
    alive = top > float("-inf")
    if HAS_CHOICES:
        top1 = tl.maximum(choices, 0)
        alive = choices >= 0
    is_top1 = alive & (drafts == top1)
    matches = present & is_top1
    if HAS_FORCED:
        matches = tl.where(forced >= 0, possible & (columns < forced), matches)

    if RELAXED:
        begins = tl.max((drafted & (drafts == begin_token)).to(tl.int32), axis=0) == 1
        # without a phase now or within the run no distance decides
        if (thinking | begins) & (request >= num_contexts):
            scale = tl.where(values == top[:, None], 1.0, tl.exp(values - top[:, None]))
            total = tl.sum(tl.where(weights > 0, weights * scale, 0.0), axis=1)
            rank = tl.sum(ahead, axis=1)
            relative = tl.where(draft_value == top, 1.0, tl.exp(draft_value - top))
            distance = relative / total - (1.0 / total - delta)
            eligible = (rank < topk) & ~barred
            if HAS_EDITS:
                eligible = eligible & (draft_value > float("-inf"))
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

    bonus = _at(top1, columns, num_matches)
    has_bonus = _at(alive.to(tl.int32), columns, num_matches)
    emits = has_bonus
    ok = has_bonus
    if HAS_FINAL:
        is_final = tl.where(final != 0, 1, 0)
        emits = emits & is_final
        ok = ok | (1 - is_final)
    count = num_matches + emits
    tokens = tl.where(columns < num_matches, drafts, bonus)
    tokens = tl.where(columns < count, tokens, -1)
    tl.store(token_ptr + request * (K + 1) + columns, tokens, mask=columns <= K)
    tl.store(count_ptr + request, count)
    tl.store(status_ptr + request, 1 - ok)
    if HAS_LAST:
        last = tl.where(count > 0, _at(tokens, columns, count - 1), 0)
        tl.store(last_ptr + request.to(tl.int64) * last_stride, tl.maximum(last, 0))
    if RELAXED:
        emitted_bonus = (count > num_matches) & (ok == 1)
        after = tl.where(emitted_bonus & (bonus == begin_token), 1, thinking_after)
        after = tl.where(emitted_bonus & (bonus == end_token), 0, after)
        tl.store(slot_row + thinking_column, after)
        tl.store(in_force_ptr, tl.where(after == 1, delta, 0.0))
