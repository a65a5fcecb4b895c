"""Acceptance of letters and single rows: what is accepted, and why."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from mtp_plugin.ops.acceptance import AcceptanceRules, accept
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.step import PAD_TOKEN, STATUS_NO_FINITE_LOGIT, STATUS_OK
from tests.ops.acceptance import example
from tests.ops.acceptance.cases import (
    Case,
    Thinker,
    assert_matches_example,
    assert_phase,
    assert_run,
    layout_of,
    relaxed_rule,
)
from tests.ops.letters import ids, rows_with_top
from tests.ops.on_device import DEVICE, vector

NAN, INF = math.nan, math.inf


class Letters(NamedTuple):
    id: str
    drafts: str  # of one generation
    target: str  # first choices of its rows
    emitted: str
    why: str
    draft_len: int | None = None
    fine: bool = True


CASES = [
    Letters("all_accepted", "uvw", "uvwx", "uvwx", "K drafts and the bonus of row K"),
    Letters("none_accepted", "uvw", "xyza", "x", "the bonus comes from row 0"),
    Letters("partly", "bc", "bxy", "bx", "the row of the first wrong draft gives the bonus"),
    Letters("later_match_is_void", "uvw", "uxwy", "ux", "a draft after a wrong one is rejected"),
    Letters("no_drafts", "", "q", "q", "K = 0 decodes plainly"),
    Letters(
        "absent", "uvw", "uvwx", "uv", "a draft past draft_len is absent, though it matches", 1
    ),
    Letters("all_absent", "uvw", "uvwx", "u", "draft_len 0 decodes plainly", 0),
    Letters("padded_drafts", "u..", "uvwx", "uv", "-1 is no token"),
    Letters("dead_first_row", "uvw", ".vwx", "", "nothing can be emitted", fine=False),
    Letters("dead_later_row", "uvw", "uv.x", "uv", "the run ends before the dead row", fine=False),
    Letters(
        "dead_bonus_row", "uvw", "uvw.", "uvw", "the drafts are accepted, no bonus", fine=False
    ),
    Letters("dead_unread_row", "uvw", "ux.x", "ux", "rows after the run are ignored"),
    Letters(
        "a_for_dead_rows", "aaa", "....", "", "the argmax of nothing is not token 0", fine=False
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("backend", Backend)
def test_letters(backend: Backend, case: Letters) -> None:
    k = len(ids(case.drafts))
    accepted = accept(
        layout_of(0, 1, k),
        rows_with_top(case.target).to(DEVICE),
        vector(ids(case.drafts), torch.int32),
        draft_lens=None if case.draft_len is None else vector([case.draft_len]),
        backend=backend,
    )
    run = ids(case.emitted)
    assert accepted.tokens.tolist() == [run + [PAD_TOKEN] * (k + 1 - len(run))]
    assert accepted.num_accepted.tolist() == [len(run)]
    assert accepted.status.tolist() == [STATUS_OK if case.fine else STATUS_NO_FINITE_LOGIT]


@pytest.mark.parametrize("backend", Backend)
def test_contexts_come_first_and_emit_one(backend: Backend) -> None:
    accepted = accept(
        layout_of(3, 1, 2),
        rows_with_top("t" + "k" + "." + "uvx").to(DEVICE),
        vector(ids("uv")),
        final_context=vector([True, False, False], torch.bool),
        backend=backend,
    )
    assert accepted.tokens.tolist() == [ids("t.."), ids("..."), ids("..."), ids("uvx")]
    # a prompt chunk has no output, so that a row without any value there is no error
    assert accepted.num_accepted.tolist() == [1, 0, 0, 3]
    assert accepted.status.tolist() == [STATUS_OK] * 4
    assert accepted.last_tokens().tolist() == [*ids("t"), 0, 0, *ids("x")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, 3.0, 3.0], 1),
        ([NAN, 0.0, NAN], 1),
        ([NAN, -INF, -INF], None),
        ([0.0, INF, INF], 1),
        ([-INF, -INF, -5e4], 2),
        ([-INF], None),
    ],
    ids=["tie", "nan", "nothing", "infinite", "last", "vocabulary_of_one"],
)
@pytest.mark.parametrize("backend", Backend)
def test_first_choice_of_odd_rows(backend: Backend, row: list[float], expected: int | None) -> None:
    logits = torch.tensor([row], device=DEVICE)
    accepted = accept(layout_of(1, 0, 0), logits, vector([]), backend=backend)
    assert example.first_choice(row) == expected
    assert accepted.tokens.tolist() == [[PAD_TOKEN if expected is None else expected]]


class RelaxedCase(NamedTuple):
    id: str
    row: list[float]
    draft: int
    is_accepted: bool
    why: str
    topk: int = 3
    delta: float = 0.5
    thinking: bool = True
    stop_ids: tuple[int, ...] = ()


HALF = math.log(0.5)
RELAXED_CASES = [
    RelaxedCase("near", [0.0, -0.5, -9.0], 1, True, "0.62 against 0.38"),
    RelaxedCase("far", [0.0, -2.0, -9.0], 1, False, "0.88 against 0.12"),
    RelaxedCase("not_thinking", [0.0, -0.5, -9.0], 1, False, "strict outside", thinking=False),
    RelaxedCase("beyond_topk", [0.0, -0.1, -0.2], 2, False, "third of two", topk=2),
    RelaxedCase("more_than_v", [0.0, -0.1, -0.2], 2, True, "more than V means V", topk=99),
    RelaxedCase("equality", [0.0, 0.0], 1, True, "p == p_max - 0 qualifies", topk=2, delta=0.0),
    RelaxedCase("tie_outside", [0.0, 0.0], 1, False, "ties rank by id", topk=1, delta=0.0),
    RelaxedCase("masked", [0.0, -INF], 1, False, "masked is never emitted", delta=1.0),
    RelaxedCase("nan", [0.0, NAN], 1, False, "NaN is masked", delta=1.0),
    RelaxedCase("probabilities", [0.0, HALF, HALF], 1, True, "0.5 - 0.25, not log", delta=0.25),
    RelaxedCase("stop_id", [0.0, -0.1, -9.0], 1, False, "only as top-1", stop_ids=(1,)),
    RelaxedCase("stop_id_top1", [0.0, -0.1, -9.0], 0, True, "is top-1", stop_ids=(0,)),
    RelaxedCase("begin_token", [0.0] * 9, 7, False, "only as top-1", topk=9),
    RelaxedCase("end_token", [0.0] * 9, 8, False, "only as top-1", topk=9),
    RelaxedCase("two_infinite", [INF, INF, 0.0], 1, True, "the maximum, twice"),
    RelaxedCase("next_to_infinite", [INF, 0.0, 0.0], 1, False, "nothing next to it"),
    RelaxedCase("outside", [0.0, 0.0], 2, False, "no token of this vocabulary", delta=1.0),
    RelaxedCase("negative", [0.0, 0.0], -1, False, "no token", delta=1.0),
]


@pytest.mark.parametrize("case", RELAXED_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("backend", Backend)
def test_relaxed_rows(backend: Backend, case: RelaxedCase) -> None:
    bonus = [0.0] * len(case.row)
    rule = relaxed_rule([Thinker(case.thinking, case.topk, case.delta, case.stop_ids)], 7, 8)
    logits = torch.tensor([case.row, bonus], device=DEVICE)
    drafts, rules = vector([case.draft]), AcceptanceRules(relaxed=rule)
    accepted = accept(layout_of(0, 1, 1), logits, drafts, rules, backend=backend)
    first = example.first_choice(case.row)
    expected = [case.draft, 0] if case.is_accepted else [first, PAD_TOKEN]
    assert accepted.tokens.tolist() == [expected], case.why


@pytest.mark.parametrize("backend", Backend)
def test_every_rule_decides_its_own_rows(backend: Backend) -> None:
    """Second-best `x` after `b`, and forced drafts."""
    begin, end, x, top, wrong = ids("bexaz")
    near = torch.full((26,), -9.0)
    near[[top, x]] = torch.tensor([0.0, -0.1])
    runs = [
        # thinking before, drafts, forced, emitted, thinking after
        (True, [x, x, x], -1, [x, x, x, top], True),  # thinks: relaxed
        (False, [x, x, x], -1, [top], False),  # does not: strict
        (False, [top, top, x], -1, [top, top, top], False),
        (True, [x, x, x], 1, [x, top], True),  # forced: no distance adds to it
        (True, [x, x, x], 0, [top], True),
        (True, [wrong, end, x], 3, [wrong, end, x, top], False),  # its phase goes on
        (False, [begin, x, end], 2, [begin, x, top], True),
        (False, [top, top, top], 2, [top, top, top], False),
        (False, [begin, x, x], -1, [top], False),
    ]
    requests = len(runs)
    rule = relaxed_rule([Thinker(run[0]) for run in runs], begin, end)
    case = Case(
        layout_of(0, requests, 3),
        near.repeat(requests * 4, 1).to(DEVICE),
        vector([run[1] for run in runs]),
        rule,
        vector([run[2] for run in runs]),
    )
    outcome = case.accept("mixed", backend)
    for request, (_, _, _, emitted, after) in enumerate(runs):
        assert_run(outcome.accepted, request, example.Run(emitted))
        assert_phase(rule, outcome, request, after)
    assert_matches_example(case, case.rules("mixed"), outcome)
