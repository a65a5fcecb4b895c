"""Random steps to verify."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from mtp_plugin.ops.step import StepLayout
from tests.ops.acceptance import example
from tests.ops.acceptance.cases import (
    POOLS,
    Case,
    Thinker,
    int32,
    layout_of,
    relaxed_rule,
)
from tests.ops.on_device import DEVICE
from tests.ops.top_k.rows import DTYPES, VOCABS, best_ids, odd_rows, strided, without_nan


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
    r: random.Random,
    layout: StepLayout,
    logits: torch.Tensor,
    drafts: list[list[int]],
    samples: Any,
) -> dict[str, torch.Tensor]:
    """The argmax of most rows; another token of requests that sample at times; and one that
    no other token is accepted with here and there, often the draft."""
    choices, forced = [], []
    usable, vocab = without_nan(logits), logits.shape[1]
    first = best_ids(logits).tolist()
    for row in range(layout.num_logit_rows):
        drafted_row = row - layout.num_contexts
        g, i = divmod(max(drafted_row, 0), layout.step_rows)
        samples_here = samples[row] if drafted_row < 0 else samples[layout.num_contexts + g]
        choice = first[row]
        if bool((usable[row] == -math.inf).all()):
            choice = -1
        elif samples_here and r.random() < 0.4:
            choice = r.randrange(vocab)
        only = -1
        if r.random() < 0.15 and choice >= 0:
            drafted = drafted_row >= 0 and i < layout.draft_len and 0 <= drafts[g][i] < vocab
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
    trailing: int = 0,
    lens: bool = False,
    finals: bool = False,
    stops: int = 0,
    id_dtype: torch.dtype = torch.int32,
    **slots: Any,
) -> Case:
    """Drafts that mostly match, phases that begin and end inside runs, ids outside.

    stops: ids at most that end a request. slots: as for `relaxed_rule`.
    """
    rng, r = torch.Generator().manual_seed(seed), random.Random(seed)
    rows = num_contexts + num_generations * (k + 1)
    values = odd_rows(rng, rows, vocab, dtype, smooth=smooth)
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
        wide = [] if id_dtype == torch.int32 else [2**32 + int(best[g, i])]
        return r.choice([-1, vocab, vocab + 3, 2**31 - 1, begin, end, r.randrange(vocab), *wide])

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
    # up to K matches, K+1 too, and generations that are left to the other rules
    forced = [r.choice([-(2**31), -1, r.randint(0, k + 1), k, k]) for _ in drafts]
    table = torch.tensor(drafts, dtype=id_dtype).reshape(num_generations, k).to(DEVICE)
    layout = layout_of(num_contexts, num_generations, k)
    samples = [thinker.temperature > 0 for thinker in thinkers]
    chosen = some_choices(r, layout, values, drafts, samples)
    return Case(layout, strided(values, trailing), table, rule, int32(forced), options, **chosen)


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
    trailing=st.integers(0, 3),
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
    """A small vocabulary of few values: many ties, rows without a value and masked tokens."""
    rng = random.Random(seed)
    requests = num_contexts + num_generations

    def row() -> list[float]:
        values = [-math.inf, math.nan] if rng.random() < 0.05 else VALUES
        return [rng.choice(values) for _ in range(vocab)]

    def guess(target: list[float]) -> int:
        best = example.first_choice(target)
        if best is not None and rng.random() < right:
            return best
        return rng.randrange(-1, vocab + 2)

    contexts = [row() for _ in range(num_contexts)]
    generations = [[row() for _ in range(k + 1)] for _ in range(num_generations)]
    drafts = [[guess(target) for target in rows[:k]] for rows in generations]
    flat = contexts + [row for rows in generations for row in rows]
    logits = torch.tensor(flat).reshape(len(flat), vocab).to(dtype)
    begin, end = rng.sample(range(-1, vocab + 1), 2)
    thinkers = [
        some_thinker(
            rng,
            topk=rng.choice([1, 2, 3, vocab, vocab + 5]),
            limit=rng.choice([0.0, 0.25, 0.6, 1.0]),
            stop_ids=[rng.choice([-1, -1, rng.randrange(vocab)]) for _ in "ab"],
        )
        for _ in range(requests)
    ]
    rule = relaxed_rule(thinkers, begin, end, seed=seed, **slots)
    options: dict[str, Any] = {}
    if lens:
        options["draft_lens"] = int32([rng.randint(0, k) for _ in drafts])
    if finals:
        ends = [rng.random() < 0.5 for _ in contexts]
        options["final_context"] = torch.tensor(ends, dtype=torch.bool, device=DEVICE)
    forced = int32([rng.randint(-2, k + 1) for _ in drafts])
    table = int32(drafts).reshape(num_generations, k)
    layout = layout_of(num_contexts, num_generations, k)
    samples = [thinker.temperature > 0 for thinker in thinkers]
    chosen = some_choices(rng, layout, logits, drafts, samples)
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
    """Its argmaxes as target tokens, and forced ids that are drafts for a share of rows."""
    rng = torch.Generator().manual_seed(seed)
    first = best_ids(case.logits).int()
    dead = (without_nan(case.logits) == -torch.inf).all(dim=1)
    first = torch.where(dead, -1, first)
    drafts = torch.nn.functional.pad(case.drafts.int(), (0, 1), value=-1).reshape(-1)
    drafts = torch.nn.functional.pad(drafts, (case.layout.num_contexts, 0), value=-1)
    only = torch.where(torch.rand(first.shape, generator=rng).to(DEVICE) < share, drafts, -1)
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
    rng = torch.Generator().manual_seed(seed)
    logits = (1.5 * torch.randn(requests * (k + 1), vocab, generator=rng)).to(DEVICE, dtype)
    first = logits.float().topk(4, dim=1).indices.view(requests, k + 1, 4)[:, :k]
    rank = torch.randint(0, 4, (requests, k, 1), generator=rng).to(DEVICE)
    thinking = (torch.rand(requests, generator=rng) < 0.8).tolist()
    limit = 0.2 if vocab < 100 else 2e-4
    thinkers = [
        Thinker(flag, topk=3, limit=limit, temperature=0.7 * (place % 5 == 4))
        for place, flag in enumerate(thinking)
    ]
    rule = relaxed_rule(thinkers, 5, 6, seed=seed, order=0)
    forced = torch.randint(-k - 2, k + 2, (requests,), generator=rng, dtype=torch.int32)
    drafts = first.gather(2, rank).squeeze(2).int()
    case = Case(layout_of(0, requests, k), logits, drafts, rule, forced.to(DEVICE))
    return chosen_rows(case, seed)
