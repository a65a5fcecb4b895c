"""Triton kernel of acceptance: everything that follows from the partial reductions of a request."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch.kernel import grid_dependency_synchronize


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
    thinking_ptr,
    topk_ptr,
    delta_ptr,
    stop_ptr,
    forced_ptr,
    # outputs
    token_ptr,
    count_ptr,
    status_ptr,
    last_ptr,
    thinking_out_ptr,
    # sizes
    num_contexts,
    num_pieces,
    row_stride,
    vocab,
    num_stops,
    stop_stride,
    last_stride,
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
    HAS_STOPS: tl.constexpr,
    HAS_LAST: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One request: its run of accepted drafts, its bonus token, count, status and phase."""
    grid_dependency_synchronize(PDL)
    request = tl.program_id(0)
    is_context = request < num_contexts
    generation = (request - num_contexts).to(tl.int64)
    first_row = tl.where(is_context, request, num_contexts + generation * (K + 1)).to(tl.int64)
    num_rows = tl.where(is_context, 1, K + 1)

    columns = tl.arange(0, COLUMNS)
    pieces = tl.arange(0, PIECES)
    offset = (first_row + columns[:, None]) * num_pieces + pieces[None, :]
    inside = (columns[:, None] < num_rows) & (pieces[None, :] < num_pieces)
    values = tl.load(value_ptr + offset, mask=inside, other=float("-inf"))
    ids = tl.load(id_ptr + offset, mask=inside, other=2147483647)
    if RELAXED:
        # asked for beside the values: a request that thinks waits for memory once
        weights = tl.load(weight_ptr + offset, mask=inside, other=0.0)
        ahead = tl.load(ahead_ptr + offset, mask=inside, other=0)
        thinking = tl.load(thinking_ptr + request) != 0
        topk = tl.load(topk_ptr + request)
        delta = tl.load(delta_ptr + request)
    top = tl.max(values, axis=1)
    top1 = tl.min(tl.where(values == top[:, None], ids, 2147483647), axis=1)
    alive = top > float("-inf")

    drafted = (columns < K) & (request >= num_contexts)
    drafts = tl.load(draft_ptr + generation * K + columns, mask=drafted, other=-1)
    # an id outside the vocabulary is no draft; wide ids are judged before they are narrowed
    drafts = tl.where((drafts >= 0) & (drafts < vocab), drafts, -1).to(tl.int32)
    present = drafted
    if HAS_DRAFT_LENS:
        draft_len = tl.load(draft_len_ptr + generation, mask=request >= num_contexts, other=0)
        present = present & (columns < draft_len)
    matches = present & alive & (drafts == top1)
    if HAS_FORCED:
        forced = tl.load(forced_ptr + generation, mask=request >= num_contexts, other=-1)
        stands = present & (drafts >= 0) & (columns < forced)
        entry = (first_row + columns) * row_stride + drafts
        # a comparison with NaN is false: neither NaN nor a masked token stands
        stands = tl.load(logits_ptr + entry, mask=stands, other=float("-inf")) > float("-inf")
        matches = tl.where(forced >= 0, stands, matches)

    if RELAXED:
        begins = tl.max((drafted & (drafts == begin_token)).to(tl.int32), axis=0) == 1
        # without a phase now or within the run no distance decides
        if (thinking | begins) & (request >= num_contexts):
            scale = tl.where(values == top[:, None], 1.0, tl.exp(values - top[:, None]))
            total = tl.sum(tl.where(weights > 0, weights * scale, 0.0), axis=1)
            rank = tl.sum(ahead, axis=1)
            known = present & (drafts >= 0) & (drafts < vocab)
            row = first_row + columns
            draft_value = tl.load(
                logits_ptr + row * row_stride + drafts, mask=known, other=float("-inf")
            ).to(tl.float32)
            draft_value = tl.where(draft_value == draft_value, draft_value, float("-inf"))
            relative = tl.where(draft_value == top, 1.0, tl.exp(draft_value - top))
            distance = relative / total - (1.0 / total - delta)
            eligible = known & (rank < topk)
            eligible = eligible & (draft_value > float("-inf"))
            eligible = eligible & (drafts != begin_token) & (drafts != end_token)
            if HAS_STOPS:
                stop_columns = tl.arange(0, STOPS)
                stops = tl.load(
                    stop_ptr + request * stop_stride + stop_columns,
                    mask=stop_columns < num_stops,
                    other=-1,
                )
                is_stop = (drafts[:, None] == stops[None, :]) & (stops[None, :] >= 0)
                eligible = eligible & (tl.max(is_stop.to(tl.int32), axis=1) == 0)
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
        final = tl.load(final_ptr + request, mask=request < num_contexts, other=1).to(tl.int32)
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
        tl.store(thinking_out_ptr + request, after.to(tl.int8))
