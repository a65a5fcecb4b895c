"""Steps to judge, what is asked of what they come to, and the story that tells them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.columns import SlotColumn
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules, RelaxedRule, accept
from mtp_plugin.speculative.step import (
    PAD_TOKEN,
    STATUS_NO_FINITE_LOGIT,
    STATUS_OK,
    Accepted,
    StepLayout,
)
from tests.doors import poisoned_memory, storage
from tests.kernels.top_k.rows import DTYPES, VOCABS, best_ids, odd_rows, strided, without_nan
from tests.speculative.ops.acceptance import story
from tests.speculative.ops.acceptance.margins import CLOSE, margins, undecided
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.on_device import DEVICE, POISON, poisoned
from tests.speculative.ops.slots import POISON as SLOT_POISON
from tests.speculative.ops.slots import column, held, on_copy, slot_rows

KINDS = ("strict", "relaxed", "forced", "mixed", "chosen")
"""Which rules a step has; `forced`, `mixed` and `chosen` leave some rows to the others. `chosen`:
all rules, of tokens that the target chose: by draw here and there, as the only one elsewhere."""


def layout_of(num_contexts: int, num_generations: int, k: int) -> StepLayout:
    """Prompts of two rows each, of which one has logits."""
    lens = torch.full((num_contexts,), 2, dtype=torch.int32, device=DEVICE)
    return StepLayout((2,) * num_contexts, num_generations, k, lens)


# --- the slots of relaxed requests ---

PHASE_COLUMNS = (
    SlotColumn("pool", float),
    SlotColumn("thinking", int),
    SlotColumn("relaxed_topk", int),
    SlotColumn("relaxed_limit", float),
)
POOLS = ("column", "own", "own, smaller")
"""Where the delta in force stands: in the table, or in a tensor that a host put in its place, of
other strides and another S."""


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
        highest = max(mine.tolist(), default=0)
        size = highest + 1 if pool == "own, smaller" else slots.table.shape[0] + 5
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


def slot_of(rule: RelaxedRule, request: int) -> story.Slot:
    """A request's phase, read number by number."""
    slot = int(rule.slots.slot_ids[request])
    noted, limit = (held(rule.slots, request, name) for name in ("thinking", "relaxed_limit"))
    return story.Slot(noted, float(rule.delta_in_force[slot]), limit)


