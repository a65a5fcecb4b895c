"""Triton kernels of judging by odds: what drafts were drawn from, pieces of the rows behind drafts,
and a finish per generation."""

import triton
import triton.language as tl

from mtp_plugin.kernels.programmatic_launch import grid_dependency_synchronize
from mtp_plugin.speculative.logit_rows.processing_triton import Pools
from mtp_plugin.speculative.logit_rows.rows_triton import GREEDY_BELOW, NO_COLUMN, place_of
from mtp_plugin.speculative.ops.sampling.contract import Role
from mtp_plugin.speculative.ops.sampling.noise_kernel import (
    DRAFTED_PLAIN,
    JUDGED_BY_BLOCK,
    JUDGED_BY_REJECTION,
    gumbel,
    ids_of,
    options_of,
    step_of,
    stream_of,
    words_of,
)
from mtp_plugin.speculative.ops.sampling.residual.block_kernel import matches_of_block, next_odds
from mtp_plugin.speculative.ops.sampling.residual.drafts_kernel import (
    FOUND,
    Found,
    Noise,
    best_of,
    chance_of,
    draft_share,
    mass_of,
)
from mtp_plugin.speculative.ops.sampling.residual.rejection_kernel import (
    matches_alone,
    stands_alone,
)
from mtp_plugin.speculative.ops.sampling.residual.row_kernel import (
    Batch,
    kept_of,
    only_of,
    score_of,
    share_of,
)

RESIDUAL_ROLE = tl.constexpr(int(Role.RESIDUAL))

