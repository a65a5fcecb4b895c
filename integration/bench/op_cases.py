"""Single ops of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from integration.bench.case import Case, RandomInputs, Shape, Trial
from mtp_plugin.ops.acceptance import AcceptanceRules, RelaxedRule, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft_inputs import (
    DraftWindows,
    History,
    TargetRows,
    advance_and_build_inputs,
)
from mtp_plugin.ops.state_rollback import mamba_state_selective_copy
from mtp_plugin.ops.step import SlotRows, StepLayout
from mtp_plugin.requests.columns import REQUEST_COLUMNS, SlotColumn, TableColumns

TOPK, DELTA = 10, 0.6
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


STATE, TINY_STATE = (64, 64, 128), (2, 4, 8)
STATE_COPIES = 512
"""Number of layers times requests of a full state copy: 1 GiB read and written."""


def op_cases(shape: Shape, device: torch.device) -> list[Case]:
    """Return the ops on a batch of generations."""
    ids, target = shape.rows * INT, shape.rows * shape.row_bytes
    strict = partial(_trial, _strict, shape, device)
    relaxed = partial(_trial, _relaxed, shape, device)
    return [
        Case("accept/strict", shape, target + ids, strict),
        Case("accept/relaxed", shape, target + ids, relaxed),
        first_pass_case("first-pass/vanilla", shape, device, Mixture(0, 0)),
    ]


def first_pass_case(name: str, shape: Shape, device: torch.device, mixture: Mixture) -> Case:
    """Return history and draft inputs of the vanilla worker; the batch size counts prompts too."""
    generations = shape.batch - mixture.num_contexts
    states = generations * (3 * shape.k + 2) + 2 * mixture.num_tokens
    states += mixture.num_contexts * shape.k
    prepare = partial(_trial, partial(_vanilla, mixture), shape, device)
    return Case(name, shape, states * shape.state_bytes, prepare)


def state_copy_case(shape: Shape, device: torch.device, state: tuple[int, ...]) -> Case:
    """Return the copy of accepted recurrent states, for 8 layers, or fewer with a large batch."""
    num_layers = max(1, min(8, STATE_COPIES // shape.batch))
    moved = 2 * num_layers * shape.batch * 2 * torch.Size(state).numel()
    prepare = partial(_trial, partial(_state_copy, state, num_layers), shape, device)
    return Case("state-copy", shape, moved, prepare)


def _trial(
    build: Callable[[Shape, RandomInputs], Trial], shape: Shape, device: torch.device, seed: int
) -> Trial:
    return build(shape, RandomInputs(seed, device))


def _generations(shape: Shape, rng: RandomInputs) -> StepLayout:
    none = torch.empty(0, dtype=torch.int32, device=rng.device)
    return StepLayout((), shape.batch, shape.k, none)


def _strict(shape: Shape, rng: RandomInputs) -> Trial:
    layout = _generations(shape, rng)
    logits = rng.logits(shape.rows, shape)
    drafts = rng.drafts(logits, shape)

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        return _accepted(layout, logits, drafts, AcceptanceRules(), backend)

    return Trial(run)


def _accepted(
    layout: StepLayout,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    rules: AcceptanceRules,
    backend: Backend,
) -> dict[str, torch.Tensor]:
    last = torch.empty(layout.num_generations, dtype=torch.int32, device=logits.device)
    found = accept(layout, logits, drafts, rules, last_tokens=last, backend=backend)
    return {
        "tokens": found.tokens,
        "num_accepted": found.num_accepted,
        "status": found.status,
        "last_tokens": last,
    }


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
        return _accepted(layout, logits, drafts, rules, backend)

    return Trial(run, {"slots": table})


def _vanilla(mixture: Mixture, shape: Shape, rng: RandomInputs) -> Trial:
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


def _state_copy(state: tuple[int, ...], num_layers: int, shape: Shape, rng: RandomInputs) -> Trial:
    batch, width = shape.batch, shape.k + 1
    after = rng.states(num_layers, batch, width, *state)
    current = rng.states(num_layers, batch, *state)
    prefill_status = torch.zeros(batch, dtype=torch.int32, device=rng.device)
    slots, counts = rng.permutation(batch), rng.integers(0, width, batch)

    def run(backend: Backend) -> dict[str, torch.Tensor]:
        mamba_state_selective_copy(
            after, current, prefill_status, slots, counts, num_layers, backend=backend
        )
        return {}

    return Trial(run, {"current_states": current})
