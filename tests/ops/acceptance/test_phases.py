"""The slots of the thinking phase: their types, and those that padding rows share."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.acceptance import AcceptanceRules, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import Accepted
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from tests.ops.acceptance.cases import (
    POOLS,
    Thinker,
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


@BACKENDS
@pytest.mark.parametrize("place", [0, MAX_STOP_IDS - 1])
def test_stop_ids_are_those_of_the_row_and_no_others(backend: Backend, place: int) -> None:
    """Columns on both sides of them, other slots and gaps hold a token that may be accepted."""
    rule = relaxed_rule([Thinker(topk=3, stop_ids=[-1] * place + [4]), Thinker(topk=3)], gap=2)
    rows = torch.full((4, 100), -9.0, device=DEVICE)
    rows[:, 3], rows[:, [4, POISON]] = 0.0, -0.1
    for draft, expected in ((4, [1, 2]), (POISON, [2, 2])):
        rules, drafts = AcceptanceRules(relaxed=rule), vector([[draft]] * 2)
        accepted = accept(layout_of(0, 2, 1), rows, drafts, rules, backend=backend)
        assert accepted.num_accepted.tolist() == expected


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


def test_a_copy_of_a_rule_has_its_pool_where_the_rule_had_it() -> None:
    """Else no test above would see a column that is written through the other name."""
    for pool in POOLS:
        rule = copied(relaxed_rule([Thinker()], pool=pool))
        before = copy.deepcopy(rule.slots.table)
        rule.delta_in_force[rule.slots.of(slice(0, 1))] = 0.125
        assert torch.equal(before, rule.slots.table) == (pool != "column")
