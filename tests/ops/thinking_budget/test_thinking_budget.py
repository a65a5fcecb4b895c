"""Thinking budgets: example, torch reference and Triton agree, and nothing else is written."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import ThinkingRule
from mtp_plugin.ops.step import Accepted, SlotRows, StepLayout
from mtp_plugin.ops.thinking_budget import force_thinking_end, update_thinking_state
from mtp_plugin.requests.thinking import ThinkingEnd
from tests.op_arguments import check_arguments, poisoned_memory, storage
from tests.ops.bits import same_bits
from tests.ops.on_device import DEVICE, vector
from tests.ops.slots import column, on_copy, slot_rows
from tests.ops.thinking_budget.example import Tags, Thinker

VOCAB = 6
BACKENDS = pytest.mark.parametrize("backend", Backend)


def rule_of(tags: Tags) -> ThinkingRule:
    return ThinkingRule.of(ThinkingEnd(tags.begin, tags.end, tags.end_token), DEVICE)


def slots_of(thinkers: list[Thinker], **layout: Any) -> SlotRows:
    values = [
        {
            "thinking_token_budget": -1 if each.budget is None else each.budget,
            "num_thinking": -1 if each.thought is None else each.thought,
            "end_progress": each.written,
        }
        # the others are unset without a budget
        if each.budget is not None
        else {"thinking_token_budget": -1}
        for each in thinkers
    ]
    return slot_rows(values, **layout)


def some_tags(rng: random.Random) -> Tags:
    begin, token = rng.sample(range(VOCAB), 2)
    end = tuple(rng.randrange(3) for _ in range(rng.choice([1, 1, 2, 3, 5])))
    if rng.random() < 0.5:
        end = (*end[:-1], token)
    return Tags(begin, end, token if rng.random() < 0.7 and token != begin else -1)


def some_thinker(rng: random.Random) -> Thinker:
    return Thinker(rng.choice([None, 0, 1, 2, 3, 9]), rng.choice([None, 0, 1, 2, 3]))


def some_tokens(rng: random.Random, tags: Tags, number: int) -> list[int]:
    likely = [*tags.end, *tags.end, tags.begin]
    return [
        rng.choice(likely) if rng.random() < 0.7 else rng.randrange(-1, VOCAB + 1)
        for _ in range(number)
    ]


def make_step(seed: int, contexts: int, generations: int, k: int, **layout: Any) -> Any:
    rng = random.Random(seed)
    tags = some_tags(rng)
    thinkers = [some_thinker(rng) for _ in range(contexts + generations)]
    for each in thinkers:  # sometimes within the end sequence
        if each.thought is not None and rng.random() < 0.4:
            each.written = rng.randrange(len(tags.end))
    drafts = [some_tokens(rng, tags, k) for _ in range(generations)]
    lens = torch.ones(contexts, dtype=torch.int32, device=DEVICE)
    shape = StepLayout((1,) * contexts, generations, k, lens)
    return tags, thinkers, drafts, shape, slots_of(thinkers, seed=seed, **layout), rng


def copy_of(each: Thinker) -> Thinker:
    return Thinker(each.budget, each.thought, each.written)


steps = {
    "seed": st.integers(0, 2**31),
    "contexts": st.integers(0, 2),
    "generations": st.integers(0, 3),
    "k": st.integers(0, 5),
}


@settings(max_examples=40)
@given(**steps, gap=st.integers(0, 2), id_stride=st.integers(1, 2), wide=st.booleans())
def test_force_thinking_end_matches_example(
    seed: int, contexts: int, generations: int, k: int, gap: int, id_stride: int, wide: bool
) -> None:
    tags, thinkers, drafts, layout, slots, rng = make_step(
        seed, contexts, generations, k, gap=gap, id_stride=id_stride
    )
    only_ids: list[int] = []
    for request, each in enumerate(thinkers):
        each, g = copy_of(each), request - contexts
        for token in [*([] if g < 0 else drafts[g]), None]:
            only = each.must_give(tags)
            only_ids.append(-1 if only is None else only)
            if token is not None:
                each.take(token, tags)
    dtype = torch.int64 if wide else torch.int32
    table = torch.tensor(drafts, dtype=dtype, device=DEVICE).reshape(generations, k)
    before = [rng.randrange(-1, VOCAB) for _ in only_ids]
    expected = [b if only < 0 else only for only, b in zip(only_ids, before, strict=True)]
    for backend in Backend:
        target_tokens, mine = vector(before, torch.int32), on_copy(slots)
        with poisoned_memory():
            forced = force_thinking_end(
                layout, table, mine, rule_of(tags), target_tokens, backend=backend
            )
        assert forced.dtype == torch.int32
        assert forced.tolist() == only_ids
        assert target_tokens.tolist() == expected
        assert same_bits(storage(mine.table), storage(slots.table))


@settings(max_examples=40)
@given(**steps, gap=st.integers(0, 2), id_stride=st.integers(1, 2))
def test_update_thinking_state_matches_example(
    seed: int, contexts: int, generations: int, k: int, gap: int, id_stride: int
) -> None:
    tags, thinkers, _, _, slots, rng = make_step(
        seed, contexts, generations, k, gap=gap, id_stride=id_stride
    )
    runs = [some_tokens(rng, tags, rng.randint(0, k + 1)) for _ in thinkers]
    padded = [[*run, *[-1] * (k + 1 - len(run))] for run in runs]
    tokens = torch.tensor(padded, dtype=torch.int32, device=DEVICE).reshape(len(runs), k + 1)
    counts = vector([len(run) for run in runs], torch.int32)
    accepted = Accepted(tokens, counts, torch.zeros_like(counts))
    expected = on_copy(slots)
    for request, (each, run) in enumerate(zip(thinkers, runs, strict=True)):
        for token in run:
            each.take(token, tags)
        if each.budget is not None:
            slot = int(slots.slot_ids[request])
            column(expected, "num_thinking")[slot] = -1 if each.thought is None else each.thought
            column(expected, "end_progress")[slot] = each.written
    for backend in Backend:
        mine = on_copy(slots)
        update_thinking_state(accepted, mine, rule_of(tags), backend=backend)
        assert same_bits(storage(mine.table), storage(expected.table))


@given(seed=st.integers(0, 2**31), prompt=st.integers(0, 9), output=st.integers(0, 9))
def test_host_counts_like_the_device(seed: int, prompt: int, output: int) -> None:
    """Prompt tokens do not count; generated tokens do, also when a request starts over."""
    rng = random.Random(seed)
    tags = some_tags(rng)
    end = ThinkingEnd(tags.begin, tags.end, tags.end_token)
    tokens, budget = some_tokens(rng, tags, prompt + output), rng.randrange(4)
    expected = Thinker(None)
    for token in tokens[:prompt]:
        expected.take(token, tags)
    expected.budget, expected.thought = budget, None if expected.thought is None else 0
    for token in tokens[prompt:]:
        expected.take(token, tags)
    thought, place = end.progress_after(tokens, prompt, budget)
    assert (None if thought < 0 else thought, place) == (expected.thought, expected.written)


def arguments() -> dict[str, Any]:
    lens = torch.ones(1, dtype=torch.int32, device=DEVICE)
    return {
        "layout": StepLayout((1,), 2, 2, lens),
        "draft_tokens": vector([[1, 2], [1, 1]]),
        "slots": slots_of([Thinker(0, 0), Thinker(1, 0), Thinker(0, 1)]),
        "rule": rule_of(Tags(0, (1, 2), -1)),
        "target_tokens": vector([5] * 7, torch.int32),
    }


REFUSED = {
    "target_tokens": "target_tokens: expected contiguous",
    "slots.table": "row-contiguous",
    "rule.end_ids": "end_ids: expected",
    "rule.next_progress": "next_progress: expected",
}


@BACKENDS
def test_arguments(backend: Backend) -> None:
    free = {f"slots.{name}: shorter" for name in ("table", "slot_ids")} | {"accepted.status"}
    of_step = free | {"layout.context_lens: elsewhere", "draft_tokens: dimensions"}
    check_arguments(force_thinking_end, arguments(), refused=REFUSED, free=of_step, backend=backend)
    given = arguments()
    counts = vector([1, 2, 3], torch.int32)
    run = vector([[1, -1, -1], [3, 1, -1], [1, 2, 0]], torch.int32)
    arguments_of_update = {"accepted": Accepted(run, counts, counts * 0)}
    arguments_of_update |= {name: given[name] for name in ("slots", "rule")}

    def update(**arguments: Any) -> torch.Tensor:
        update_thinking_state(**arguments)
        return arguments["slots"].table

    refused = {name: words for name, words in REFUSED.items() if name != "target_tokens"}
    check_arguments(update, arguments_of_update, refused=refused, free=free, backend=backend)