CHANGING = ["num_contexts", "width", "column", "judged_at", "drafted_at", "step_at", "num_pieces"]
CHANGING += ["pool_vocab", "position_stride", "ahead_stride", "draft_stride", "table_stride"]
CHANGING += ["slot_stride", "length_stride", "forced_stride", "depth"]
SHIFTING = ["position_ptr", "ahead_ptr", "draft_ptr", "table_ptr", "slot_ptr", "length_ptr"]
SHIFTING += ["forced_ptr"]
"""Of what is another number, or stands elsewhere, in every batch no binary is made."""


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=SHIFTING)
def keep_kernel(
    # inputs
    logits_ptr,
    vocab_ids_ptr,
    draft_ptr,
    table_ptr,
    slot_ptr,
    bias_ptr,
    allowed_ptr,
    count_ptr,
    seen_ptr,
    cut_ptr,
    # output
    prob_ptr,
    # sizes
    column,
    drafted_at,
    vocab,
    num_pieces,
    pool_vocab,
    row_stride,
    draft_stride,
    table_stride,
    slot_stride,
    depth,
    words,
    # constants
    PIECE: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (row, piece): what its plain draft was drawn from."""
    grid_dependency_synchronize(PDL)
    row = (tl.program_id(0) // num_pieces).to(tl.int64)
    piece = tl.program_id(0) % num_pieces
    place = tl.load(slot_ptr + row * slot_stride).to(tl.int64)
    slot = table_ptr + place * table_stride
    options = options_of(slot, vocab)
    is_plain = tl.load(slot + drafted_at) == DRAFTED_PLAIN
    if is_plain & (options.temperature >= GREEDY_BELOW):
        batch = Batch(
            logits_ptr,
            row_stride,
            vocab,
            vocab_ids_ptr,
            cut_ptr,
            Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab),
        )
        none = tl.full([], -1, tl.int32)
        kept = kept_of(
            batch, row, slot, draft_ptr + row * draft_stride, column if HAS_DRAFTS else 0, none
        )
        columns = piece * PIECE + tl.arange(0, PIECE)
        inside = columns < vocab
        score = score_of(kept, columns, inside, HAS_IDS, HAS_EDITS)
        ids = ids_of(kept.row, columns, inside, HAS_IDS)
        out = prob_ptr + (place * depth + column) * words
        tl.store(out + ids, share_of(kept, score), mask=inside)


@triton.jit
def _is_judged(judged_by, HAS_BLOCK: tl.constexpr):
    """Whether the drafts of a request that draws are judged by odds."""
    return (judged_by == JUDGED_BY_REJECTION) | ((judged_by == JUDGED_BY_BLOCK) & HAS_BLOCK)


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=SHIFTING)
def piece_kernel(
    # inputs
    logits_ptr,
    position_ptr,
    draft_ptr,
    length_ptr,
    forced_ptr,
    table_ptr,
    slot_ptr,
    bias_ptr,
    allowed_ptr,
    count_ptr,
    seen_ptr,
    cut_ptr,
    prob_ptr,
    # output
    found_ptr,
    odds_ptr,
    # sizes
    num_contexts,
    width,
    judged_at,
    drafted_at,
    step_at,
    vocab,
    num_pieces,
    pool_vocab,
    row_stride,
    position_stride,
    draft_stride,
    length_stride,
    forced_stride,
    table_stride,
    slot_stride,
    depth,
    # constants
    PIECE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    HAS_EDITS: tl.constexpr,
    HAS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One (row of a generation, piece): what the residual and the target behind ``offset`` drafts
    have there. The first piece leaves the joint odds of these drafts, and whether they stand each
    by its own: 1 while they do, 0 behind the first that falls; -1 behind one that is absent.
    Without ``HAS_BLOCK`` nobody asks for block verification, which alone reads joint odds."""
    grid_dependency_synchronize(PDL)
    of_all = tl.program_id(0) // num_pieces
    piece = tl.program_id(0) % num_pieces
    row = (of_all + num_contexts).to(tl.int64)
    request, offset, slot = place_of(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride
    )
    judged_by = tl.load(slot + judged_at)
    options = options_of(slot, vocab)
    if _is_judged(judged_by, HAS_BLOCK) & (options.temperature >= GREEDY_BELOW):
        batch = Batch(
            logits_ptr,
            row_stride,
            vocab,
            logits_ptr,
            cut_ptr,
            Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab),
        )
        generation = request - num_contexts
        drafts = draft_ptr + generation.to(tl.int64) * draft_stride
        length = width - 1
        if HAS_LENGTHS:
            length = tl.minimum(
                tl.load(length_ptr + generation * length_stride).to(tl.int32), length
            )
        is_plain = tl.load(slot + drafted_at) == DRAFTED_PLAIN
        place = tl.load(slot_ptr + request * slot_stride).to(tl.int64)
        probs = prob_ptr + place * depth * vocab
        step = step_of(slot, judged_at, step_at)
        noise = Noise(slot, request, step, position_ptr, position_stride)

        odds = 1.0
        passed = 1.0
        joint = 1.0
        stands = 1.0
        for number in range(0, offset + 1):
            joint = odds
            stands = passed
            told = tl.load(drafts + number, mask=number < width - 1, other=-1)
            is_there = (number < length) & (told >= 0) & (told < vocab) & (passed >= 0)
            token = tl.where(is_there, told, 0).to(tl.int32)
            only = only_of(forced_ptr, row - offset + number, forced_stride, HAS_FORCED)
            is_drawn = is_plain & HAS_PROBS & (only < 0)
            kept = kept_of(batch, row - offset + number, slot, drafts, number, only)
            p = share_of(kept, score_of(kept, token, is_there, False, HAS_EDITS))
            q = draft_share(probs + number * vocab, token, token, is_drawn, is_there)
            # of a row without any value, where a token stands that nobody drew
            is_there = is_there & (q > 0)
            if HAS_BLOCK:
                odds = next_odds(odds, p, q)
            stands_too = stands_alone(chance_of(noise, number), p, q)
            passed = tl.where(is_there, tl.where(stands_too, passed, 0.0), -1.0)
        if piece == 0:
            if HAS_BLOCK:
                tl.store(odds_ptr + of_all * 2, joint)
            tl.store(odds_ptr + of_all * 2 + 1, stands)
        # of rejection the row behind all that stand is known, of block verification it is not yet
        is_asked = (stands > 0) & (passed <= 0)
        scale = 1.0
        if HAS_BLOCK:
            by_block = judged_by == JUDGED_BY_BLOCK
            is_asked = tl.where(by_block, stands >= 0, is_asked)
            scale = tl.where(by_block, joint, 1.0)
        if is_asked:
            only = only_of(forced_ptr, row, forced_stride, HAS_FORCED)
            is_drawn = is_plain & HAS_PROBS & (only < 0)
            kept = kept_of(batch, row, slot, drafts, offset, only)
            columns = piece * PIECE + tl.arange(0, PIECE)
            inside = columns < vocab
            score = score_of(kept, columns, inside, False, HAS_EDITS)
            told = tl.load(drafts + offset, mask=offset < width - 1, other=-1).to(tl.int32)
            has_draft = offset < width - 1
            q = draft_share(probs + offset * vocab, columns, told, is_drawn, inside & has_draft)
            rest = tl.maximum(scale * share_of(kept, score) - q, 0.0)
            role = tl.full([], RESIDUAL_ROLE, tl.int32)
            stream = stream_of(
                slot,
                request,
                offset,
                role,
                step,
                position_ptr,
                position_stride,
                position_ptr,
                0,
                False,
            )
            added = gumbel(words_of(columns, stream))
            of_rest = tl.where(rest > 0, tl.log(rest) + added, float("-inf"))
            of_target = tl.where(score > float("-inf"), score + added, float("-inf"))
            best_rest = tl.max(of_rest, axis=0)
            best_target = tl.max(of_target, axis=0)
            first_rest = tl.min(
                tl.where((of_rest == best_rest) & (rest > 0), columns, NO_COLUMN), axis=0
            )
            first_target = tl.min(
                tl.where((of_target == best_target) & (score > float("-inf")), columns, NO_COLUMN),
                axis=0,
            )
            out = found_ptr + tl.program_id(0).to(tl.int64) * FOUND
            tl.store(out, tl.sum(rest, axis=0))
            tl.store(out + 1, best_rest)
            tl.store(out + 2, first_rest.to(tl.float32, bitcast=True))
            tl.store(out + 3, best_target)
            tl.store(out + 4, first_target.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=SHIFTING)
