"""The reference against the story, on letters and on random batches."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.speculative.ops.acceptance import (
    RelaxedAccepted,
    RelaxedRule,
    accept_relaxed,
    accept_strict,
)
from mtp_plugin.speculative.step import PAD_TOKEN, STATUS_NO_FINITE_LOGIT, STATUS_OK, Accepted
from tests.speculative.ops.acceptance import story
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.letters import ids, rows_with_top

NAN, INF = math.nan, math.inf
POISON = -777
CLOSE = 1e-5
"""Nearer than this to a threshold, float32 and the story may decide differently."""


# --- letters ---


class Case(NamedTuple):
    id: str
    drafts: str  # of one generation
    target: str  # first choices of its rows
    emitted: str
    why: str
    draft_len: int | None = None
    fine: bool = True


CASES = [
    Case("all_stand", "uvw", "uvwx", "uvwx", "K drafts and the bonus of row K"),
    Case("none_stands", "uvw", "xyza", "x", "the bonus comes from row 0"),
    Case("partly", "bc", "bxy", "bx", "the row of the first wrong draft gives the bonus"),
    Case("later_match_is_void", "uvw", "uxwy", "ux", "a draft behind a wrong one never stands"),
    Case("no_drafts", "", "q", "q", "K = 0 decodes plainly"),
    Case("absent", "uvw", "uvwx", "uv", "a draft past draft_len is absent, though it matches", 1),
    Case("all_absent", "uvw", "uvwx", "u", "draft_len 0 decodes plainly", 0),
    Case("padded_drafts", "u..", "uvwx", "uv", "-1 is no token"),
    Case("dead_first_row", "uvw", ".vwx", "", "nothing can be emitted", fine=False),
    Case("dead_later_row", "uvw", "uv.x", "uv", "the run ends before the dead row", fine=False),
    Case("dead_bonus_row", "uvw", "uvw.", "uvw", "the drafts stand, no bonus", fine=False),
    Case("dead_unread_row", "uvw", "ux.x", "ux", "rows behind the run do not count"),
    Case("a_for_dead_rows", "aaa", "....", "", "the argmax of nothing is not token 0", fine=False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_letters(case: Case) -> None:
    k = len(ids(case.drafts))
    accepted = accept_strict(
        rows_with_top(case.target),
        torch.tensor(ids(case.drafts), dtype=torch.int32),
        num_contexts=0,
        max_draft_len=k,
        draft_lens=None if case.draft_len is None else torch.tensor([case.draft_len]),
    )
    run = ids(case.emitted)
    assert accepted.tokens.tolist() == [run + [PAD_TOKEN] * (k + 1 - len(run))]
    assert accepted.num_accepted.tolist() == [len(run)]
    assert accepted.status.tolist() == [STATUS_OK if case.fine else STATUS_NO_FINITE_LOGIT]


def test_contexts_come_first_and_emit_one() -> None:
    accepted = accept_strict(
        rows_with_top("t" + "k" + "." + "uvx"),
        torch.tensor(ids("uv")),
        num_contexts=3,
        max_draft_len=2,
        final_context=torch.tensor([True, False, False]),
    )
    assert accepted.tokens.tolist() == [ids("t.."), ids("..."), ids("..."), ids("uvx")]
    # a piece of a prompt draws nothing, so that a row without any value there is no fault
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
def test_first_choice_of_odd_rows(row: list[float], expected: int | None) -> None:
    accepted = accept_strict(
        torch.tensor([row]), torch.empty(0, dtype=torch.int32), num_contexts=1, max_draft_len=0
    )
    assert story.first_choice(row) == expected
    assert accepted.tokens.tolist() == [[PAD_TOKEN if expected is None else expected]]


class RelaxedCase(NamedTuple):
    id: str
    row: list[float]
    draft: int
    stands: bool
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
    RelaxedCase("beside_infinite", [INF, 0.0, 0.0], 1, False, "nothing beside it"),
    RelaxedCase("outside", [0.0, 0.0], 2, False, "no token of this vocabulary", delta=1.0),
    RelaxedCase("negative", [0.0, 0.0], -1, False, "no token", delta=1.0),
]


@pytest.mark.parametrize("case", RELAXED_CASES, ids=lambda case: case.id)
def test_relaxed_rows(case: RelaxedCase) -> None:
    bonus = [0.0] * len(case.row)
    result = accept_relaxed(
        torch.tensor([case.row, bonus]),
        torch.tensor([case.draft]),
        RelaxedRule(
            thinking=torch.tensor([case.thinking]),
            topk=torch.tensor([case.topk], dtype=torch.int32),
            delta=torch.tensor([case.delta]),
            stop_ids=torch.tensor([[*case.stop_ids, -1]], dtype=torch.int32),
            begin_token=7,
            end_token=8,
        ),
        num_contexts=0,
        max_draft_len=1,
    )
    first = story.first_choice(case.row)
    expected = [case.draft, 0] if case.stands else [first, PAD_TOKEN]
    assert result.accepted.tokens.tolist() == [expected], case.why


def test_the_phase_changes_inside_a_run() -> None:
    """`e` ends thinking, `b` begins it: `xbxe x` - every second-best `x` behind `b` may stand."""
    begin, end, x, top = ids("bexa")
    near = torch.full((26,), -9.0)
    near[[top, x]] = torch.tensor([0.0, -0.1])
    tops = rows_with_top("be")
    rule = RelaxedRule(
        thinking=torch.tensor([False, True]),
        topk=torch.tensor([2, 2], dtype=torch.int32),
        delta=torch.tensor([0.5, 0.5]),
        stop_ids=None,
        begin_token=begin,
        end_token=end,
    )
    result = accept_relaxed(
        torch.stack([tops[0], near, near, near, near, tops[1], near, near]),
        torch.tensor([begin, x, x, x, end, x]),
        rule,
        num_contexts=0,
        max_draft_len=3,
    )
    assert result.accepted.tokens.tolist() == [[begin, x, x, top], [x, end, top, PAD_TOKEN]]
    assert result.thinking.tolist() == [True, False]
    # thresholds decided where the request thought by then, and nowhere else
    assert torch.isfinite(result.margin).tolist() == [[False, True, True], [True, False, False]]


# --- random batches ---


@dataclass
class Batch:
    """Requests as lists; `tensors` lays them out flat, contexts first."""

    k: int
    vocab: int
    contexts: list[list[float]] = field(default_factory=list)
    finals: list[bool] | None = None
    generations: list[list[list[float]]] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    draft_lens: list[int] | None = None
    rules: list[story.Rule] = field(default_factory=list)  # contexts first
    dtype: torch.dtype = torch.float32

    def logits(self) -> torch.Tensor:
        rows = self.contexts + [row for rows in self.generations for row in rows]
        # columns behind the vocabulary must never be read
        wide = torch.full((len(rows), self.vocab + 3), 3e4, dtype=self.dtype)
        if rows:
            wide[:, : self.vocab] = torch.tensor(rows, dtype=torch.float64).to(self.dtype)
        return wide[:, : self.vocab]

    def shape(self) -> dict[str, object]:
        return {
            "num_contexts": len(self.contexts),
            "max_draft_len": self.k,
            "draft_lens": None
            if self.draft_lens is None
            else torch.tensor(self.draft_lens, dtype=torch.int32),
            "final_context": None
            if self.finals is None
            else torch.tensor(self.finals, dtype=torch.bool),
        }

    def draft_tensor(self) -> torch.Tensor:
        return torch.tensor(self.drafts, dtype=torch.int32).reshape(-1)

    def present(self, generation: int) -> list[int]:
        drafts = self.drafts[generation]
        return drafts if self.draft_lens is None else drafts[: self.draft_lens[generation]]

    def rule(self) -> RelaxedRule:
        width = max([1, *(len(rule.stop_ids) for rule in self.rules)])
        stops = [rule.stop_ids + [-1] * (width - len(rule.stop_ids)) for rule in self.rules]
        one = self.rules[0] if self.rules else story.Rule(False, 1, 0.0, [], -1, -1)
        return RelaxedRule(
            thinking=torch.tensor([rule.thinking for rule in self.rules], dtype=torch.bool),
            topk=torch.tensor([rule.topk for rule in self.rules], dtype=torch.int32),
            delta=torch.tensor([rule.delta for rule in self.rules], dtype=torch.float32),
            stop_ids=torch.tensor(stops, dtype=torch.int32).reshape(-1, width),
            begin_token=one.begin,
            end_token=one.end,
        )

    def prompts(self) -> list[story.Run]:
        finals = self.finals or [True] * len(self.contexts)
        return [story.prompt(row, final) for row, final in zip(self.contexts, finals, strict=True)]


VALUES = [-INF, NAN, INF, -8.0, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 1.0, 2.0]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Mixed batches with planted ties, dead rows, odd values and drafts that mostly match."""
    k = draw(st.integers(0, 7))
    vocab = draw(st.sampled_from([1, 2, 3, 5, 8, 17]))
    num_contexts = draw(st.integers(0, 3))
    num_generations = draw(st.integers(0, 4))
    dice = random.Random(draw(st.integers(0, 2**32)))
    right = draw(st.sampled_from([0.5, 0.9, 1.0]))

    def row() -> list[float]:
        if dice.random() < 0.05:
            return [dice.choice([-INF, NAN]) for _ in range(vocab)]
        return [dice.choice(VALUES) for _ in range(vocab)]

    def guess(target: list[float]) -> int:
        best = story.first_choice(target)
        if best is not None and dice.random() < right:
            return best
        return dice.randrange(-1, vocab + 2)

    batch = Batch(k, vocab, dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])))
    batch.contexts = [row() for _ in range(num_contexts)]
    batch.generations = [[row() for _ in range(k + 1)] for _ in range(num_generations)]
    batch.drafts = [[guess(target) for target in rows[:k]] for rows in batch.generations]
    if draw(st.booleans()):
        batch.draft_lens = [dice.randint(0, k) for _ in range(num_generations)]
    if draw(st.booleans()):
        batch.finals = [dice.random() < 0.5 for _ in range(num_contexts)]
    begin, end = dice.sample(range(-1, vocab + 1), 2)
    batch.rules = [
        story.Rule(
            thinking=dice.random() < 0.7,
            topk=dice.choice([1, 2, 3, vocab, vocab + 5]),
            delta=dice.choice([0.0, 0.25, 0.6, 1.0]),
            stop_ids=[dice.randrange(vocab) for _ in range(dice.choice([0, 0, 1, 2]))],
            begin=begin,
            end=end,
        )
        for _ in range(num_contexts + num_generations)
    ]
    return batch


