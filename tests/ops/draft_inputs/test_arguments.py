"""Strided arguments give the same results; wrong arguments are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft_inputs import (
    DraftKVLengths,
    DraftWindows,
    History,
    advance_and_build_inputs,
    advance_history,
    build_reused_inputs,
)
from mtp_plugin.ops.step import DrafterInputs
from tests.op_arguments import check_arguments
from tests.ops.draft_inputs.batches import Batch, Request, make_batch

both = pytest.mark.parametrize("backend", Backend)
Arguments = dict[str, Any]

POOLS = {
    "history.tokens": "history.tokens: expected contiguous torch.int32 tensor [>= 1, >= 3]",
    "history.states": "history.states: expected contiguous floating-point tensor [>= 1, 3, 8]",
    "rows.hidden_states": "rows.hidden_states: expected row-contiguous",
}


def a_batch() -> Batch:
    """A batch with history rows before chunks, generations, and no NaN, which equals nothing."""
    batch = next(
        batch
        for seed in range(99)
        if all((batch := make_batch(seed, 3, 2, 3, 8, stops=True)).history_lens)
    )
    batch.states_pool.nan_to_num_()
    return batch


def history_arguments(batch: Batch) -> Arguments:
    return {
        "layout": batch.layout,
        "history": History(*batch.pools(), batch.slot_ids),
        "rows": batch.rows,
        "num_accepted": batch.num_accepted,
    }


def vanilla_arguments(batch: Batch) -> Arguments:
    return history_arguments(batch) | {
        "last_tokens": batch.last_tokens.clone(),
        "kv": DraftKVLengths(batch.kv_lens, 1),
        "windows": DraftWindows(4, batch.history_lens),
    }


def reused_arguments(batch: Batch) -> Arguments:
    return {
        "layout": batch.layout,
        "rows": batch.rows,
        "accepted_tokens": batch.accepted,
        "num_accepted": batch.num_accepted,
        "kv": DraftKVLengths(batch.kv_lens, 1),
        "max_position": 6,
    }


def written(op: Callable[..., DrafterInputs]) -> Callable[..., DrafterInputs]:
    """The op, whose result is cut to the elements that are specified."""

    def call(**arguments: Any) -> DrafterInputs:
        first = op(**arguments)
        rows, requests = first.positions.shape[0], first.last_rows.shape[0]
        return replace(
            first,
            ids=first.ids[:rows],
            states=first.states[:rows],
            kv_lens=first.kv_lens[:requests],
        )

    return call


FREE = {
    "history.tokens: shorter",  # S slots
    "history.states: shorter",
    "kv.lens: shorter",  # R of more lengths
}


@both
def test_arguments_of_the_history(backend: Backend) -> None:
    given = history_arguments(a_batch())
    unread = {"layout.positions", "rows.successors"}
    check_arguments(advance_history, given, refused=POOLS, free=FREE | unread, backend=backend)


@both
@pytest.mark.parametrize("in_place", [False, True])
def test_arguments_over_layers(backend: Backend, in_place: bool) -> None:
    arguments = vanilla_arguments(a_batch())
    if in_place:
        arguments["windows"] = DraftWindows(4, [0, 0], may_overwrite_states=True)
    check_arguments(
        written(advance_and_build_inputs), arguments, refused=POOLS, free=FREE, backend=backend
    )


@both
def test_arguments_of_a_reused_layer(backend: Backend) -> None:
    check_arguments(
        written(build_reused_inputs), reused_arguments(a_batch()), free=FREE, backend=backend
    )


def a_small_step() -> Batch:
    contexts = [
        Request([1, 2, 3], 0, [], 4, history=0),
        Request([1, 2, 3, 4], 2, [], 5, history=2),
    ]
    return Batch(3, contexts, [Request([1, 2, 3, 4, 5], 1, [9], 0, 0)] * 3, hidden=8)


@both
def test_pools_of_different_numbers_of_slots(backend: Backend) -> None:
    batch = a_small_step()
    tokens, states = batch.pools()
    more = torch.cat([states, states[:2]])
    advance_history(
        batch.layout,
        History(tokens, more, batch.slot_ids),
        batch.rows,
        batch.num_accepted,
        backend=backend,
    )
    batch.assert_history((tokens, more[:-2]))
