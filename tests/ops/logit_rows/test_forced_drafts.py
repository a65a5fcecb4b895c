"""Drafts of requests with a spent thinking budget: example, torch and Triton agree."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft import write_drafts
from mtp_plugin.ops.logit_rows import ThinkingRule
from mtp_plugin.ops.step import DraftOutput, SlotRows
from tests.op_arguments import check_arguments
from tests.ops.on_device import DEVICE, vector
from tests.ops.thinking_budget.example import Tags, Thinker
from tests.ops.thinking_budget.test_thinking_budget import (
    copy_of,
    rule_of,
    slots_of,
    some_tags,
    some_thinker,
    some_tokens,
)


@pytest.mark.parametrize("backend", Backend)
def test_example_torch_and_triton_agree(backend: Backend) -> None:
    """Each forced draft is the next id of the end sequence, after forced drafts too."""
    number = 0

    @settings(max_examples=40 if backend is Backend.TORCH else 20)
    @given(
        seed=st.integers(0, 2**31),
        requests=st.integers(1, 4),
        k=st.integers(1, 5),
        gap=st.integers(0, 2),
        id_stride=st.integers(1, 2),
    )
    def agree(seed: int, requests: int, k: int, **layout: int) -> None:
        nonlocal number
        rng = random.Random(seed)
        tags = some_tags(rng)
        thinkers = [some_thinker(rng) for _ in range(requests)]
        for each in thinkers:
            if each.thought is not None and rng.random() < 0.4:
                each.written = rng.randrange(len(tags.end))
        slots, rule = slots_of(thinkers, seed=seed, **layout), rule_of(tags)
        sampled = [some_tokens(rng, tags, k) for _ in thinkers]
        expected = []
        for each, tokens in zip(thinkers, sampled, strict=True):
            each, mine = copy_of(each), []
            for token in tokens:
                only = each.must_give(tags)
                number += only is not None
                mine.append(max(token, 0) if only is None else only)
                each.take(mine[-1], tags)
            expected.append(mine)
        drafts = torch.full((requests, k), -7, dtype=torch.int32, device=DEVICE)
        following = torch.full((requests, k + 1), -7, dtype=torch.int32, device=DEVICE)
        for column in range(k):
            tokens = vector((mine[column] for mine in sampled), torch.int32)
            place = DraftOutput(drafts, following, column)
            write_drafts(tokens, place, None, slots, rule, backend=backend)
        assert drafts.tolist() == expected
        assert following[:, 1:].tolist() == expected

    agree()
    assert number > 15


TAGS = Tags(1, (2, 3, 2), -1)
THINKERS = [Thinker(2, 3), Thinker(None), Thinker(2, 1), Thinker(0, 0)]


@pytest.mark.parametrize("backend", Backend)
def test_arguments(backend: Backend) -> None:
    def placed(drafts: torch.Tensor, slots: SlotRows, thinking: ThinkingRule) -> torch.Tensor:
        held = torch.tensor([[2, 9], [2, 9], [7, 9], [2, 9]], dtype=torch.int32, device=DEVICE)
        following = torch.zeros(4, 3, dtype=torch.int32, device=DEVICE)
        place = DraftOutput(held, following, 1)
        write_drafts(drafts, place, None, slots, thinking, backend=backend)
        return held

    arguments = {
        "drafts": vector([4, 5, 6, 7], torch.int32),
        "slots": slots_of(THINKERS),
        "thinking": rule_of(TAGS),
    }
    assert placed(**arguments)[:, 1].tolist() == [3, 5, 2, 3]
    refused = {"slots.table": "row-contiguous"}
    refused |= {f"thinking.{name}": f"{name}: expected" for name in ("end_ids", "next_progress")}
    free = {"slots.table: shorter", "slots.slot_ids: shorter"}
    check_arguments(placed, arguments, refused=refused, free=free)


def test_slots_of_too_few_requests() -> None:
    held = torch.zeros(6, 2, dtype=torch.int32, device=DEVICE)
    place = DraftOutput(held, torch.zeros(6, 3, dtype=torch.int32, device=DEVICE), 0)
    slots = slots_of(THINKERS[:1])
    with pytest.raises(TensorContractError, match="slot_ids: expected integer tensor"):
        write_drafts(held[:, 0], place, None, slots, rule_of(TAGS), backend=Backend.TORCH)
