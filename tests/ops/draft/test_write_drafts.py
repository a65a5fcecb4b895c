"""Sampled drafts are written for every reader: example, torch reference and Triton agree."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft import write_drafts
from tests.op_arguments import check_arguments
from tests.ops.draft.loop import Loop
from tests.ops.on_device import vector

both = pytest.mark.parametrize("backend", Backend)


@settings(max_examples=30)
@given(
    requests=st.integers(0, 5),
    k=st.integers(1, 7),
    shift=st.booleans(),
    advance=st.booleans(),
    kv=st.booleans(),
    max_position=st.sampled_from([None, 30]),
    seed=st.integers(0, 2**31),
)
def test_sampled_drafts_are_written_for_every_reader(
    requests, k, shift, advance, kv, max_position, seed
) -> None:
    rng = random.Random(seed)
    column = rng.randrange(k)
    sampled = [rng.randint(-1, 200_000) for _ in range(requests)]
    expected = Loop.of(seed, requests, k)
    for request, draft in enumerate(sampled):
        draft = max(draft, 0)
        expected.drafts[request, column] = draft
        expected.following[request, column + 2] = draft
        if shift:
            expected.shifted[int(expected.last_rows[request]) + column + 1] = draft
        if advance:
            position = int(expected.positions[request]) + 1
            expected.positions[request] = min(position, max_position or position)
            expected.kv_lens[request] += int(kv)
    for backend in Backend:
        mine = Loop.of(seed, requests, k)
        output = mine.column(column, shift, advance, kv, max_position)
        write_drafts(vector(sampled, torch.int32), output, backend=backend)
        mine.assert_same(expected)


@both
def test_arguments(backend: Backend) -> None:
    def write(drafts: torch.Tensor) -> list[torch.Tensor]:
        loop = Loop.of(1, 4, 2)
        write_drafts(drafts, loop.column(1, shift=True), backend=backend)
        return [loop.drafts, loop.following, loop.shifted]

    drafts = vector([4, -1, 9, 2], torch.int32)
    check_arguments(write, {"drafts": drafts}, free={"drafts: elsewhere"})