class NextInputs:
    """The next step's inputs, poisoned; acceptance writes their first column."""

    def __init__(self, requests: int, k: int) -> None:
        self.tokens = torch.full((requests, k + 1), POISON, dtype=torch.int32)
        self.column = self.tokens[:, 0]

    def assert_run(self, request: int, run: story.Run) -> None:
        first, *others = self.tokens[request].tolist()
        assert first == (run.tokens[-1] if run.tokens else 0)
        assert others == [POISON] * len(others)


def assert_run(accepted: Accepted, request: int, run: story.Run, k: int) -> None:
    row = run.tokens + [PAD_TOKEN] * (k + 1 - len(run.tokens))
    assert torch.equal(accepted.tokens[request], torch.tensor(row, dtype=torch.int32))
    assert accepted.num_accepted[request] == len(run.tokens)
    assert accepted.status[request] == (STATUS_OK if run.fine else STATUS_NO_FINITE_LOGIT)


@given(batches())
def test_strict_is_the_story(batch: Batch) -> None:
    logits, drafts = batch.logits(), batch.draft_tensor()
    before = logits.clone(), drafts.clone()
    runs = batch.prompts() + [
        story.strict(rows, batch.present(g)) for g, rows in enumerate(batch.generations)
    ]
    following = NextInputs(len(runs), batch.k)
    accepted = accept_strict(logits, drafts, **batch.shape(), last_tokens=following.column)
    assert accepted.tokens.shape == (len(runs), batch.k + 1)
    for tensor in (accepted.tokens, accepted.num_accepted, accepted.status):
        assert tensor.dtype == torch.int32
    for request, run in enumerate(runs):
        assert_run(accepted, request, run, batch.k)
        following.assert_run(request, run)
    assert same_bits(logits, before[0])
    assert same_bits(drafts, before[1])


