"""Relaxed and forced rows are verified by processed values, as rows that were processed before."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_plugin.infer.sampling_rule import SamplingRule
from mtp_plugin.ops.acceptance import AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.speculative.host import RequestFacts
from mtp_plugin.speculative.state.logits_processor_allocator import LogitsProcessorAllocator
from tests.ops.acceptance.cases import (
    Case,
    Thinker,
    assert_same,
    layout_of,
    ragged,
    relaxed_rule,
)
from tests.ops.acceptance.margins import undecided
from tests.ops.acceptance.random_cases import make_case
from tests.ops.on_device import DEVICE, vector
from tests.ops.slots import column
from tests.ops.top_k.rows import DTYPES, best_ids

EDITS = ("bias_row", "allowed_row", "count_row")
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def options_of(r: random.Random, vocab: int) -> dict[str, Any]:
    """Some of what edits logits, all of it at times."""
    several = {
        "logit_bias": {r.randrange(vocab): r.uniform(-3, 3) for _ in range(9)},
        "allowed_token_ids": tuple(r.sample(range(vocab), r.randint(1, vocab))),
        "repetition_penalty": r.choice([0.8, 1.4]),
        "presence_penalty": r.uniform(-1, 2),
        "frequency_penalty": r.uniform(-1, 1),
    }
    return {name: value for name, value in several.items() if r.random() < 0.5}


def edited_by(case: Case, seed: int) -> tuple[Case, Case]:
    """The case with requests that ask for edits, drafts near the first choice of edited rows, and
    one whose logits are edited already; both have the choices of these."""
    r, vocab, slots = random.Random(seed), case.logits.shape[1], case.relaxed.slots
    allocator = LogitsProcessorAllocator(case.layout.num_requests + 1, vocab, DEVICE)
    rows = case.logits.float().cpu().clone()
    for request in range(case.layout.num_requests):
        params = SamplingParams(**options_of(r, vocab))
        prompt = [r.randrange(vocab) for _ in range(r.randint(1, 6))]
        facts = RequestFacts.of(request, params, prompt_len=len(prompt), max_seq_len=10**6)
        values = allocator.allocate(request, facts, prompt)
        slot = int(slots.slot_ids[request])
        for name in EDITS:
            column(slots, name)[slot] = values.get(name, -1)
        for name, neutral in PENALTIES.items():
            column(slots, name)[slot] = facts.options.get(name, neutral)
        g = request - case.layout.num_contexts
        first = request if g < 0 else case.layout.num_contexts + g * case.layout.step_rows
        rule, before = SamplingRule(params, prompt), []
        for i in range(1 if g < 0 else case.layout.step_rows):
            rows[first + i] = rule.edited(rows[first + i], before)
            if g >= 0 and i < case.layout.draft_len:
                near = rows[first + i].topk(4).indices.tolist()
                case.drafts[g, i] = r.choice([*near[:1] * 3, *near, *before[-1:] * 4])
                before = [*before, int(case.drafts[g, i])]
    done = rows.to(DEVICE)
    chosen = best_ids(done).int().masked_fill((done == -torch.inf).all(dim=1), -1)
    none = torch.full_like(case.forced_ids, -1)
    chosen_of = {"choices": chosen, "forced_ids": none}
    relaxed = replace(case.relaxed, slots=replace(slots, pools=allocator.pools))
    return replace(case, relaxed=relaxed, **chosen_of), replace(case, logits=done, **chosen_of)


def some_case(seed: int) -> Case:
    """All are thinking, a few sample, and distances decide about most drafts."""
    case = make_case(
        seed,
        num_contexts=seed % 2,
        num_generations=12,
        k=3,
        vocab=17,
        dtype=DTYPES[seed % 3],
        smooth=True,
    )
    thinkers = [
        Thinker(topk=4, limit=(0.03, 0.1, 0.2)[place % 3], temperature=0.7 * (place % 6 == 5))
        for place in range(case.layout.num_requests)
    ]
    return replace(case, relaxed=relaxed_rule(thinkers, 18, 19, seed=seed))


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("is_ragged", [False, True], ids=["uniform", "ragged"])
def test_processed_values_decide(backend: Backend, is_ragged: bool) -> None:
    decided = 0
    for seed in range(2):
        case, beforehand = edited_by(some_case(seed), seed)
        for kind in ("relaxed",) if seed else ("relaxed", "mixed"):
            given = ragged(case, seed) if is_ragged else case
            rules = replace(given.rules(kind), choices=given.choices)
            plain = replace(beforehand.rules(kind), choices=case.choices)
            margin = beforehand.margins(plain)
            decided += int(torch.isfinite(margin).sum())
            close = undecided(margin, plain, case.layout)
            mine = given.accept(replace(rules, processed_slots=case.relaxed.slots), backend)
            assert_same(mine, beforehand.accept(plain, Backend.TORCH), ~close)
    assert decided > 10


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("forced", [False, True], ids=["relaxed", "forced"])
def test_r35_masked_tokens_are_never_accepted(backend: Backend, forced: bool) -> None:
    """R35: however near: 1 is not allowed, 2 is, 3 may be penalised away, 4 near or masked."""
    vocab, k = 5, 1
    rule = relaxed_rule([Thinker(topk=vocab, limit=1.0)] * 4)
    row = [0.0, 0.1, -0.1, -0.1, -0.1]
    drafts = vector([[1], [2], [3], [4]])
    edits = LogitsProcessorAllocator(2, vocab, DEVICE)
    penalties = {} if forced else {"presence_penalty": 3e38, "frequency_penalty": 3e38}
    params = SamplingParams(allowed_token_ids=(0, 2, 3, 4), **penalties)
    facts = RequestFacts.of(0, params, prompt_len=2, max_seq_len=99)
    if forced:  # a host engine's dense bias masks 4
        bias = torch.tensor([0.0, 0.0, -1.0, 9.0, -torch.inf])
        facts = replace(facts, options={**facts.options, "logit_bias": bias})
    for name, value in {**dict.fromkeys(EDITS, -1), **edits.allocate(0, facts, [3, 3])}.items():
        column(rule.slots, name)[:] = value
    for name, neutral in PENALTIES.items():
        column(rule.slots, name)[:] = facts.options.get(name, neutral)
    slots = replace(rule.slots, pools=edits.pools)
    count = 1 if forced else -1
    case = Case(
        layout_of(0, 4, k),
        vector([row] * 8, torch.float32),
        drafts,
        replace(rule, slots=slots),
        vector([count] * 4, torch.int32),
    )
    rules = AcceptanceRules(
        relaxed=None if forced else case.relaxed,
        forced_matches=case.forced if forced else None,
        choices=vector([0] * 8, torch.int32),
        processed_slots=slots,
    )
    accepted = case.accept(rules, backend).accepted
    assert accepted.num_accepted.tolist() == ([1, 2, 2, 1] if forced else [1, 2, 1, 2])
