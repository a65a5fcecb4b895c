"""Drafts that were drawn go to every reader and nowhere else: story, torch and kernel."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.draft import place_drafts
from tests.doors import check_strided_arguments
from tests.speculative.ops.draft.loop import Loop
from tests.speculative.ops.on_device import vector

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
def test_drawn_drafts_are_written_where_they_are_read(
    requests, k, shift, advance, kv, max_position, seed
) -> None:
    dice = random.Random(seed)
    column = dice.randrange(k)
    drawn = [dice.randint(-1, 200_000) for _ in range(requests)]
    told = Loop.of(seed, requests, k)
    for request, draft in enumerate(drawn):
        draft = max(draft, 0)
        told.drafts[request, column] = draft
        told.following[request, column + 2] = draft
        if shift:
            told.shifted[int(told.last_rows[request]) + column + 1] = draft
        if advance:
            position = int(told.positions[request]) + 1
            told.positions[request] = min(position, max_position or position)
            told.kv_lens[request] += int(kv)
    for backend in Backend:
        mine = Loop.of(seed, requests, k)
        place = mine.column(column, shift, advance, kv, max_position)
        place_drafts(vector(drawn, torch.int32), place, backend=backend)
        mine.assert_same(told)


@both
def test_strided_drafts(backend: Backend) -> None:
    def place(drafts: torch.Tensor) -> list[torch.Tensor]:
        loop = Loop.of(1, 4, 2)
        place_drafts(drafts, loop.column(1, shift=True), backend=backend)
        return [loop.drafts, loop.following, loop.shifted]

    check_strided_arguments(place, {"drafts": vector([4, -1, 9, 2], torch.int32)})


@both
def test_drafts_of_another_shape_or_type(backend: Backend) -> None:
    loop = Loop.of(1, 4, 2)
    for drafts in (vector([1, 2, 3], torch.int32), vector([1, 2, 3, 4], torch.int64)):
        with pytest.raises(TensorContractError, match=r"drafts: expected torch\.int32"):
            place_drafts(drafts, loop.column(0), backend=backend)