@given(batches())
def test_relaxed_is_the_story(batch: Batch) -> None:
    num_contexts = len(batch.contexts)
    following = NextInputs(len(batch.rules), batch.k)
    result = accept_relaxed(
        batch.logits(),
        batch.draft_tensor(),
        batch.rule(),
        **batch.shape(),
        last_tokens=following.column,
    )
    for request, run in enumerate(batch.prompts()):
        assert_run(result.accepted, request, run, batch.k)
        thinking = batch.rules[request].thinking
        for token in run.tokens:
            thinking = story.phase_after(thinking, token, batch.rules[request])
        assert result.thinking[request] == thinking
    for g, rows in enumerate(batch.generations):
        request = num_contexts + g
        run = story.relaxed(rows, batch.present(g), batch.rules[request])
        if any(0 < margin < CLOSE for margin in run.margins.values()):
            continue
        assert_run(result.accepted, request, run, batch.k)
        following.assert_run(request, run)
        assert result.thinking[request] == run.thinking
        expected = [run.margins.get(i, INF) for i in range(batch.k)]
        torch.testing.assert_close(
            result.margin[g], torch.tensor(expected), atol=1e-5, rtol=0, check_dtype=False
        )


@given(batches())
def test_top_one_and_no_distance_is_strict(batch: Batch) -> None:
    batch.rules = [rule._replace(topk=1, delta=0.0) for rule in batch.rules]
    logits, drafts, shape = batch.logits(), batch.draft_tensor(), batch.shape()
    relaxed = accept_relaxed(logits, drafts, batch.rule(), **shape).accepted
    strict = accept_strict(logits, drafts, **shape)
    for name in ("tokens", "num_accepted", "status"):
        assert torch.equal(getattr(relaxed, name), getattr(strict, name))