def finish_kernel(
    # inputs
    position_ptr,
    slot_ptr,
    choice_ptr,
    found_ptr,
    odds_ptr,
    # read and written
    table_ptr,
    # outputs
    match_ptr,
    chosen_ptr,
    # sizes
    num_contexts,
    width,
    judged_at,
    step_at,
    num_pieces,
    position_stride,
    choice_stride,
    table_stride,
    slot_stride,
    # constants
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    HAS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One generation, or what stands in front of all: how far its drafts stand, and its choices."""
    grid_dependency_synchronize(PDL)
    found = Found(found_ptr, num_pieces, tl.arange(0, PIECES))
    offsets = tl.arange(0, ROWS)
    generation = tl.program_id(0)
    request = num_contexts + generation
    first = num_contexts + generation * width
    inside = offsets < width
    slot = table_ptr + tl.load(slot_ptr + request * slot_stride).to(tl.int64) * table_stride
    judged_by = tl.load(slot + judged_at)
    temperature = options_of(slot, NO_COLUMN).temperature
    chosen = tl.load(choice_ptr + (first + offsets) * choice_stride, mask=inside, other=0)
    matches = tl.full([], -1, tl.int32)
    if _is_judged(judged_by, HAS_BLOCK) & (temperature >= GREEDY_BELOW):
        step = step_of(slot, judged_at, step_at)
        noise = Noise(slot, request, step, position_ptr, position_stride)
        behind = generation * width
        stands = tl.load(odds_ptr + (behind + offsets) * 2 + 1, mask=inside, other=-1.0)
        present = tl.sum((stands >= 0).to(tl.int32), axis=0) - 1
        matches = matches_alone(stands)
        if HAS_BLOCK and judged_by == JUDGED_BY_BLOCK:
            matches = matches_of_block(odds_ptr, found, noise, behind, present)
        at = behind + matches
        mass = mass_of(found, at)
        mass = tl.where(matches < present, mass, 0.0)
        token = best_of(found, at, tl.where(mass > 0, 1, 3))
        token = tl.where(token == NO_COLUMN, -1, token)
        chosen = tl.where(offsets == matches, token, chosen)
    tl.store(match_ptr + generation, matches)
    tl.store(chosen_ptr + first + offsets, chosen, mask=inside)
    tl.debug_barrier()
    tl.store(slot + step_at, tl.load(slot + step_at) + 1)
    # contexts keep what they have
    if generation == 0:
        for start in range(0, num_contexts, ROWS):
            rest = start + offsets
            here = rest < num_contexts
            held = tl.load(choice_ptr + rest * choice_stride, mask=here, other=0)
            tl.store(chosen_ptr + rest, held, mask=here)
