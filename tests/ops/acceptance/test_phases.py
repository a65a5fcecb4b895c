"""The thinking phase in the slots: what begins and ends it, and memory around it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.acceptance import AcceptanceRules, RelaxedRule, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import Accepted
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from tests.ops.acceptance import example
from tests.ops.acceptance.cases import (
    POOLS,
    Case,
    Thinker,
    assert_matches_example,
    assert_nothing_else_written,
    copied,
    layout_of,
    relaxed_rule,
    slot_of,
)
from tests.ops.acceptance.random_cases import make_case
from tests.ops.bits import same_bits
from tests.ops.on_device import DEVICE, INDEX_DTYPES, vector
from tests.ops.slots import POISON, column

BACKENDS = pytest.mark.parametrize("backend", Backend)
EVERY_POOL = pytest.mark.parametrize("pool", POOLS)

PLAIN, NEAR, BEGIN, END = 3, 4, 1, 2
"""The first choice of every row, one nearly as good, and the tokens around a thought."""
VOCAB = 100


def rows_of(firsts: list[int]) -> torch.Tensor:
    """A row for each first choice; where it is `PLAIN` another token is near."""
    rows = torch.full((len(firsts), VOCAB), -9.0)
    for row, token in zip(rows, firsts, strict=True):
        row[token] = 0.0
        if token == PLAIN:
            row[NEAR] = -0.1
    return rows.to(DEVICE)


def one_step(
    rule: RelaxedRule, drafts: list[list[int]], firsts: list[int] | None, backend: Backend
) -> list[list[int]]:
    """What generations emit; the rule's slots are moved on."""
    requests, k = len(drafts), len(drafts[0])
    rows = rows_of(firsts or [PLAIN] * requests * (k + 1))
    rules, layout = AcceptanceRules(relaxed=rule), layout_of(0, requests, k)
    accepted = accept(layout, rows, vector(drafts), rules, backend=backend)
    return [
        run[:count]
        for run, count in zip(accepted.tokens.tolist(), accepted.num_accepted.tolist(), strict=True)
    ]


RELAXED, STRICT = [NEAR, PLAIN], [PLAIN]
"""What a draft of `NEAR` comes to."""


@EVERY_POOL
@BACKENDS
def test_the_delta_in_force_says_who_thinks(backend: Backend, pool: str) -> None:
    thinkers = [
        Thinker(False),
        Thinker(True),
        Thinker(False, written=0.5),  # a host begins the phase
        Thinker(True, written=0.0),  # and ends it
        Thinker(True, written=0.001),  # with a delta that no draft meets
        Thinker(False, limit=0.0, written=0.5),  # also where the request has none of its own
    ]
    rule = relaxed_rule(thinkers, BEGIN, END, pool=pool)
    emitted = one_step(rule, [[NEAR]] * len(thinkers), None, backend)
    assert emitted == [STRICT, RELAXED, RELAXED, STRICT, STRICT, RELAXED]
    after = [slot_of(rule, request) for request in range(len(thinkers))]
    assert [slot.noted for slot in after] == [0, 1, 1, 0, 1, 1]
    deltas = [0.0, 0.5, 0.5, 0.0, 0.001, 0.5]
    assert [slot.in_force for slot in after] == pytest.approx(deltas)


@EVERY_POOL
@BACKENDS
def test_a_request_without_a_delta_shows_its_phase_in_the_note(backend: Backend, pool: str) -> None:
    """Nothing near is accepted, whichever; the phase goes on and ends all the same."""
    rule = relaxed_rule([Thinker(flag, limit=0.0) for flag in (False, True)], BEGIN, END, pool=pool)

    def phases() -> list[tuple[int, float]]:
        return [(slot.noted, slot.in_force) for slot in (slot_of(rule, r) for r in (0, 1))]

    assert phases() == [(0, 0.0), (1, 0.0)]
    assert one_step(rule, [[NEAR], [NEAR]], None, backend) == [STRICT, STRICT]
    assert phases() == [(0, 0.0), (1, 0.0)]
    one_step(rule, [[BEGIN], [END]], [BEGIN, PLAIN, END, PLAIN], backend)
    assert phases() == [(1, 0.0), (0, 0.0)]


@EVERY_POOL
@BACKENDS
def test_a_phase_ends_and_begins_over_steps(backend: Backend, pool: str) -> None:
    """The next step reads what the one before left; a new phase has the request's own delta."""
    rule = relaxed_rule([Thinker(True, limit=0.5, written=0.25)], BEGIN, END, pool=pool)
    steps = [
        # draft, first choices, emitted, noted, in force
        ([NEAR], [PLAIN, PLAIN], RELAXED, 1, 0.25),
        ([END], [END, PLAIN], [END, PLAIN], 0, 0.0),
        ([NEAR], [PLAIN, PLAIN], STRICT, 0, 0.0),
        ([NEAR], [BEGIN, PLAIN], [BEGIN], 1, 0.5),
        ([NEAR], [PLAIN, END], [NEAR, END], 0, 0.0),
        ([BEGIN], [BEGIN, PLAIN], [BEGIN, PLAIN], 1, 0.5),
    ]
    for draft, firsts, emitted, noted, in_force in steps:
        assert one_step(rule, [draft], firsts, backend) == [emitted]
        assert slot_of(rule, 0) == example.Slot(noted, in_force, 0.5)


