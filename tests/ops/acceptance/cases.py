"""Steps to verify, assertions on their results, and the example that computes them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from mtp_plugin.ops.acceptance import AcceptanceRules, RelaxedRule, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import (
    PAD_TOKEN,
    STATUS_NO_FINITE_LOGIT,
    STATUS_OK,
    Accepted,
    StepLayout,
)
from mtp_plugin.requests.columns import SlotColumn
from tests.op_arguments import poisoned_memory, storage
from tests.ops.acceptance import example
from tests.ops.acceptance.margins import CLOSE, margins, undecided
from tests.ops.bits import same_bits
from tests.ops.on_device import DEVICE, POISON, poisoned
from tests.ops.slots import POISON as SLOT_POISON
from tests.ops.slots import column, held, on_copy, slot_rows

KINDS = ("strict", "relaxed", "forced", "mixed", "chosen")
"""Which rules a step has; `forced`, `mixed` and `chosen` leave some rows to the others. `chosen`:
all rules, with target tokens that are sampled in some rows and forced ids in others."""


def layout_of(num_contexts: int, num_generations: int, k: int) -> StepLayout:
    """Prompts of two rows each, of which one has logits."""
    lens = torch.full((num_contexts,), 2, dtype=torch.int32, device=DEVICE)
    return StepLayout((2,) * num_contexts, num_generations, k, lens)


def int32(items: list[Any]) -> torch.Tensor:
    return torch.tensor(items, dtype=torch.int32, device=DEVICE)


# --- the slots of relaxed requests ---

PHASE_COLUMNS = (
    SlotColumn("pool", float),
    SlotColumn("thinking", int),
    SlotColumn("relaxed_topk", int),
    SlotColumn("relaxed_limit", float),
)
POOLS = ("column", "own")
"""Memory of the delta in force: a column of the table, or a tensor that a host engine put in its
place, with other strides and another S."""


class Thinker(NamedTuple):
    """What the slot of a request has for relaxed acceptance."""

    thinking: bool = True
    topk: int = 2
    limit: float = 0.5
    stop_ids: Sequence[int] = ()
    written: float | None = None
    """The delta in force, where a host wrote it; None: as a step leaves it."""
    temperature: float = 0.0

    @property
    def in_force(self) -> float:
        if self.written is not None:
            return self.written
        return self.limit if self.thinking else 0.0


def relaxed_rule(
    thinkers: Sequence[Thinker],
    begin: int = -1,
    end: int = -1,
    *,
    seed: int = 0,
    order: int | None = None,
    pool: str = "column",
    **layout: Any,
) -> RelaxedRule:
    """A rule whose requests have random slots, in a table whose columns are in a random order.

    Args:
        seed: of the slots. order: of the columns; default: that seed.
    """
    values = [
        {
            "thinking": int(thinker.thinking),
            "relaxed_topk": thinker.topk,
            "relaxed_limit": thinker.limit,
            "stop_ids": thinker.stop_ids,
            "temperature": thinker.temperature,
        }
        for thinker in thinkers
    ]
    columns = random.Random(seed if order is None else order).sample(
        PHASE_COLUMNS, len(PHASE_COLUMNS)
    )
    slots = slot_rows(values, columns, seed=seed, **layout)
    mine = slots.of(slice(0, len(thinkers)))
    if pool == "column":
        delta = column(slots, "pool")
    else:
        size = slots.table.shape[0] + 5
        delta = torch.full((size, 3), float(SLOT_POISON), device=DEVICE)[:, 1]
    delta[mine] = torch.tensor([thinker.in_force for thinker in thinkers], device=DEVICE)
    return RelaxedRule(slots, delta, begin, end)


def copied(rule: RelaxedRule) -> RelaxedRule:
    """The same on memory of its own; a pool that is a column of the table stays one."""
    slots, pool = on_copy(rule.slots), rule.delta_in_force
    memory = storage(pool)
    if pool.untyped_storage().data_ptr() == rule.slots.table.untyped_storage().data_ptr():
        memory = slots.table.view(torch.float32)
    delta = memory.as_strided(pool.shape, pool.stride(), pool.storage_offset())
    return replace(rule, slots=slots, delta_in_force=delta)


def slot_of(rule: RelaxedRule, request: int) -> example.Slot:
    """A request's phase, read number by number."""
    slot = int(rule.slots.slot_ids[request])
    noted, limit = (held(rule.slots, request, name) for name in ("thinking", "relaxed_limit"))
    return example.Slot(noted, float(rule.delta_in_force[slot]), limit)


def example_rule(
    rule: RelaxedRule | None, request: int, *, is_chosen: bool = False
) -> example.Rule | None:
    if rule is None:
        return None
    slot = slot_of(rule, request)
    return example.Rule(
        slot.thinking,
        held(rule.slots, request, "relaxed_topk"),
        slot.delta,
        [stop for stop in held(rule.slots, request, "stop_ids") if stop >= 0],
        rule.begin_token,
        rule.end_token,
        is_chosen and held(rule.slots, request, "temperature") >= 1e-5,
    )