def told_rule(
    rule: RelaxedRule | None, request: int, *, is_chosen: bool = False
) -> story.Rule | None:
    if rule is None:
        return None
    slot = slot_of(rule, request)
    return story.Rule(
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


class Judged(NamedTuple):
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

    def rules(self, kind: str) -> AcceptanceRules:
        return AcceptanceRules(
            relaxed=self.relaxed if kind in ("relaxed", "mixed", "chosen") else None,
            forced_matches=self.forced if kind in ("forced", "mixed", "chosen") else None,
            choices=self.choices if kind == "chosen" else None,
            forced_ids=self.forced_ids if kind == "chosen" else None,
        )

    def judge(self, rules: AcceptanceRules | str, backend: Backend) -> Judged:
        """The step on slots of its own: those of the case stay what they are."""
        if isinstance(rules, str):
            rules = self.rules(rules)
        requests, before = self.layout.num_requests, rules.relaxed
        following = poisoned(requests, self.layout.draft_len + 2, dtype=torch.int32)
        given = {**self.options, "last_tokens": following[:, 0]}
        after = None if before is None else copied(before)
        rules = replace(rules, relaxed=after)
        with poisoned_memory():
            accepted = accept(
                self.layout, self.logits, self.drafts, rules, **given, backend=backend
            )
        if before is None or after is None:
            return Judged(accepted, following, None, None)
        assert_nothing_else_written(before, after, range(requests))
        mine = after.slots.of(slice(0, requests))
        phase = column(after.slots, "thinking")[mine], after.delta_in_force[mine]
        return Judged(accepted, following, *phase)

    def margins(self, rules: AcceptanceRules) -> torch.Tensor:
        lens = self.options.get("draft_lens")
        return margins(self.layout, self.logits, self.drafts, rules, lens)

    def told(self, rules: AcceptanceRules) -> list[story.Run]:
        """The runs of all requests; the phase of prompts too."""
        rows, contexts = self.logits.double().tolist(), self.layout.num_contexts
        finals, lens = self.options.get("final_context"), self.options.get("draft_lens")
        given = [None if ids is None else ids.tolist() for ids in (rules.choices, rules.forced_ids)]
        rows, chosen = story.rows_of(rows, *given), rules.choices is not None
        runs = []
        for c in range(contexts):
            rule = told_rule(rules.relaxed, c, is_chosen=chosen)
            run = story.prompt(rows[c], finals is None or bool(finals[c]))
            if rule is not None:
                run = run._replace(thinking=story.phase_behind(run.tokens, rule))
            runs.append(run)
        for g, drafts in enumerate(self.drafts.tolist()):
            first = contexts + g * self.layout.step_rows
            present = drafts if lens is None else drafts[: int(lens[g])]
            count = -1 if rules.forced_matches is None else int(rules.forced_matches[g])
            rule = told_rule(rules.relaxed, contexts + g, is_chosen=chosen)
            mine = rows[first : first + self.layout.step_rows]
            runs.append(story.judged(mine, present, rule, count))
        return runs


# --- what is asked of a step ---


def assert_same(mine: Judged, theirs: Judged, rows: Any = slice(None)) -> None:
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


def assert_sides_agree(case: Case, kind: str) -> tuple[int, int]:
    """Torch and Triton agree; returns how many generations were too close to call, and how many of
    all were judged by a distance."""
    rules = case.rules(kind)
    margin = case.margins(rules)
    close = undecided(margin, rules, case.layout)
    assert_same(case.judge(rules, Backend.TRITON), case.judge(rules, Backend.TORCH), ~close)
    return int(close.sum()), int(torch.isfinite(margin).any(dim=1).sum())


def assert_run(accepted: Accepted, request: int, run: story.Run) -> None:
    padding = [PAD_TOKEN] * (accepted.tokens.shape[1] - len(run.tokens))
    assert accepted.tokens[request].tolist() == run.tokens + padding
    assert accepted.num_accepted[request] == len(run.tokens)
    assert accepted.status[request] == (STATUS_OK if run.fine else STATUS_NO_FINITE_LOGIT)


def assert_phase(rule: RelaxedRule, judged: Judged, request: int, thinking: bool) -> None:
    """A request's slot says so, and has the delta that it thinks with."""
    behind = slot_of(rule, request).after(thinking)
    assert int(judged.noted[request]) == behind.noted
    assert float(judged.in_force[request]) == behind.in_force


def assert_told(case: Case, rules: AcceptanceRules, judged: Judged) -> None:
    """Every request is as the story has it, but for those that are too close to call; and the
    margins that say so are those of the story."""
    margin, following = case.margins(rules), judged.following
    assert (judged.noted is None) == (rules.relaxed is None)
    for request, run in enumerate(case.told(rules)):
        if any(0 < distance < CLOSE for distance in run.margins.values()):
            continue
        assert_run(judged.accepted, request, run)
        assert following[request, 0] == (run.tokens[-1] if run.tokens else 0)
        if rules.relaxed is not None:
            assert_phase(rules.relaxed, judged, request, run.thinking)
        if request >= case.layout.num_contexts:
            told = [run.margins.get(i, math.inf) for i in range(case.layout.draft_len)]
            found = margin[request - case.layout.num_contexts].tolist()
            torch.testing.assert_close(found, told, atol=CLOSE, rtol=0)
    assert (following[:, 1:] == POISON).all()


# --- steps to judge ---


def int32(items: list[Any]) -> torch.Tensor:
    return torch.tensor(items, dtype=torch.int32, device=DEVICE)


def some_thinker(r: random.Random, **what: Any) -> Thinker:
    """A fifth of the phases is another than the last step left: a host wrote the delta."""
    written = r.choice([0.0, 0.0317, 0.4]) if r.random() < 0.2 else None
    return Thinker(
        thinking=r.random() < 0.6,
        written=written,
        temperature=r.choice([0.0, 0.0, 1e-6, 0.7]),
        **what,
    )


def some_choices(
    r: random.Random, layout: StepLayout, logits: torch.Tensor, drafts: list[list[int]], draws: Any
) -> dict[str, torch.Tensor]:
    """The first choice of most rows; of requests that draw another token at times; and one that
    nothing else may stand beside here and there, often the draft."""
    choices, forced = [], []
    usable, vocab = without_nan(logits), logits.shape[1]
    first = best_ids(logits).tolist()
    for row in range(layout.num_logit_rows):
        behind = row - layout.num_contexts
        g, i = divmod(max(behind, 0), layout.step_rows)
        draws_here = draws[row] if behind < 0 else draws[layout.num_contexts + g]
        choice = first[row]
        if bool((usable[row] == -math.inf).all()):
            choice = -1
        elif draws_here and r.random() < 0.4:
            choice = r.randrange(vocab)
        only = -1
        if r.random() < 0.15 and choice >= 0:
            drafted = behind >= 0 and i < layout.draft_len and 0 <= drafts[g][i] < vocab
            only = drafts[g][i] if drafted and r.random() < 0.7 else r.randrange(vocab)
            choice = only
        choices.append(choice)
        forced.append(only)
    return {"choices": int32(choices), "forced_ids": int32(forced)}


def make_case(
    seed: int,
    *,
    num_contexts: int = 0,
    num_generations: int,
    k: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    smooth: bool = False,
    behind: int = 0,
    lens: bool = False,
    finals: bool = False,
    stops: int = 0,
    id_dtype: torch.dtype = torch.int32,
    **slots: Any,
) -> Case:
    """Drafts that mostly match, phases that begin and end inside runs, ids outside.

    stops: ids at most that end a request. slots: as for `relaxed_rule`.
    """
    dice, r = torch.Generator().manual_seed(seed), random.Random(seed)
    rows = num_contexts + num_generations * (k + 1)
    values = odd_rows(dice, rows, vocab, dtype, smooth=smooth)
    begin, end = r.sample(range(-1, vocab + 1), 2)
    # tokens that change the phase are first choices here and there
    for row in range(rows):
        token = r.choice([begin, end])
        if r.random() < 0.2 and 0 <= token < vocab and not torch.isnan(values[row]).any():
            values[row, token] = 30.0
    best = best_ids(values)[num_contexts:].view(num_generations, k + 1)
    ranked = without_nan(values.float())[num_contexts:].argsort(dim=1, descending=True)
    ranked = ranked.view(num_generations, k + 1, vocab)

    def guess(g: int, i: int) -> int:
        luck = r.random()
        if luck < 0.45:
            return int(best[g, i])
        if luck < 0.9:
            return int(ranked[g, i, r.randrange(min(4, vocab))])
        return r.choice([-1, vocab, vocab + 3, 2**31 - 1, begin, end, r.randrange(vocab)])

    drafts = [[guess(g, i) for i in range(k)] for g in range(num_generations)]
    runs = [[]] * num_contexts + drafts
    thinkers = [
        some_thinker(
            r,
            topk=r.choice([1, 2, 4, vocab, vocab + 5]),
            limit=r.choice([0.0, 0.0213, 0.1371, 0.6117, 1.0]),
            stop_ids=[r.choice(run) for _ in range(stops) if run and r.random() < 0.3],
        )
        for run in runs
    ]
    rule = relaxed_rule(thinkers, begin, end, seed=seed, **slots)
    ends_prompt = [r.random() < 0.5 for _ in range(num_contexts)]
    options = {
        "draft_lens": int32([r.randint(0, k) for _ in drafts]) if lens else None,
        "final_context": torch.tensor(ends_prompt, dtype=torch.bool).to(DEVICE) if finals else None,
    }
    # up to K matches, beyond what a draw could ask for, and rows that are left to the others
    forced = [r.choice([-(2**31), -1, r.randint(0, k + 1), k, k]) for _ in drafts]
    table = torch.tensor(drafts, dtype=id_dtype).reshape(num_generations, k).to(DEVICE)
    layout = layout_of(num_contexts, num_generations, k)
    draws = [thinker.temperature > 0 for thinker in thinkers]
    chosen = some_choices(r, layout, values, drafts, draws)
    return Case(layout, strided(values, behind), table, rule, int32(forced), options, **chosen)


INDEX = st.sampled_from([torch.int32, torch.int64])

cases = st.builds(
    make_case,
    seed=st.integers(0, 2**31),
    num_contexts=st.integers(0, 3),
    num_generations=st.integers(0, 3),
    k=st.integers(0, 7),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    smooth=st.booleans(),
    behind=st.integers(0, 3),
    lens=st.booleans(),
    finals=st.booleans(),
    stops=st.sampled_from([0, 1, 3, 32]),
    id_dtype=INDEX,
    pool=st.sampled_from(POOLS),
    gap=st.integers(0, 2),
    id_stride=st.integers(1, 3),
)

VALUES = [-math.inf, math.nan, math.inf, -8.0, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 1.0, 2.0]


def make_small_case(
    seed: int,
    *,
    num_contexts: int,
    num_generations: int,
    k: int,
    vocab: int,
    right: float,
    dtype: torch.dtype,
    lens: bool,
    finals: bool,
    **slots: Any,
) -> Case:
    """Few words and few values: nearly every row has ties, dead rows and masked words."""
    dice = random.Random(seed)
    requests = num_contexts + num_generations

    def row() -> list[float]:
        values = [-math.inf, math.nan] if dice.random() < 0.05 else VALUES
        return [dice.choice(values) for _ in range(vocab)]

    def guess(target: list[float]) -> int:
        best = story.first_choice(target)
        if best is not None and dice.random() < right:
            return best
        return dice.randrange(-1, vocab + 2)

    contexts = [row() for _ in range(num_contexts)]
    generations = [[row() for _ in range(k + 1)] for _ in range(num_generations)]
    drafts = [[guess(target) for target in rows[:k]] for rows in generations]
    flat = contexts + [row for rows in generations for row in rows]
    logits = torch.tensor(flat).reshape(len(flat), vocab).to(dtype)
    begin, end = dice.sample(range(-1, vocab + 1), 2)
    thinkers = [
        some_thinker(
            dice,
            topk=dice.choice([1, 2, 3, vocab, vocab + 5]),
            limit=dice.choice([0.0, 0.25, 0.6, 1.0]),
            stop_ids=[dice.choice([-1, -1, dice.randrange(vocab)]) for _ in "ab"],
        )
        for _ in range(requests)
    ]
    rule = relaxed_rule(thinkers, begin, end, seed=seed, **slots)
    options: dict[str, Any] = {}
    if lens:
        options["draft_lens"] = int32([dice.randint(0, k) for _ in drafts])
    if finals:
        ends = [dice.random() < 0.5 for _ in contexts]
        options["final_context"] = torch.tensor(ends, dtype=torch.bool, device=DEVICE)
    forced = int32([dice.randint(-2, k + 1) for _ in drafts])
    table = int32(drafts).reshape(num_generations, k)
    layout = layout_of(num_contexts, num_generations, k)
    draws = [thinker.temperature > 0 for thinker in thinkers]
    chosen = some_choices(dice, layout, logits, drafts, draws)
    return Case(layout, strided(logits, 3), table, rule, forced, options, **chosen)


small_cases = st.builds(
    make_small_case,
    seed=st.integers(0, 2**32),
    num_contexts=st.integers(0, 3),
    num_generations=st.integers(0, 4),
    k=st.integers(0, 7),
    vocab=st.sampled_from([1, 2, 3, 5, 8, 17]),
    right=st.sampled_from([0.5, 0.9, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    lens=st.booleans(),
    finals=st.booleans(),
    pool=st.sampled_from(POOLS),
    gap=st.integers(0, 2),
    id_stride=st.integers(1, 3),
)


def chosen_rows(case: Case, seed: int, share: float = 0.1) -> Case:
    """Its first choices as choices, and a share of drafts that alone may stand."""
    dice = torch.Generator().manual_seed(seed)
    first = best_ids(case.logits).int()
    dead = (without_nan(case.logits) == -torch.inf).all(dim=1)
    first = torch.where(dead, -1, first)
    drafts = torch.nn.functional.pad(case.drafts.int(), (0, 1), value=-1).reshape(-1)
    drafts = torch.nn.functional.pad(drafts, (case.layout.num_contexts, 0), value=-1)
    only = torch.where(torch.rand(first.shape, generator=dice).to(DEVICE) < share, drafts, -1)
    only = torch.where((only < case.logits.shape[1]) & ~dead, only, -1)
    return replace(case, choices=torch.where(only >= 0, only, first), forced_ids=only)


def smooth_case(
    requests: int,
    k: int,
    vocab: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Random rows, drafts among their best four, a threshold that decides about many of them."""
    dice = torch.Generator().manual_seed(seed)
    logits = (1.5 * torch.randn(requests * (k + 1), vocab, generator=dice)).to(DEVICE, dtype)
    first = logits.float().topk(4, dim=1).indices.view(requests, k + 1, 4)[:, :k]
    rank = torch.randint(0, 4, (requests, k, 1), generator=dice).to(DEVICE)
    thinking = (torch.rand(requests, generator=dice) < 0.8).tolist()
    limit = 0.2 if vocab < 100 else 2e-4
    thinkers = [
        Thinker(flag, topk=3, limit=limit, temperature=0.7 * (place % 5 == 4))
        for place, flag in enumerate(thinking)
    ]
    rule = relaxed_rule(thinkers, 5, 6, seed=seed, order=0)
    forced = torch.randint(-k - 2, k + 2, (requests,), generator=dice, dtype=torch.int32)
    drafts = first.gather(2, rank).squeeze(2).int()
    case = Case(layout_of(0, requests, k), logits, drafts, rule, forced.to(DEVICE))
    return chosen_rows(case, seed)
