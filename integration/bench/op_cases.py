"""Single ops of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from integration.bench.case import Case, Trial
from integration.bench.random_inputs import RandomInputs
from integration.bench.shapes import Shape, has_reference_sizes
from integration.bench.targets import (
    ACCEPT_RELAXED,
    ACCEPT_STRICT,
    MIXED_FIRST_PASS,
    VANILLA_FIRST_PASS,
    Target,
    graph_target,
)
from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.acceptance import AcceptanceRules, RelaxedRule, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft import propose
from mtp_plugin.ops.draft_inputs import (
    DraftWindows,
    History,
    TargetRows,
    advance_and_build_inputs,
    build_reused_inputs,
)
from mtp_plugin.ops.step import DraftOutput, SlotRows, StepLayout
from mtp_plugin.requests.columns import REQUEST_COLUMNS, SlotColumn, TableColumns

TOPK, DELTA = 10, 0.6
HIGHEST_POSITION = 131071
INT = 4
"""Bytes."""


@dataclass(frozen=True)
class Mixture:
    """The prompts of a batch that also has generations."""

    num_contexts: int
    prompt_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_contexts * self.prompt_len


MIXTURE = Mixture(4, 2048)
TINY_MIXTURE = Mixture(2, 9)


def op_cases(shape: Shape, device: torch.device) -> list[Case]:
    """Return the ops on a batch of generations."""
    at_reference = has_reference_sizes(shape)

    def target(bounds: dict[int, int]) -> Target | None:
        return graph_target(bounds, shape.batch) if at_reference else None

    ids = shape.rows * INT
    return [
        Case(
            name="accept/strict",
            shape=shape,
            bytes_read=shape.target_bytes,
            bytes_written=ids,
            prepare=lambda seed: _strict(shape, RandomInputs(seed, device)),
            target=target(ACCEPT_STRICT),
        ),
        Case(
            name="accept/relaxed",
            shape=shape,
            bytes_read=shape.target_bytes,
            bytes_written=ids,
            prepare=lambda seed: _relaxed(shape, RandomInputs(seed, device)),
            target=target(ACCEPT_RELAXED),
        ),
        first_pass_case("first-pass/vanilla", shape, device, None, target(VANILLA_FIRST_PASS)),
        Case(
            name="first-pass/eagle",
            shape=shape,
            bytes_read=3 * ids,
            bytes_written=ids + 2 * 8 * shape.batch,
            prepare=lambda seed: _eagle(shape, RandomInputs(seed, device)),
        ),
        Case(
            name="draft/propose",
            shape=shape,
            bytes_read=shape.draft_bytes // shape.k,
            bytes_written=3 * INT * shape.batch,
            prepare=lambda seed: _propose(shape, RandomInputs(seed, device)),
        ),
    ]


def mixed_case(shape: Shape, device: torch.device, mixture: Mixture) -> Case:
    """Return history and draft inputs of prompts and generations in one batch.

    Args:
        shape: sizes; the batch size counts prompts and generations.
    """
    as_targeted = has_reference_sizes(shape) and mixture == MIXTURE and shape.batch == 64
    target = MIXED_FIRST_PASS if as_targeted else None
    return first_pass_case("first-pass/mixed", shape, device, mixture, target)


def first_pass_case(
    name: str, shape: Shape, device: torch.device, mixture: Mixture | None, target: Target | None
) -> Case:
    """Return history and draft inputs of the vanilla worker."""
    mixture = mixture or Mixture(0, 0)
    generations = (shape.batch - mixture.num_contexts) * shape.state_bytes
    prompts = mixture.num_tokens * shape.state_bytes
    pools = mixture.num_contexts * shape.k * shape.state_bytes
    return Case(
        name=name,
        shape=shape,
        bytes_read=generations * (shape.k + 1) + prompts,
        bytes_written=generations * (2 * shape.k + 1) + prompts + pools,
        prepare=lambda seed: _vanilla(shape, RandomInputs(seed, device), mixture),
        target=target,
    )


def _generations(shape: Shape, rng: RandomInputs) -> StepLayout:
    none = torch.empty(0, dtype=torch.int32, device=rng.device)
    return StepLayout((), shape.batch, shape.k, none)


def _strict(shape: Shape, rng: RandomInputs) -> Trial:
    layout = _generations(shape, rng)
    logits = rng.logits(shape.rows, shape)
    drafts = rng.drafts(logits, shape)

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        last = torch.empty(shape.batch, dtype=torch.int32, device=rng.device)
        accepted = accept(layout, logits, drafts, last_tokens=last, backend=backend)
        return {
            "tokens": accepted.tokens,
            "num_accepted": accepted.num_accepted,
            "status": accepted.status,
            "last_tokens": last,
        }

    return Trial(run)


def _relaxed(shape: Shape, rng: RandomInputs) -> Trial:
    """All requests think, and stay in that phase."""
    logits = rng.logits(shape.rows, shape)
    topk = min(TOPK, shape.vocab)
    # the thinking tokens are never chosen
    logits[:, -2:] = -20
    drafts = rng.drafts(logits, shape, best_of=topk)
    batch, device = shape.batch, rng.device
    in_force = SlotColumn("delta", float, DELTA)
    columns = TableColumns(
        (
            *REQUEST_COLUMNS,
            in_force,
            SlotColumn("thinking", int, 1),
            SlotColumn("relaxed_topk", int, topk),
            SlotColumn("relaxed_limit", float, DELTA),
        )
    )
    table = torch.tensor([columns.row({})] * (batch + 2), dtype=torch.int32, device=device)
    rule = RelaxedRule(
        slots=SlotRows(table, rng.permutation(batch + 2)[:batch], columns),
        delta_in_force=table[:, columns.offset(in_force.name)].view(torch.float32),
        begin_token=shape.vocab - 2,
        end_token=shape.vocab - 1,
    )
    layout, rules = _generations(shape, rng), AcceptanceRules(relaxed=rule)

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        last = torch.empty(batch, dtype=torch.int32, device=device)
        result = accept(layout, logits, drafts, rules, last_tokens=last, backend=backend)
        return {
            "tokens": result.tokens,
            "num_accepted": result.num_accepted,
            "status": result.status,
            "last_tokens": last,
        }

    return Trial(run, {"slots": table})


def _vanilla(shape: Shape, rng: RandomInputs, mixture: Mixture) -> Trial:
    batch, k, device = shape.batch, shape.k, rng.device
    num_contexts, num_prompt_rows = mixture.num_contexts, mixture.num_tokens
    num_generations = batch - num_contexts
    rows = num_prompt_rows + num_generations * (k + 1)
    slots = rng.permutation(batch + 2)[:batch]
    tokens_pool = rng.integers(0, shape.vocab, batch + 2, k)
    states_pool = rng.states(batch + 2, k, shape.hidden)
    input_ids = rng.integers(0, shape.vocab, rows)
    hidden_states = rng.states(rows, shape.hidden)
    lens = rng.integers(100, 4000, num_generations, dtype=torch.int64)
    prompt = torch.arange(mixture.prompt_len, device=device).repeat(num_contexts)
    steps = lens.unsqueeze(1) + torch.arange(k + 1, device=device)
    positions = torch.cat([prompt, steps.reshape(-1)])
    num_accepted = rng.integers(1, k + 2, batch)
    num_accepted[:num_contexts] = 1
    # a column of the next tokens, as a worker hands it over
    next_tokens = rng.integers(0, shape.vocab, batch, k + 1)
    chunk_lens = [mixture.prompt_len] * num_contexts
    context_lens = torch.tensor(chunk_lens, dtype=torch.int32, device=device)
    successors = rng.integers(0, shape.vocab, num_contexts) if num_contexts else None
    layout = StepLayout(tuple(chunk_lens), num_generations, k, context_lens, positions)
    history = History(tokens_pool, states_pool, slots)
    target_rows = TargetRows(input_ids, hidden_states, successors)
    windows = DraftWindows(window=k + 1, history_lens=[0] * num_contexts)

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        first = advance_and_build_inputs(
            layout,
            history,
            target_rows,
            num_accepted,
            next_tokens[:, 0],
            windows,
            backend=backend,
        )
        # the spare rows after the ids belong to later depths
        return {
            "ids": first.ids[: first.positions.shape[0]],
            "positions": first.positions,
            "states": first.states,
            "last_rows": first.last_rows,
        }

    return Trial(run, {"past_tokens": tokens_pool, "past_states": states_pool})


def _eagle(shape: Shape, rng: RandomInputs) -> Trial:
    batch, k, device = shape.batch, shape.k, rng.device
    num_accepted = rng.integers(1, k + 2, batch)
    tokens = rng.integers(0, shape.vocab, batch, k + 1)
    is_unused = torch.arange(k + 1, device=device) >= num_accepted.unsqueeze(1)
    tokens = tokens.masked_fill(is_unused, -1)
    input_ids = rng.integers(0, shape.vocab, shape.rows)
    lens = rng.integers(100, 4000, batch, dtype=torch.int64)
    positions = (lens.unsqueeze(1) + torch.arange(k + 1, device=device)).reshape(-1)
    hidden_states = rng.states(shape.rows, shape.hidden)
    context_lens = torch.empty(0, dtype=torch.int32, device=device)
    layout = StepLayout((), batch, k, context_lens, positions)
    target_rows = TargetRows(input_ids, hidden_states)

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        first = build_reused_inputs(
            layout,
            target_rows,
            tokens,
            num_accepted,
            max_position=HIGHEST_POSITION,
            backend=backend,
        )
        if first.next_positions is None:
            raise TensorContractError("the first pass gave no positions for the second")
        # states and positions are the step's own
        return {
            "ids": first.ids,
            "last_rows": first.last_rows,
            "next_positions": first.next_positions,
        }

    return Trial(run)


def _propose(shape: Shape, rng: RandomInputs) -> Trial:
    """The first draft of each request, written to its three places."""
    batch, k = shape.batch, shape.k
    logits = rng.logits(batch, shape)
    drafts = rng.integers(0, shape.vocab, batch, k)
    next_tokens = rng.integers(0, shape.vocab, batch, k + 1)
    shifted = rng.integers(0, shape.vocab, shape.rows + k - 1)
    last_rows = torch.arange(batch, device=rng.device) * (k + 1) + k
    shifts = k > 1
    place = DraftOutput(
        drafts, next_tokens, 0, shifted if shifts else None, last_rows if shifts else None
    )

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        propose(logits, place, backend=backend)
        return {}

    return Trial(run, {"drafts": drafts, "next_tokens": next_tokens, "ids": shifted})