@given(batches())
def test_no_mode_emits_a_masked_or_foreign_token(batch: Batch) -> None:
    batch.rules = [rule._replace(thinking=True, topk=99, delta=1.0) for rule in batch.rules]
    logits, drafts, shape = batch.logits(), batch.draft_tensor(), batch.shape()
    for accepted in (
        accept_strict(logits, drafts, **shape),
        accept_relaxed(logits, drafts, batch.rule(), **shape).accepted,
    ):
        for g, rows in enumerate(batch.generations):
            request = len(batch.contexts) + g
            count = int(accepted.num_accepted[request])
            assert count <= batch.k + 1
            for row, token in zip(rows, accepted.tokens[request, :count].tolist(), strict=False):
                assert 0 <= token < batch.vocab
                assert row[token] > -INF
            assert (accepted.tokens[request, count:] == PAD_TOKEN).all()


def test_thresholds_decide_as_told_but_for_a_few_close_rows() -> None:
    """Many smooth rows: the share that is too close to call stays under 0.1 %, both ways occur."""
    requests, k, vocab = 2000, 3, 16
    generator = torch.Generator().manual_seed(11)
    logits = 1.5 * torch.randn(requests * (k + 1), vocab, generator=generator)
    ranked = logits.argsort(dim=1, descending=True).view(requests, k + 1, vocab)[:, :k]
    rank = torch.randint(0, 4, (requests, k, 1), generator=generator)
    drafts = ranked.gather(2, rank).squeeze(2)
    result: RelaxedAccepted = accept_relaxed(
        logits,
        drafts,
        RelaxedRule(
            thinking=torch.ones(requests, dtype=torch.bool),
            topk=torch.full((requests,), 3, dtype=torch.int32),
            delta=torch.full((requests,), 0.2),
            stop_ids=None,
            begin_token=-1,
            end_token=-1,
        ),
        num_contexts=0,
        max_draft_len=k,
    )
    rule = story.Rule(True, 3, torch.tensor(0.2).item(), [], -1, -1)
    close = near = far = 0
    told = logits.double().view(requests, k + 1, vocab).tolist()
    for request, rows in enumerate(told):
        run = story.relaxed(rows, drafts[request].tolist(), rule)
        if min(run.margins.values(), default=INF) < CLOSE:
            close += 1
            continue
        for i in run.margins:
            near, far = near + (i < len(run.tokens) - 1), far + (i == len(run.tokens) - 1)
        assert_run(result.accepted, request, run, k)
    assert close < requests / 1000
    assert near > requests / 10
    assert far > requests / 10


# --- the door ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(8)}, r"logits: expected a floating \[rows, V\] tensor"),
        ({"logits": torch.zeros(8, 4, dtype=torch.int32)}, "logits: expected a floating"),
        ({"logits": torch.zeros(6, 4)}, r"K\+1 = 3 rows per generation, got 6 rows"),
        ({"num_contexts": 9}, "expected 9 context rows"),
        ({"num_contexts": -1}, "expected -1 context rows"),
        ({"draft_tokens": torch.zeros(3)}, r"draft_tokens: expected G\*K = 4 ids, got 3"),
        ({"draft_lens": torch.zeros(3)}, r"draft_lens: expected shape \[2\], got \[3\]"),
        ({"final_context": torch.zeros(2)}, r"final_context: expected shape \[1\], got \[2\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
@pytest.mark.parametrize("relaxed", [False, True], ids=["strict", "relaxed"])
def test_shapes_that_do_not_fit(change: dict[str, object], message: str, relaxed: bool) -> None:
    arguments = {
        "logits": torch.zeros(7, 4),
        "draft_tokens": torch.zeros(2, 2, dtype=torch.int32),
        "num_contexts": 1,
        "max_draft_len": 2,
        **change,
    }
    if relaxed:
        rule = Batch(2, 4, rules=[story.Rule(False, 1, 0.0, [], -1, -1)] * 3).rule()
        with pytest.raises(TensorContractError, match=message):
            accept_relaxed(rule=rule, **arguments)
    else:
        with pytest.raises(TensorContractError, match=message):
            accept_strict(**arguments)
