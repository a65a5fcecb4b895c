"""Strided arguments give the same results; wrong arguments are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import TensorContractError
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
from tests.op_arguments import check_strided_arguments
from tests.ops.bits import same_bits
from tests.ops.draft_inputs.batches import Batch, Request, make_batch
from tests.ops.on_device import DEVICE

both = pytest.mark.parametrize("backend", Backend)
Arguments = dict[str, Any]

POOLS = {
    "history.tokens": "history.tokens: expected contiguous torch.int32 tensor [S, >= 3]",
    "history.states": "history.states: expected contiguous floating-point tensor [S, 3, 8]",
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


@both
def test_strided_arguments_of_the_history(backend: Backend) -> None:
    check_strided_arguments(
        advance_history, history_arguments(a_batch()), refused=POOLS, backend=backend
    )


@both
@pytest.mark.parametrize("in_place", [False, True])
def test_strided_arguments_over_layers(backend: Backend, in_place: bool) -> None:
    arguments = vanilla_arguments(a_batch())
    if in_place:
        arguments["windows"] = DraftWindows(4, [0, 0], may_overwrite_states=True)
    check_strided_arguments(
        written(advance_and_build_inputs), arguments, refused=POOLS, backend=backend
    )


@both
def test_strided_arguments_of_a_reused_layer(backend: Backend) -> None:
    check_strided_arguments(
        written(build_reused_inputs), reused_arguments(a_batch()), backend=backend
    )


# --- wrong arguments ---


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


ids = {"dtype": torch.int32}
META = {"dtype": torch.int32, "device": "meta"}

# the step has C = 2 contexts of 3 + 2 rows and G = 3 generations of K = 3: R = 5, T = 17; H = 8
ROWS = [
    ({"rows.input_ids": zeros(16, **ids)}, r"rows.input_ids: .* \[17\].*\[16\]"),
    ({"rows.input_ids": zeros(17)}, "rows.input_ids: .*got torch.float32"),
    ({"rows.input_ids": [1] * 17}, r"rows.input_ids: .*got \[1, 1"),
    ({"rows.hidden_states": zeros(16, 8)}, r"hidden_states: .*tensor \[17, H\]"),
    ({"rows.hidden_states": zeros(17)}, r"hidden_states: .*tensor \[17, H\]"),
    ({"rows.hidden_states": zeros(17, 8).bool()}, "hidden_states: .*got torch.bool"),
    ({"num_accepted": zeros(4, **ids)}, r"num_accepted: expected integer tensor \[5\]"),
    ({"num_accepted": torch.zeros(5, **META)}, "num_accepted: .*on meta"),
    ({"layout.context_lens": torch.zeros(2, **META)}, "step, context_lens: .*on meta"),
]
HISTORY = [
    ({"history.tokens": zeros(7, 2, **ids)}, r"history.tokens: .*\[S, >= 3\].* got .*\[7, 2\]"),
    ({"history.tokens": zeros(7, 3)}, "history.tokens: .*got torch.float32"),
    ({"history.states": zeros(7, 4, 8)}, r"history.states: .*\[S, 3, 8\].* got .*\[7, 4, 8\]"),
    ({"rows.hidden_states": zeros(17, 9)}, r"history.states: .*\[S, 3, 9\].* got .*\[7, 3, 8\]"),
    ({"history.states": zeros(7, 3, 8, **ids)}, "history.states: expected contiguous floating"),
    ({"history.slot_ids": zeros(4, **ids)}, r"history.slot_ids: expected integer tensor \[5\]"),
    ({"history.slot_ids": zeros(5)}, "history.slot_ids: .*got torch.float32"),
]
SUCCESSORS = [
    ({"rows.successors": None}, r"successors: expected integer tensor \[2\].*, got None"),
    ({"rows.successors": zeros(3, **ids)}, r"successors: expected integer tensor \[2\]"),
]
POSITIONS = [
    ({"layout.positions": None}, "inputs: needs the step's positions, got None"),
    ({"layout.positions": torch.zeros(17, **META)}, "step, positions: .*on meta"),
]
KV = [
    ({"kv.lens": zeros(4, **ids)}, r"kv.lens: .* \[>= 5\] .*\[4\]"),
    ({"kv.lens": zeros(5)}, "kv.lens: .*got torch.float32"),
]
WINDOWS = [
    ({"last_tokens": zeros(4, **ids)}, r"last_tokens: expected integer tensor \[5\]"),
    ({"windows.window": 5}, r"window: expected an integer in 1\.\.4, got 5"),
    ({"windows.window": 0}, "window: .*got 0"),
    ({"windows.history_lens": [1]}, r"history_lens: expected one per context \(2\), got \[1\]"),
    ({"windows.history_lens": [4, 0]}, r"history_lens: expected an integer in 0\.\.3, got 4"),
    ({"windows.history_lens": [-1, 0]}, "history_lens: .* got -1"),
    ({"windows.spare_rows": -1}, "spare_rows: expected an integer >= 0, got -1"),
]
ACCEPTED = [
    ({"accepted_tokens": zeros(5, 3, **ids)}, r"accepted_tokens: .*\[5, 4\] .*\[5, 3\]"),
    ({"accepted_tokens": zeros(5, 4)}, "accepted_tokens: .*got torch.float32"),
]


def a_small_step() -> Batch:
    contexts = [
        Request([1, 2, 3], 0, [], 4, history=0),
        Request([1, 2, 3, 4], 2, [], 5, history=2),
    ]
    return Batch(3, contexts, [Request([1, 2, 3, 4, 5], 1, [9], 0, 0)] * 3, hidden=8)


@both
@pytest.mark.parametrize(
    ("op", "make", "change", "message"),
    [
        *((advance_history, history_arguments, *case) for case in ROWS + HISTORY),
        *(
            (advance_and_build_inputs, vanilla_arguments, *case)
            for case in ROWS + HISTORY + POSITIONS + SUCCESSORS + KV + WINDOWS
        ),
        *(
            (build_reused_inputs, reused_arguments, *case)
            for case in ROWS + POSITIONS + SUCCESSORS + KV + ACCEPTED
        ),
    ],
)
def test_wrong_arguments_are_refused(
    backend: Backend,
    op: Callable[..., Any],
    make: Callable[[Batch], Arguments],
    change: Arguments,
    message: str,
) -> None:
    """By name, and before any pool changes."""
    arguments = make(a_small_step())
    for name, value in change.items():
        first, _, field = name.partition(".")
        arguments[first] = replace(arguments[first], **{field: value}) if field else value
    history = arguments.get("history")
    pools = [] if history is None else [history.tokens, history.states]
    before = [pool.clone() for pool in pools]
    with pytest.raises(TensorContractError, match=message):
        op(**arguments, backend=backend)
    assert all(same_bits(pool, same) for pool, same in zip(pools, before, strict=True))


@both
def test_pools_of_different_numbers_of_slots(backend: Backend) -> None:
    batch = a_small_step()
    tokens, states = batch.pools()
    more = torch.cat([states, zeros(2, 3, 8)])
    advance_history(
        batch.layout,
        History(tokens, more, batch.slot_ids),
        batch.rows,
        batch.num_accepted,
        backend=backend,
    )
    batch.assert_history((tokens, more[:-2]))
