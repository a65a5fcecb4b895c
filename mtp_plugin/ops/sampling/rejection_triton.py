"""Triton implementation of `rejection`: one launch per draft, two launches per verification.

While drafting:

1. `keep_draft_probs_kernel`, grid [R * blocks]: recompute the truncated distribution q of each
   independently sampled draft from its logits and truncation; write it to the slot's row of the
   pool, at token ids of the whole vocabulary.

To verify:

2. `rejection_scan_kernel`, grid [G * (K+1) * blocks], for the row after i drafts of a generation:

   a. Every program computes p, q and the test of drafts 1 to i by itself, K values at most, which
      saves a launch. The program of the first block writes the result for phase 3.
   b. Under rejection only the row after the accepted drafts goes on, under block verification each.
   c. Read a block: p from the target's logits and truncation, q from the pool; write the mass of
      the recovered distribution max(P p - q, 0), its highest noisy score, and the target's.
3. `rejection_finish_kernel`, grid [G]: count the accepted drafts (block verification tests them
   here, as it needs the recovered mass of every row), then merge the blocks of the row after them
   and write its token: sampled from the recovered distribution, or from p if that is empty.
   Program 0 copies the target tokens of contexts. The request's draft step advances.

Distributions are never stored but for q: p is recomputed wherever it is needed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mtp_plugin.ops.launching import expect_reachable
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.logit_rows.processing_triton import Pools
from mtp_plugin.ops.logit_rows.rows_triton import GREEDY_BELOW, NO_COLUMN, load_slot, locate_row
from mtp_plugin.ops.programmatic_launch import grid_dependency_synchronize, pdl_options
from mtp_plugin.ops.sampling.row_triton import (
    DRAFTED_PLAIN,
    VERIFIED_BY_BLOCK,
    VERIFIED_BY_REJECTION,
    Batch,
    gumbel,
    load_forced_id,
    load_ids,
    load_options,
    load_step,
    load_stream,
    load_truncated_row,
    philox_of_ids,
    truncated_probs,
    truncated_scores,
    uniform,
)
from mtp_plugin.ops.sampling.types import (
    DRAFT_COLUMNS,
    STEP_COLUMN,
    ProposedDrafts,
    RejectionResult,
    Role,
    TargetSamples,
)
from mtp_plugin.ops.step import SlotRows

BLOCK = 2048
"""Columns per program."""
WARPS = 8
ACCEPTANCE_ROLE = tl.constexpr(int(Role.ACCEPTANCE))
PARTIAL_SIZE = tl.constexpr(5)
"""Partial results of a block: the mass of the recovered distribution, its best noisy score and that
score's column, and the latter two for the target."""
RECOVERED_ROLE = tl.constexpr(int(Role.RECOVERED))

UNSPECIALIZED = [
    "num_contexts",
    "width",
    "column",
    "verification_column",
    "draft_sampling_column",
    "step_column",
    "num_blocks",
]
UNSPECIALIZED += ["pool_vocab", "position_stride", "ahead_stride", "draft_stride", "table_stride"]
UNSPECIALIZED += ["slot_stride", "num_slots", "length_stride", "forced_stride", "max_drafts"]
UNALIGNED = ["position_ptr", "ahead_ptr", "draft_ptr", "table_ptr", "slot_ptr", "length_ptr"]
UNALIGNED += ["forced_ptr"]
"""Arguments that differ between batches: no binary is specialized on them."""


class Noise(NamedTuple):
    """Noise that tests a generation's draft tokens."""

    slot_row_ptr: tl.tensor  # [W] int32
    request: tl.tensor
    step: tl.tensor
    position_ptr: tl.tensor  # [R] integer
    position_stride: tl.tensor


class Partials(NamedTuple):
    """Partial results of blocks, by row."""

    ptr: tl.tensor  # [G * width, num_blocks, PARTIAL_SIZE] float32
    num_blocks: tl.tensor
    blocks: tl.tensor  # indices, padded to a power of two


@triton.jit
def draft_prob(prob_ptr, token, draft, has_probs, inside):
    """q of a token; a draft that was not sampled has q = 1."""
    q = tl.load(prob_ptr + token, mask=inside & has_probs, other=0.0)
    return tl.where(has_probs, q, (token == draft).to(tl.float32))


