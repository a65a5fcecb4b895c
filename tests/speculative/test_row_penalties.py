"""Counts of output tokens: rows are written from lists and updated on the device."""

from __future__ import annotations

import random

import pytest
import torch

from mtp_plugin.ops.backend import Backend
from mtp_plugin.speculative.rows.options import EngineSettings, RowOptions
from mtp_plugin.speculative.rows.penalties import Penalties
from mtp_plugin.speculative.rows.request_slots import RequestSlots
from tests.ops.on_device import DEVICE, vector

VOCAB = 100
SLOTS = 9


def stage(penalties: Penalties, index: int, output: list[int], unused: tuple[int, ...] = ()) -> int:
    row = penalties.stage(index, output, unused)
    values = {"count_row": row, "repetition_penalty": 1.5}
    penalties._slots.stage(index, values, 0)
    return row


def make(backend: Backend) -> Penalties:
    slots = RequestSlots(SLOTS, DEVICE, EngineSettings(RowOptions(), 3), padding=0)
    return Penalties(slots, VOCAB, backend)


def apply(penalties: Penalties) -> None:
    penalties._slots.apply()
    penalties.apply()


def tables(penalties: Penalties) -> list[torch.Tensor]:
    return [penalties._pools.counts.clone(), penalties._pools.seen.clone()]


@pytest.mark.parametrize("backend", Backend)
def test_counts_of_lists_are_those_of_steps(backend: Backend) -> None:
    rng = random.Random(1)
    outputs = {
        i: [rng.choice((31, 32, 63, rng.randrange(VOCAB))) for _ in range(40)] for i in (3, 5)
    }
    whole, stepwise = make(backend), make(backend)
    for index, output in outputs.items():
        stage(whole, index, output)
        stage(stepwise, index, [])
    apply(whole)
    apply(stepwise)
    indices = vector(outputs)
    for step in range(20):
        tokens = torch.tensor([one[2 * step : 2 * step + 2] for one in outputs.values()])
        # the last column is a rejected draft
        tokens = torch.cat([tokens, torch.full((2, 1), 9)], 1).to(DEVICE, torch.int32)
        stepwise.count(tokens, vector([2, 2], torch.int32), indices)
    for one, two in zip(tables(whole), tables(stepwise), strict=True):
        assert torch.equal(one, two)
    assert int(whole._pools.counts.sum()) == 80


@pytest.mark.parametrize("backend", Backend)
def test_a_request_that_comes_again_has_the_counts_of_its_list(backend: Backend) -> None:
    penalties = make(backend)
    row = stage(penalties, 2, [7, 7, 8])
    apply(penalties)
    tokens, one = vector([9], torch.int32).view(1, 1), vector([1], torch.int32)
    penalties.count(tokens, one, vector([2]))  # of a step that is dropped
    assert stage(penalties, 2, [7, 7, 8]) == row
    apply(penalties)
    counts = penalties._pools.counts[row]
    assert [(int(i), int(counts[i])) for i in counts.nonzero()] == [(7, 2), (8, 1)]


def test_rows_grow_with_requests_and_unused_slots_give_theirs_back() -> None:
    penalties = make(Backend.TORCH)
    rows = [stage(penalties, index, [index]) for index in range(1, 6)]
    assert rows == [0, 1, 2, 3, 4]
    apply(penalties)
    assert len(penalties._pools.counts) == 8
    assert stage(penalties, 7, [50], unused=(2, 6)) == 1
    apply(penalties)
    kept = [penalties._pools.counts[row].nonzero().flatten().tolist() for row in rows]
    assert kept == [[1], [50], [3], [4], [5]]
    assert stage(penalties, 8, [], unused=(6,)) == 5
