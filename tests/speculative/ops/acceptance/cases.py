"""Steps to judge, what is asked of their verdicts, and the story that tells them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules, RelaxedRule, Verdict, accept
from mtp_plugin.speculative.step import (
    PAD_TOKEN,
    STATUS_NO_FINITE_LOGIT,
    STATUS_OK,
    Accepted,
    StepLayout,
)
from tests.doors import poisoned_memory
from tests.kernels.top_k.rows import DTYPES, VOCABS, best_ids, odd_rows, strided, without_nan
from tests.speculative.ops.acceptance import story
from tests.speculative.ops.acceptance.margins import CLOSE, margins, undecided
from tests.speculative.ops.on_device import DEVICE, POISON, poisoned

KINDS = ("strict", "relaxed", "forced", "mixed")
"""Which rules a step has; `forced` and `mixed` leave some rows to the others."""


def layout_of(num_contexts: int, num_generations: int, k: int) -> StepLayout:
    """Prompts of two rows each, of which one has logits."""
    lens = torch.full((num_contexts,), 2, dtype=torch.int32, device=DEVICE)
    return StepLayout((2,) * num_contexts, num_generations, k, lens)


class Judged(NamedTuple):
    """What a step came to."""

    verdict: Verdict
    following: torch.Tensor  # the next inputs, of which only the first column may be written

    @property
    def accepted(self) -> Accepted:
        return self.verdict.accepted


@dataclass(frozen=True)
class Case:
    """One call: tensors on the device."""

    layout: StepLayout
    logits: torch.Tensor
    drafts: torch.Tensor  # [G, K]
    relaxed: RelaxedRule
    forced: torch.Tensor  # [G], some negative
    options: dict[str, Any] = field(default_factory=dict)

    def rules(self, kind: str) -> AcceptanceRules:
        return AcceptanceRules(
            relaxed=self.relaxed if kind in ("relaxed", "mixed") else None,
            forced_matches=self.forced if kind in ("forced", "mixed") else None,
        )

    def judge(self, rules: AcceptanceRules | str, backend: Backend) -> Judged:
        if isinstance(rules, str):
            rules = self.rules(rules)
        shape = self.layout.num_requests, self.layout.draft_len + 2
        following = poisoned(*shape, dtype=torch.int32)
        given = {**self.options, "last_tokens": following[:, 0]}
        with poisoned_memory():
            verdict = accept(self.layout, self.logits, self.drafts, rules, **given, backend=backend)
        return Judged(verdict, following)

    def margins(self, rules: AcceptanceRules) -> torch.Tensor:
        lens = self.options.get("draft_lens")
        return margins(self.layout, self.logits, self.drafts, rules, lens)

    def told(self, rules: AcceptanceRules) -> list[story.Run]:
        """The runs of all requests; the phase of prompts too."""
        rows, contexts = self.logits.double().tolist(), self.layout.num_contexts
        finals, lens = self.options.get("final_context"), self.options.get("draft_lens")
        runs = []
        for c in range(contexts):
            run = story.prompt(rows[c], finals is None or bool(finals[c]))
            rule = told_rule(rules.relaxed, c)
            if rule is not None:
                run = run._replace(thinking=story.phase_behind(run.tokens, rule))
            runs.append(run)
        for g, drafts in enumerate(self.drafts.tolist()):
            first = contexts + g * self.layout.step_rows
            present = drafts if lens is None else drafts[: int(lens[g])]
            count = -1 if rules.forced_matches is None else int(rules.forced_matches[g])
            rule = told_rule(rules.relaxed, contexts + g)
            mine = rows[first : first + self.layout.step_rows]
            runs.append(story.judged(mine, present, rule, count))
        return runs


def told_rule(rule: RelaxedRule | None, request: int) -> story.Rule | None:
    if rule is None:
        return None
    stops = [] if rule.stop_ids is None else rule.stop_ids[request].tolist()
    return story.Rule(
        bool(rule.thinking[request]),
        int(rule.topk[request]),
        float(rule.delta[request]),
        [stop for stop in stops if stop >= 0],
        rule.begin_token,
        rule.end_token,
    )


# --- what is asked of a verdict ---


def assert_same(mine: Verdict, theirs: Verdict, rows: Any = slice(None)) -> None:
    for name in ("tokens", "num_accepted", "status"):
        one, other = getattr(mine.accepted, name), getattr(theirs.accepted, name)
        assert one.dtype == other.dtype == torch.int32
        assert one.shape == other.shape
        assert torch.equal(one[rows], other[rows]), name
    assert (mine.thinking is None) == (theirs.thinking is None)
    if mine.thinking is not None and theirs.thinking is not None:
        assert mine.thinking.dtype == theirs.thinking.dtype == torch.bool
        assert mine.thinking.shape == theirs.thinking.shape
        assert torch.equal(mine.thinking[rows], theirs.thinking[rows])


def assert_sides_agree(case: Case, kind: str) -> tuple[int, int]:
    """Torch and Triton agree; returns how many generations were too close to call, and how many of
    all were judged by a distance."""
    rules = case.rules(kind)
    margin = case.margins(rules)
    close = undecided(margin, rules, case.layout)
    mine, theirs = case.judge(rules, Backend.TRITON), case.judge(rules, Backend.TORCH)
    assert_same(mine.verdict, theirs.verdict, ~close)
    assert torch.equal(mine.following[~close], theirs.following[~close])
    return int(close.sum()), int(torch.isfinite(margin).any(dim=1).sum())


def assert_run(accepted: Accepted, request: int, run: story.Run) -> None:
    padding = [PAD_TOKEN] * (accepted.tokens.shape[1] - len(run.tokens))
    assert accepted.tokens[request].tolist() == run.tokens + padding
    assert accepted.num_accepted[request] == len(run.tokens)
    assert accepted.status[request] == (STATUS_OK if run.fine else STATUS_NO_FINITE_LOGIT)


def assert_told(case: Case, rules: AcceptanceRules, judged: Judged) -> None:
    """Every request is as the story has it, but for those that are too close to call; and the
    margins that say so are those of the story."""
    (verdict, following), margin = judged, case.margins(rules)
    assert (verdict.thinking is None) == (rules.relaxed is None)
    for request, run in enumerate(case.told(rules)):
        if any(0 < distance < CLOSE for distance in run.margins.values()):
            continue
        assert_run(verdict.accepted, request, run)
        assert following[request, 0] == (run.tokens[-1] if run.tokens else 0)
        if verdict.thinking is not None:
            assert bool(verdict.thinking[request]) == run.thinking
        if request >= case.layout.num_contexts:
            told = [run.margins.get(i, math.inf) for i in range(case.layout.draft_len)]
            found = margin[request - case.layout.num_contexts].tolist()
            torch.testing.assert_close(found, told, atol=CLOSE, rtol=0)
    assert (following[:, 1:] == POISON).all()


# --- steps to judge ---


def int32(items: list[Any]) -> torch.Tensor:
    return torch.tensor(items, dtype=torch.int32, device=DEVICE)


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
    stops: int | None = None,
    id_dtype: torch.dtype = torch.int32,
) -> Case:
    """Drafts that mostly match, phases that begin and end inside runs, ids outside."""
    dice, r = torch.Generator().manual_seed(seed), random.Random(seed)
    rows = num_contexts + num_generations * (k + 1)
    requests = num_contexts + num_generations
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
    stop_ids = None
    if stops is not None:
        stop_ids = torch.full((requests, stops), -1, dtype=torch.int32)
        for g, row in enumerate(drafts):
            for column in range(stops):
                if row and r.random() < 0.3:
                    stop_ids[num_contexts + g, column] = r.choice(row)
        stop_ids = stop_ids.to(DEVICE)

    deltas = [r.choice([0.0, 0.0213, 0.1371, 0.6117, 1.0]) for _ in range(requests)]
    rule = RelaxedRule(
        thinking=torch.tensor([r.random() < 0.6 for _ in range(requests)], dtype=torch.bool).to(
            DEVICE
        ),
        topk=int32([r.choice([1, 2, 4, vocab, vocab + 5]) for _ in range(requests)]),
        delta=torch.tensor(deltas, dtype=torch.float32, device=DEVICE),
        stop_ids=stop_ids,
        begin_token=begin,
        end_token=end,
    )
    ends_prompt = [r.random() < 0.5 for _ in range(num_contexts)]
    options = {
        "draft_lens": int32([r.randint(0, k) for _ in drafts]) if lens else None,
        "final_context": torch.tensor(ends_prompt, dtype=torch.bool).to(DEVICE) if finals else None,
    }
    # up to K matches, beyond what a draw could ask for, and rows that are left to the others
    forced = [r.choice([-(2**31), -1, r.randint(0, k + 1), k, k]) for _ in drafts]
    table = torch.tensor(drafts, dtype=id_dtype).reshape(num_generations, k).to(DEVICE)
    layout = layout_of(num_contexts, num_generations, k)
    return Case(layout, strided(values, behind), table, rule, int32(forced), options)


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
    stops=st.sampled_from([None, 0, 1, 3]),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
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
    stops = [[dice.choice([-1, -1, dice.randrange(vocab)]) for _ in "ab"] for _ in range(requests)]
    thinking = [dice.random() < 0.7 for _ in range(requests)]
    rule = RelaxedRule(
        thinking=torch.tensor(thinking, dtype=torch.bool, device=DEVICE),
        topk=int32([dice.choice([1, 2, 3, vocab, vocab + 5]) for _ in range(requests)]),
        delta=torch.tensor([dice.choice([0.0, 0.25, 0.6, 1.0]) for _ in range(requests)]).to(
            DEVICE
        ),
        stop_ids=int32(stops).reshape(requests, 2),
        begin_token=begin,
        end_token=end,
    )
    options: dict[str, Any] = {}
    if lens:
        options["draft_lens"] = int32([dice.randint(0, k) for _ in drafts])
    if finals:
        ends = [dice.random() < 0.5 for _ in contexts]
        options["final_context"] = torch.tensor(ends, dtype=torch.bool, device=DEVICE)
    forced = int32([dice.randint(-2, k + 1) for _ in drafts])
    table = int32(drafts).reshape(num_generations, k)
    layout = layout_of(num_contexts, num_generations, k)
    return Case(layout, strided(logits, 3), table, rule, forced, options)


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
)


def smooth_case(
    requests: int, k: int, vocab: int, seed: int, dtype: torch.dtype = torch.float32
) -> Case:
    """Random rows, drafts among their best four, a threshold that decides about many of them."""
    dice = torch.Generator().manual_seed(seed)
    logits = (1.5 * torch.randn(requests * (k + 1), vocab, generator=dice)).to(DEVICE, dtype)
    first = logits.float().topk(4, dim=1).indices.view(requests, k + 1, 4)[:, :k]
    rank = torch.randint(0, 4, (requests, k, 1), generator=dice).to(DEVICE)
    rule = RelaxedRule(
        thinking=(torch.rand(requests, generator=dice) < 0.8).to(DEVICE),
        topk=torch.full((requests,), 3, dtype=torch.int32, device=DEVICE),
        delta=torch.full((requests,), 0.2 if vocab < 100 else 2e-4, device=DEVICE),
        stop_ids=None,
        begin_token=5,
        end_token=6,
    )
    forced = torch.randint(-k - 2, k + 2, (requests,), generator=dice, dtype=torch.int32)
    drafts = first.gather(2, rank).squeeze(2).int()
    return Case(layout_of(0, requests, k), logits, drafts, rule, forced.to(DEVICE))