# --- what lies around a slot ---


@BACKENDS
@pytest.mark.parametrize("place", [0, 1, MAX_STOP_IDS - 1])
def test_stop_ids_are_those_of_the_row_and_no_others(backend: Backend, place: int) -> None:
    """Columns on both sides of them, other slots and gaps hold a token that may be accepted."""
    stops = [[-1] * place + [NEAR], [-1] * place + [50], []]
    thinkers = [Thinker(topk=3, stop_ids=ids) for ids in stops]
    rule = relaxed_rule(thinkers, gap=2)
    assert one_step(rule, [[NEAR]] * 3, None, backend) == [STRICT, RELAXED, RELAXED]
    rows = rows_of([PLAIN] * 6)
    rows[:, POISON] = -0.1
    for slots in (rule.slots.table[:, 0], rule.slots.table[:, 1]):
        assert POISON in slots.tolist()
    rules, drafts = AcceptanceRules(relaxed=rule), vector([[POISON]] * 3)
    accepted = accept(layout_of(0, 3, 1), rows, drafts, rules, backend=backend)
    assert accepted.num_accepted.tolist() == [2, 2, 2]


@BACKENDS
@pytest.mark.parametrize("dtype", [*INDEX_DTYPES, torch.int16, torch.uint8])
def test_slots_of_any_integers(backend: Backend, dtype: torch.dtype) -> None:
    case = make_case(7, num_contexts=1, num_generations=3, k=3, vocab=127, pool="own")
    slots = case.relaxed.slots
    wide = case.accept("relaxed", backend)
    narrow = replace(slots, slot_ids=slots.slot_ids[:4].to(dtype))
    other = replace(case, relaxed=replace(case.relaxed, slots=narrow)).accept("relaxed", backend)
    for name in ("tokens", "num_accepted", "status"):
        assert torch.equal(getattr(wide.accepted, name), getattr(other.accepted, name))
    assert same_bits(wide.noted, other.noted)
    assert same_bits(wide.in_force, other.in_force)


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**31),
    num_contexts=st.integers(0, 2),
    generations=st.integers(1, 3),
    padding=st.integers(2, 4),
    k=st.integers(1, 4),
    pool=st.sampled_from(POOLS),
)
def test_padding_rows_that_share_a_slot_change_no_request(
    seed: int, num_contexts: int, generations: int, padding: int, k: int, pool: str
) -> None:
    """Rows of a graph's padding all have the sentinel's slot, and write it in any order."""
    shape: dict[str, Any] = {"num_contexts": num_contexts, "k": k, "vocab": 127, "smooth": True}
    case = make_case(seed, num_generations=generations + padding, pool=pool, **shape)
    real, rule = num_contexts + generations, case.relaxed
    slot_ids = rule.slots.slot_ids.clone()
    slot_ids[real : real + padding] = slot_ids[real]
    padded = replace(rule, slots=replace(rule.slots, slot_ids=slot_ids))
    rules = AcceptanceRules(relaxed=padded)
    alone = replace(case, relaxed=rule).example(AcceptanceRules(relaxed=rule))
    margin = case.margins(rules)[:generations]
    for backend in Backend:
        after = copied(padded)
        accepted: Accepted = accept(
            case.layout, case.logits, case.drafts, replace(rules, relaxed=after), backend=backend
        )
        assert_nothing_else_written(padded, after, range(real + 1))
        for request, run in enumerate(alone[:real]):
            if request >= num_contexts and bool((margin[request - num_contexts] < 1e-5).any()):
                continue
            assert accepted.tokens[request, : len(run.tokens)].tolist() == run.tokens
            assert slot_of(after, request) == slot_of(rule, request).after(run.thinking)
        # the padding's own numbers are tokens, too
        assert ((accepted.tokens >= -1) & (accepted.tokens < 127)).all()
        assert int(column(after.slots, "thinking")[int(slot_ids[real])]) in (0, 1)


@BACKENDS
def test_drafts_may_be_absent_altogether(backend: Backend) -> None:
    """K = 0: the first choice of every row moves the phase on."""
    thinkers = [Thinker(False), Thinker(True), Thinker(True)]
    rule = relaxed_rule(thinkers, BEGIN, END)
    case = Case(
        layout_of(1, 2, 0),
        rows_of([BEGIN, END, PLAIN]),
        torch.empty(2, 0, dtype=torch.int32, device=DEVICE),
        rule,
        vector([-1, -1], torch.int32),
    )
    outcome = case.accept("relaxed", backend)
    assert outcome.noted.tolist() == [1, 0, 1]
    assert outcome.in_force.tolist() == [0.5, 0.0, 0.5]
    assert_matches_example(case, case.rules("relaxed"), outcome)


def test_a_copy_of_a_rule_has_its_pool_where_the_rule_had_it() -> None:
    """Else no test above would see a column that is written through the other name."""
    for pool in POOLS:
        rule = copied(relaxed_rule([Thinker()], pool=pool))
        before = copy.deepcopy(rule.slots.table)
        rule.delta_in_force[rule.slots.of(slice(0, 1))] = 0.125
        assert torch.equal(before, rule.slots.table) == (pool != "column")