def assert_nothing_else_written(
    before: RelaxedRule, after: RelaxedRule, requests: Sequence[int]
) -> None:
    """But for the phases of some requests, table and pool hold what they held, gaps too."""
    expected, mine = copied(before), after.slots.slot_ids[list(requests)].long()
    column(expected.slots, "thinking")[mine] = column(after.slots, "thinking")[mine]
    expected.delta_in_force[mine] = after.delta_in_force[mine]
    assert same_bits(storage(expected.slots.table), storage(after.slots.table))
    assert same_bits(storage(expected.delta_in_force), storage(after.delta_in_force))


# --- a step ---


class Outcome(NamedTuple):
    """What a step came to."""

    accepted: Accepted
    following: torch.Tensor  # the next inputs, of which only the first column may be written
    noted: torch.Tensor | None  # [R] int32, the phase in each request's slot; without a rule None
    in_force: torch.Tensor | None  # [R] float32, and its delta


@dataclass(frozen=True)
class Case:
    """One call: tensors on the device."""

    layout: StepLayout
    logits: torch.Tensor
    drafts: torch.Tensor  # [G, K]
    relaxed: RelaxedRule
    forced: torch.Tensor  # [G], some negative
    options: dict[str, Any] = field(default_factory=dict)
    choices: torch.Tensor | None = None  # [rows]
    forced_ids: torch.Tensor | None = None  # [rows]
    first_rows: torch.Tensor | None = None  # [R]; None: rows are uniform

    def rules(self, kind: str) -> AcceptanceRules:
        return AcceptanceRules(
            relaxed=self.relaxed if kind in ("relaxed", "mixed", "chosen") else None,
            forced_matches=self.forced if kind in ("forced", "mixed", "chosen") else None,
            choices=self.choices if kind == "chosen" else None,
            forced_ids=self.forced_ids if kind == "chosen" else None,
        )

    def accept(self, rules: AcceptanceRules | str, backend: Backend, **returned: Any) -> Outcome:
        """The step on slots of its own: those of the case stay what they are."""
        if isinstance(rules, str):
            rules = self.rules(rules)
        requests, before = self.layout.num_requests, rules.relaxed
        following = poisoned(requests, self.layout.draft_len + 2, dtype=torch.int32)
        given = {
            **self.options,
            "last_tokens": following[:, 0],
            "first_rows": self.first_rows,
            **returned,
        }
        after = None if before is None else copied(before)
        rules = replace(rules, relaxed=after)
        drafts = self.drafts
        if returned:  # with the last token of every request before its drafts
            drafts = torch.nn.functional.pad(drafts, (1, 0))[:, 1:]
        with poisoned_memory():
            accepted = accept(self.layout, self.logits, drafts, rules, **given, backend=backend)
        if before is None or after is None:
            return Outcome(accepted, following, None, None)
        assert_nothing_else_written(before, after, range(requests))
        mine = after.slots.of(slice(0, requests))
        phase = column(after.slots, "thinking")[mine], after.delta_in_force[mine]
        return Outcome(accepted, following, *phase)

    def rows_of(self, request: int) -> list[int]:
        """The rows of logits of a request."""
        contexts, k = self.layout.num_contexts, self.layout.draft_len
        if self.first_rows is None:
            first = request if request < contexts else contexts + (request - contexts) * (k + 1)
            return [first] if request < contexts else list(range(first, first + k + 1))
        first = int(self.first_rows[request])
        drafts = 0 if request < contexts else int(self.options["draft_lens"][request - contexts])
        return list(range(first, first + drafts + 1))

    def uniform(self, rules: AcceptanceRules) -> tuple[torch.Tensor, AcceptanceRules]:
        """Logits and rules with K+1 rows per generation; missing rows repeat the last one."""
        if self.first_rows is None:
            return self.logits, rules
        contexts, width = self.layout.num_contexts, self.layout.step_rows
        rows = []
        for request in range(self.layout.num_requests):
            mine = self.rows_of(request)
            rows += mine if request < contexts else mine + mine[-1:] * (width - len(mine))
        ids = {
            name: None if (values := getattr(rules, name)) is None else values[rows]
            for name in ("choices", "forced_ids")
        }
        return self.logits[rows], replace(rules, **ids)

    def margins(self, rules: AcceptanceRules) -> torch.Tensor:
        logits, rules = self.uniform(rules)
        return margins(self.layout, logits, self.drafts, rules, self.options.get("draft_lens"))

    def example(self, rules: AcceptanceRules) -> list[example.Run]:
        """The runs of all requests; the phase of prompts too."""
        rows, contexts = self.logits.double().tolist(), self.layout.num_contexts
        finals, lens = self.options.get("final_context"), self.options.get("draft_lens")
        given = [None if ids is None else ids.tolist() for ids in (rules.choices, rules.forced_ids)]
        rows, chosen = example.rows_of(rows, *given), rules.choices is not None
        runs = []
        for c in range(contexts):
            rule = example_rule(rules.relaxed, c, is_chosen=chosen)
            (row,) = self.rows_of(c)
            run = example.prompt(rows[row], finals is None or bool(finals[c]))
            if rule is not None:
                run = run._replace(thinking=example.phase_after_tokens(run.tokens, rule))
            runs.append(run)
        for g, drafts in enumerate(self.drafts.tolist()):
            present = drafts if lens is None else drafts[: int(lens[g])]
            count = -1 if rules.forced_matches is None else int(rules.forced_matches[g])
            rule = example_rule(rules.relaxed, contexts + g, is_chosen=chosen)
            mine = [rows[row] for row in self.rows_of(contexts + g)]
            runs.append(example.verified(mine, present, rule, count))
        return runs