@triton.jit
def acceptance_uniform(noise, offset):
    """The uniform number that tests the draft token after ``offset`` others."""
    stream = load_stream(
        noise.slot_row_ptr,
        noise.request,
        offset,
        tl.full([], ACCEPTANCE_ROLE, tl.int32),
        noise.step,
        noise.position_ptr,
        noise.position_stride,
        noise.position_ptr,
        0,
        False,
    )
    return uniform(philox_of_ids(tl.full([], 0, tl.int32), stream))


@triton.jit
def sum_recovered(partials, row):
    """The mass of the recovered distribution of a row."""
    ptrs = partials.ptr + (row.to(tl.int64) * partials.num_blocks + partials.blocks) * PARTIAL_SIZE
    return tl.sum(tl.load(ptrs, mask=partials.blocks < partials.num_blocks, other=0.0), axis=0)


@triton.jit
def argmax_column(partials, row, field):
    """The column of the best score of all blocks, the lowest of equals."""
    ptrs = (
        partials.ptr
        + (row.to(tl.int64) * partials.num_blocks + partials.blocks) * PARTIAL_SIZE
        + field
    )
    inside = partials.blocks < partials.num_blocks
    scores = tl.load(ptrs, mask=inside, other=float("-inf"))
    columns = tl.load(ptrs + 1, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    best = tl.max(scores, axis=0)
    is_best = (scores == best) & (scores > float("-inf"))
    return tl.min(tl.where(is_best, columns, NO_COLUMN), axis=0)


@triton.jit
def is_accepted(u, p, q):
    """Accept a draft token with probability min(1, p / q); ``u`` is uniform."""
    return u * q < p


@triton.jit
def rejection_matches(accepted):
    """How many draft tokens are accepted, from the states after 0, 1, ... of them."""
    return tl.sum((accepted > 0).to(tl.int32), axis=0) - 1


@triton.jit
def next_joint_prob(joint, p, q):
    """min(joint * p / q, 1); 0 where p is 0."""
    weight = joint * p
    return tl.where(weight >= q, tl.where(weight > 0, 1.0, 0.0), tl.div_rn(weight, q))


@triton.jit
def block_matches(accept_ptr, partials, noise, first_row, num_drafts):
    """How many of the ``num_drafts`` draft tokens block verification accepts.

    ``first_row`` is the generation's row after no draft tokens.
    """
    matches = tl.full([], 0, tl.int32)
    for num_accepted in range(1, num_drafts + 1):
        joint = tl.load(accept_ptr + (first_row + num_accepted) * 2)
        mass = sum_recovered(partials, first_row + num_accepted)
        accept_prob = tl.where(mass > 0, tl.div_rn(mass, mass + (1.0 - joint)), 0.0)
        accept_prob = tl.where(num_accepted == num_drafts, joint, accept_prob)
        matches = tl.where(
            acceptance_uniform(noise, num_accepted - 1) <= accept_prob, num_accepted, matches
        )
    return matches


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def keep_draft_probs_kernel(
    # inputs
    logits_ptr,  # [R, V] floating: one row per request
    vocab_ids_ptr,  # HAS_IDS: [V] int32: token id of each column
    draft_ptr,  # HAS_DRAFTS: [R, >= column] integer: earlier drafts
    table_ptr,  # [S, W] int32
    slot_ptr,  # [>= R] integer: each request's row of the table
    bias_ptr,  # HAS_PROCESSING: [P, pool_vocab] float32
    allowed_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab) + 1] int32: a bit per id, then a count
    count_ptr,  # HAS_PROCESSING: [P, pool_vocab] int16, unsigned: token counts
    seen_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab)] int32: a bit per id
    truncation_ptr,  # [R, TRUNCATION_SIZE] float32
    # output
    prob_ptr,  # [S, max_drafts, prob_vocab] float32
    # sizes
    column,  # index of the draft
    draft_sampling_column,  # offset in a row of the table
    vocab,  # V
    num_blocks,  # of a row
    pool_vocab,  # vocabulary of the pools
    row_stride,
    draft_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    max_drafts,
    prob_vocab,  # whole vocabulary
    # constants
    BLOCK: tl.constexpr,  # columns per program
    HAS_IDS: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (row, block): the distribution of an independently sampled draft."""
    grid_dependency_synchronize(PDL)
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    block = tl.program_id(0) % num_blocks
    slot_id = load_slot(slot_ptr, slot_stride, row, num_slots)
    slot_row_ptr = table_ptr + slot_id * table_stride
    options = load_options(slot_row_ptr, vocab)
    is_plain = tl.load(slot_row_ptr + draft_sampling_column) == DRAFTED_PLAIN
    if is_plain & (options.temperature >= GREEDY_BELOW):
        batch = Batch(
            logits_ptr,
            row_stride,
            vocab,
            vocab_ids_ptr,
            truncation_ptr,
            Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab),
        )
        none = tl.full([], -1, tl.int32)
        truncated = load_truncated_row(
            batch,
            row,
            slot_row_ptr,
            draft_ptr + row * draft_stride,
            column if HAS_DRAFTS else 0,
            none,
        )
        columns = block * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocab
        score = truncated_scores(truncated, columns, inside, HAS_IDS, HAS_PROCESSING)
        ids = load_ids(truncated.logit_row, columns, inside, HAS_IDS)
        out_ptr = prob_ptr + (slot_id * max_drafts + column) * prob_vocab
        tl.store(out_ptr + ids, truncated_probs(truncated, score), mask=inside)


@triton.jit
def _is_verified(verified_by, HAS_BLOCK: tl.constexpr):
    """Whether a sampling request uses rejection or block verification."""
    return (verified_by == VERIFIED_BY_REJECTION) | ((verified_by == VERIFIED_BY_BLOCK) & HAS_BLOCK)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def rejection_scan_kernel(
    # inputs
    logits_ptr,  # [N, V] floating
    position_ptr,  # [R] integer: position of each request's first row
    draft_ptr,  # [G, >= width - 1] integer
    length_ptr,  # HAS_LENGTHS: [G] integer: drafts from here on are absent
    forced_ptr,  # HAS_FORCED: [N] integer: forced ids, -1: none
    table_ptr,  # [S, W] int32
    slot_ptr,  # [>= R] integer: each request's row of the table
    bias_ptr,  # HAS_PROCESSING: [P, pool_vocab] float32
    allowed_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab) + 1] int32: a bit per id, then a count
    count_ptr,  # HAS_PROCESSING: [P, pool_vocab] int16, unsigned: token counts
    seen_ptr,  # HAS_PROCESSING: [P, num_words(pool_vocab)] int32: a bit per id
    truncation_ptr,  # [N, TRUNCATION_SIZE] float32
    prob_ptr,  # HAS_PROBS: [S, max_drafts, V] float32: distributions of drafts
    # output
    partial_ptr,  # [G * width, num_blocks, PARTIAL_SIZE] float32
    accept_ptr,  # [G * width, 2] float32: joint probability and state of the drafts before
    # sizes
    num_contexts,  # C
    width,  # rows per generation
    verification_column,  # offset in a row of the table
    draft_sampling_column,  # offset in a row of the table
    step_column,  # offset in a row of the table
    vocab,  # V
    num_blocks,  # of a row
    pool_vocab,  # vocabulary of the pools
    row_stride,
    position_stride,
    draft_stride,
    length_stride,
    forced_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    max_drafts,
    # constants
    BLOCK: tl.constexpr,  # columns per program
    HAS_LENGTHS: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    HAS_PROCESSING: tl.constexpr,
    HAS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per (row of a generation, block): partial results of the recovered distribution
    and the target after ``offset`` draft tokens.

    The program of the first block writes the joint acceptance probability of these draft tokens,
    which block verification reads, and their state under rejection: 1 if all are accepted, 0 after
    the first rejected one, -1 after an absent one. Without ``HAS_BLOCK`` no request uses block
    verification.
    """
    grid_dependency_synchronize(PDL)
    generation_row = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    row = (generation_row + num_contexts).to(tl.int64)
    request, offset, slot_row_ptr = locate_row(
        row, num_contexts, width, table_ptr, table_stride, slot_ptr, slot_stride, num_slots
    )
    verified_by = tl.load(slot_row_ptr + verification_column)
    options = load_options(slot_row_ptr, vocab)
    if _is_verified(verified_by, HAS_BLOCK) & (options.temperature >= GREEDY_BELOW):
        batch = Batch(
            logits_ptr,
            row_stride,
            vocab,
            logits_ptr,
            truncation_ptr,
            Pools(bias_ptr, allowed_ptr, count_ptr, seen_ptr, pool_vocab),
        )
        generation = request - num_contexts
        request_drafts_ptr = draft_ptr + generation.to(tl.int64) * draft_stride
        length = width - 1
        if HAS_LENGTHS:
            length = tl.minimum(
                tl.load(length_ptr + generation * length_stride).to(tl.int32), length
            )
        is_plain = tl.load(slot_row_ptr + draft_sampling_column) == DRAFTED_PLAIN
        slot_id = load_slot(slot_ptr, slot_stride, request, num_slots)
        request_probs_ptr = prob_ptr + slot_id * max_drafts * vocab
        step = load_step(slot_row_ptr, verification_column, step_column)
        noise = Noise(slot_row_ptr, request, step, position_ptr, position_stride)

        next_joint = 1.0
        next_accepted = 1.0
        joint = 1.0
        accepted = 1.0
        for draft_index in range(0, offset + 1):
            joint = next_joint
            accepted = next_accepted
            draft = tl.load(
                request_drafts_ptr + draft_index, mask=draft_index < width - 1, other=-1
            )
            is_present = (
                (draft_index < length) & (draft >= 0) & (draft < vocab) & (next_accepted >= 0)
            )
            token = tl.where(is_present, draft, 0).to(tl.int32)
            forced_id = load_forced_id(
                forced_ptr, row - offset + draft_index, forced_stride, HAS_FORCED
            )
            has_probs = is_plain & HAS_PROBS & (forced_id < 0)
            truncated = load_truncated_row(
                batch,
                row - offset + draft_index,
                slot_row_ptr,
                request_drafts_ptr,
                draft_index,
                forced_id,
            )
            p = truncated_probs(
                truncated, truncated_scores(truncated, token, is_present, False, HAS_PROCESSING)
            )
            q = draft_prob(
                request_probs_ptr + draft_index * vocab, token, token, has_probs, is_present
            )
            # q = 0: the draft row had no finite value, so the token was not sampled
            is_present = is_present & (q > 0)
            if HAS_BLOCK:
                next_joint = next_joint_prob(next_joint, p, q)
            accepts = is_accepted(acceptance_uniform(noise, draft_index), p, q)
            next_accepted = tl.where(is_present, tl.where(accepts, next_accepted, 0.0), -1.0)
        if block == 0:
            if HAS_BLOCK:
                tl.store(accept_ptr + generation_row * 2, joint)
            tl.store(accept_ptr + generation_row * 2 + 1, accepted)
        # rejection needs only the row after the accepted drafts; block verification, all rows
        is_active = (accepted > 0) & (next_accepted <= 0)
        scale = 1.0
        if HAS_BLOCK:
            by_block = verified_by == VERIFIED_BY_BLOCK
            is_active = tl.where(by_block, accepted >= 0, is_active)
            scale = tl.where(by_block, joint, 1.0)
        if is_active:
            forced_id = load_forced_id(forced_ptr, row, forced_stride, HAS_FORCED)
            has_probs = is_plain & HAS_PROBS & (forced_id < 0)
            truncated = load_truncated_row(
                batch, row, slot_row_ptr, request_drafts_ptr, offset, forced_id
            )
            columns = block * BLOCK + tl.arange(0, BLOCK)
            inside = columns < vocab
            score = truncated_scores(truncated, columns, inside, False, HAS_PROCESSING)
            draft = tl.load(request_drafts_ptr + offset, mask=offset < width - 1, other=-1).to(
                tl.int32
            )
            has_draft = offset < width - 1
            q = draft_prob(
                request_probs_ptr + offset * vocab, columns, draft, has_probs, inside & has_draft
            )
            recovered = tl.maximum(scale * truncated_probs(truncated, score) - q, 0.0)
            role = tl.full([], RECOVERED_ROLE, tl.int32)
            stream = load_stream(
                slot_row_ptr,
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
            gumbel_noise = gumbel(philox_of_ids(columns, stream))
            recovered_scores = tl.where(
                recovered > 0, tl.log(recovered) + gumbel_noise, float("-inf")
            )
            target_scores = tl.where(score > float("-inf"), score + gumbel_noise, float("-inf"))
            best_recovered = tl.max(recovered_scores, axis=0)
            best_target = tl.max(target_scores, axis=0)
            first_recovered = tl.min(
                tl.where(
                    (recovered_scores == best_recovered) & (recovered > 0), columns, NO_COLUMN
                ),
                axis=0,
            )
            first_target = tl.min(
                tl.where(
                    (target_scores == best_target) & (score > float("-inf")), columns, NO_COLUMN
                ),
                axis=0,
            )
            out_ptr = partial_ptr + tl.program_id(0).to(tl.int64) * PARTIAL_SIZE
            tl.store(out_ptr, tl.sum(recovered, axis=0))
            tl.store(out_ptr + 1, best_recovered)
            tl.store(out_ptr + 2, first_recovered.to(tl.float32, bitcast=True))
            tl.store(out_ptr + 3, best_target)
            tl.store(out_ptr + 4, first_target.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def rejection_finish_kernel(
    # inputs
    position_ptr,  # [R] integer: position of each request's first row
    slot_ptr,  # [>= R] integer: each request's row of the table
    target_ptr,  # [N] integer: target tokens
    partial_ptr,  # [G * width, num_blocks, PARTIAL_SIZE] float32
    accept_ptr,  # [G * width, 2] float32
    # read and written
    table_ptr,  # [S, W] int32: the draft step advances
    # outputs
    num_accepted_ptr,  # [G] int32: accepted drafts, -1: another method
    token_ptr,  # [N] int32
    # sizes
    num_contexts,  # C
    width,  # rows per generation
    verification_column,  # offset in a row of the table
    step_column,  # offset in a row of the table
    num_blocks,  # of a row
    position_stride,
    target_stride,
    table_stride,
    slot_stride,
    num_slots,  # S
    # constants
    ROWS: tl.constexpr,  # a power of two >= width
    NUM_BLOCKS: tl.constexpr,  # a power of two >= num_blocks
    HAS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per generation: its number of accepted drafts and its tokens."""
    grid_dependency_synchronize(PDL)
    partials = Partials(partial_ptr, num_blocks, tl.arange(0, NUM_BLOCKS))
    offsets = tl.arange(0, ROWS)
    generation = tl.program_id(0)
    request = num_contexts + generation
    first = num_contexts + generation * width
    inside = offsets < width
    slot_row_ptr = table_ptr + load_slot(slot_ptr, slot_stride, request, num_slots) * table_stride
    verified_by = tl.load(slot_row_ptr + verification_column)
    temperature = load_options(slot_row_ptr, NO_COLUMN).temperature
    tokens = tl.load(target_ptr + (first + offsets) * target_stride, mask=inside, other=0)
    matches = tl.full([], -1, tl.int32)
    if _is_verified(verified_by, HAS_BLOCK) & (temperature >= GREEDY_BELOW):
        step = load_step(slot_row_ptr, verification_column, step_column)
        noise = Noise(slot_row_ptr, request, step, position_ptr, position_stride)
        first_row = generation * width
        accepted = tl.load(accept_ptr + (first_row + offsets) * 2 + 1, mask=inside, other=-1.0)
        num_drafts = tl.sum((accepted >= 0).to(tl.int32), axis=0) - 1
        matches = rejection_matches(accepted)
        if HAS_BLOCK and verified_by == VERIFIED_BY_BLOCK:
            matches = block_matches(accept_ptr, partials, noise, first_row, num_drafts)
        row = first_row + matches
        mass = sum_recovered(partials, row)
        mass = tl.where(matches < num_drafts, mass, 0.0)
        token = argmax_column(partials, row, tl.where(mass > 0, 1, 3))
        token = tl.where(token == NO_COLUMN, -1, token)
        tokens = tl.where(offsets == matches, token, tokens)
    tl.store(num_accepted_ptr + generation, matches)
    tl.store(token_ptr + first + offsets, tokens, mask=inside)
    tl.debug_barrier()
    tl.store(slot_row_ptr + step_column, tl.load(slot_row_ptr + step_column) + 1)
    # contexts keep their target tokens
    if generation == 0:
        for start in range(0, num_contexts, ROWS):
            context = start + offsets
            is_context = context < num_contexts
            target = tl.load(target_ptr + context * target_stride, mask=is_context, other=0)
            tl.store(token_ptr + context, target, mask=is_context)


def keep_draft_probs_triton(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    truncation: torch.Tensor,
    draft_probs: torch.Tensor,
    *,
    vocab_ids: torch.Tensor | None,
) -> None:
    """One launch, one program per row and block."""
    expect_reachable(keep_draft_probs_kernel, "logits", logits)
    num_rows, vocab = logits.shape
    num_blocks = -(-vocab // BLOCK)
    drafts = rows.drafts
    keep_draft_probs_kernel[(num_rows * num_blocks,)](
        logits,
        truncation if vocab_ids is None else vocab_ids,  # absent tensors are never read
        truncation if drafts is None else drafts,
        slots.table,
        slots.slot_ids,
        *_pools(slots, truncation),
        truncation,
        draft_probs,
        rows.column,
        slots.columns.offset(DRAFT_COLUMNS[1].name),
        vocab,
        num_blocks,
        0 if slots.pools is None else slots.pools.vocab_size,
        logits.stride(0),
        0 if drafts is None else drafts.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        slots.table.shape[0],
        draft_probs.shape[1],
        draft_probs.shape[2],
        BLOCK=BLOCK,
        HAS_IDS=vocab_ids is not None,
        HAS_DRAFTS=drafts is not None,
        HAS_PROCESSING=slots.pools is not None,
        num_warps=WARPS,
        **pdl_options(logits.device),
    )


def rejection_sample_triton(
    logits: torch.Tensor,
    rows: LogitRows,
    slots: SlotRows,
    drafts: ProposedDrafts,
    target: TargetSamples,
    *,
    by_block: bool,
) -> RejectionResult:
    """Two launches: blocks of all rows of generations, and one that finishes each generation."""
    expect_reachable(rejection_scan_kernel, "logits", logits)
    device, vocab = logits.device, logits.shape[1]
    draft_lens, draft_probs, forced_ids = drafts.lens, drafts.probs, target.forced_ids
    count, width = rows.num_requests - rows.num_contexts, rows.width
    num_blocks = -(-vocab // BLOCK)
    tokens = drafts.tokens.reshape(count, width - 1)
    if width > 1 and tokens.stride(1) != 1:
        tokens = tokens.contiguous()
    float32: dict[str, Any] = {"dtype": torch.float32, "device": device}
    partials = torch.empty(count * width * num_blocks, PARTIAL_SIZE.value, **float32)
    accept = torch.empty(count * width, 2, **float32)
    result = RejectionResult(
        torch.empty(count, dtype=torch.int32, device=device),
        torch.empty(rows.num_rows, dtype=torch.int32, device=device),
    )
    verification_column, draft_sampling_column = (
        slots.columns.offset(column.name) for column in DRAFT_COLUMNS
    )
    step_column = slots.columns.offset(STEP_COLUMN.name)
    rejection_scan_kernel[(count * width * num_blocks,)](
        logits,
        rows.positions,
        tokens if tokens.numel() else target.tokens,  # absent tensors are never read
        target.tokens if draft_lens is None else draft_lens,
        target.tokens if forced_ids is None else forced_ids,
        slots.table,
        slots.slot_ids,
        *_pools(slots, target.truncation),
        target.truncation,
        target.truncation if draft_probs is None else draft_probs,
        # outputs
        partials,
        accept,
        rows.num_contexts,
        width,
        verification_column,
        draft_sampling_column,
        step_column,
        vocab,
        num_blocks,
        0 if slots.pools is None else slots.pools.vocab_size,
        logits.stride(0),
        rows.positions.stride(0),
        tokens.stride(0),
        0 if draft_lens is None else draft_lens.stride(0),
        0 if forced_ids is None else forced_ids.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        slots.table.shape[0],
        0 if draft_probs is None else draft_probs.shape[1],
        BLOCK=BLOCK,
        HAS_LENGTHS=draft_lens is not None,
        HAS_FORCED=forced_ids is not None,
        HAS_PROBS=draft_probs is not None,
        HAS_PROCESSING=slots.pools is not None,
        HAS_BLOCK=by_block,
        num_warps=WARPS,
        **pdl_options(device),
    )
    rejection_finish_kernel[(count,)](
        rows.positions,
        slots.slot_ids,
        target.tokens,
        partials,
        accept,
        slots.table,
        # outputs
        result.num_accepted,
        result.tokens,
        rows.num_contexts,
        width,
        verification_column,
        step_column,
        num_blocks,
        rows.positions.stride(0),
        target.tokens.stride(0),
        slots.table.stride(0),
        slots.slot_ids.stride(0),
        slots.table.shape[0],
        ROWS=triton.next_power_of_2(width),
        NUM_BLOCKS=triton.next_power_of_2(num_blocks),
        HAS_BLOCK=by_block,
        num_warps=1,
        **pdl_options(device),
    )
    return result


def _pools(slots: SlotRows, missing: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The pools that logits processing reads; ``missing`` without pools."""
    pools = slots.pools
    if pools is None:
        return (missing,) * 4
    return pools.bias, pools.allowed, pools.counts, pools.seen