def ragged(case: Case, seed: int, dtype: torch.dtype = torch.int32) -> Case:
    """The case without the rows of absent drafts, its requests in another order, and rows of no
    request between them."""
    r = random.Random(seed)
    lens = case.options.get("draft_lens")
    if lens is None:
        lens = int32([case.layout.draft_len] * case.layout.num_generations)
    kept = replace(case, options={**case.options, "draft_lens": lens})
    requests = list(range(case.layout.num_requests))
    first, rows = dict.fromkeys(requests, 0), []
    for request in r.sample(requests, len(requests)):
        rows += [-1] * r.choice([0, 0, 1, 3])
        first[request] = len(rows)
        drafts = (
            0
            if request < case.layout.num_contexts
            else int(lens[request - case.layout.num_contexts])
        )
        rows += case.rows_of(request)[: drafts + 1]
    index = torch.tensor([*rows, -1], device=DEVICE)

    def moved(values: torch.Tensor, other: float) -> torch.Tensor:
        """-1 takes the last row, of no request."""
        return torch.cat([values, values.new_full((1, *values.shape[1:]), other)])[index]

    memory = torch.full((len(requests), 2), POISON, dtype=dtype, device=DEVICE)
    memory[:, 1] = torch.tensor(list(first.values()), dtype=dtype)
    return replace(
        kept,
        logits=moved(case.logits, 40.0),
        choices=None if case.choices is None else moved(case.choices, 0),
        forced_ids=None if case.forced_ids is None else moved(case.forced_ids, 0),
        first_rows=memory[:, 1],
    )


# --- assertions ---


def assert_same(mine: Outcome, theirs: Outcome, rows: Any = slice(None)) -> None:
    for name in ("tokens", "num_accepted", "status"):
        one, other = getattr(mine.accepted, name), getattr(theirs.accepted, name)
        assert one.dtype == other.dtype == torch.int32
        assert one.shape == other.shape
        assert torch.equal(one[rows], other[rows]), name
    assert torch.equal(mine.following[rows], theirs.following[rows])
    assert (mine.noted is None) == (theirs.noted is None)
    for name in ("noted", "in_force"):
        one, other = getattr(mine, name), getattr(theirs, name)
        assert one is None or same_bits(one[rows], other[rows]), name


def assert_implementations_agree(case: Case, kind: str) -> tuple[int, int]:
    """Torch and Triton agree; returns how many generations were too close to call, and how many of
    all a distance decided about."""
    rules = case.rules(kind)
    margin = case.margins(rules)
    close = undecided(margin, rules, case.layout)
    assert_same(case.accept(rules, Backend.TRITON), case.accept(rules, Backend.TORCH), ~close)
    return int(close.sum()), int(torch.isfinite(margin).any(dim=1).sum())


def assert_run(accepted: Accepted, request: int, run: example.Run) -> None:
    padding = [PAD_TOKEN] * (accepted.tokens.shape[1] - len(run.tokens))
    assert accepted.tokens[request].tolist() == run.tokens + padding
    assert accepted.num_accepted[request] == len(run.tokens)
    assert accepted.status[request] == (STATUS_OK if run.fine else STATUS_NO_FINITE_LOGIT)


def assert_phase(rule: RelaxedRule, outcome: Outcome, request: int, thinking: bool) -> None:
    """A request's slot says so, and has the delta that it thinks with."""
    after = slot_of(rule, request).after(thinking)
    assert int(outcome.noted[request]) == after.noted
    assert float(outcome.in_force[request]) == after.in_force


def assert_matches_example(case: Case, rules: AcceptanceRules, outcome: Outcome) -> None:
    """Every request matches the example, but for those that are too close to call; and the
    margins that say so are those of the example."""
    margin, following = case.margins(rules), outcome.following
    assert (outcome.noted is None) == (rules.relaxed is None)
    for request, run in enumerate(case.example(rules)):
        if any(0 < distance < CLOSE for distance in run.margins.values()):
            continue
        assert_run(outcome.accepted, request, run)
        assert following[request, 0] == (run.tokens[-1] if run.tokens else 0)
        if rules.relaxed is not None:
            assert_phase(rules.relaxed, outcome, request, run.thinking)
        if request >= case.layout.num_contexts:
            expected = [run.margins.get(i, math.inf) for i in range(case.layout.draft_len)]
            found = margin[request - case.layout.num_contexts].tolist()
            torch.testing.assert_close(found, expected, atol=CLOSE, rtol=0)
    assert (following[:, 1:] == POISON).all()
