"""Pieces of draft inputs in letters; `test_first_pass.py` has random batches of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.draft_inputs import (
    accepted_rows,
    concatenate,
    context_rows,
    context_rows_with_history,
    generation_window,
)
from mtp_plugin.ops.step import DraftInputs
from tests.ops.draft_inputs import example
from tests.ops.draft_inputs.example import Row
from tests.ops.letters import ids

H = 2


def states(positions: list[int], request: int = 0) -> torch.Tensor:
    """The state of position p of a request: recognisable, different in each."""
    names = torch.tensor([1000.0 * request + p for p in positions]).reshape(-1, 1)
    return names + 0.5 * torch.arange(H)


def assert_rows(inputs: DraftInputs, rows: list[Row], request: int = 0, first: int = 0) -> None:
    """Rows [first, first + len(rows)) of the inputs are the story's."""
    part = slice(first, first + len(rows))
    assert inputs.input_ids.dtype == torch.int32
    assert inputs.input_ids[part].tolist() == [row.token for row in rows]
    assert inputs.position_ids[part].tolist() == [row.position for row in rows]
    for row, state in zip(rows, inputs.hidden_states[part], strict=True):
        if row.state is not None:
            assert torch.equal(state, states([row.state], request)[0])


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --- windows of generations ---


def test_window_letters() -> None:
    """K = 3: pool `q r s`, the step read `t u v w` and emitted `u x`."""
    inputs = generation_window(
        int32(ids("qrstuvw")).unsqueeze(0),
        states([*range(7)]).unsqueeze(0),
        torch.tensor([1]),
        int32(ids("x")),
        torch.tensor([1]),
        4,
    )
    assert inputs.input_ids.tolist() == ids("stux")
    assert_rows(inputs, example.window(ids("qrstu") + ids("x"), 4))


# --- prompts ---


def test_context_letters() -> None:
    """Prompt `p q r s`, emitted `t`."""
    inputs = context_rows(
        int32(ids("pqrs")), torch.arange(4), states([0, 1, 2, 3]), int32([4]), int32(ids("t"))
    )
    assert inputs.input_ids.tolist() == ids("qrst")
    assert_rows(inputs, example.chunk(ids("pqrst"), 0, 4, history=0))


def test_history_letters() -> None:
    """Prompt `p q r | s`, K = 2, emitted `t`: states of `q r s` with tokens `r s t`."""
    chunk = int32(ids("s"))
    rows = context_rows(chunk, torch.tensor([3]), states([3]), int32([1]), int32(ids("t")))
    inputs = context_rows_with_history(
        rows, chunk, int32(ids("qr")).unsqueeze(0), states([1, 2]).unsqueeze(0), [1], [2]
    )
    assert inputs.input_ids.tolist() == ids("rst")
    assert_rows(inputs, example.chunk(ids("pqrst"), 3, 4, history=2))


# --- accepted columns ---


def test_accepted_letters() -> None:
    """The step read `t u v w` and emitted `u v x`: its rows are `u v x x`."""
    inputs = accepted_rows(
        int32(ids("uvx.")).unsqueeze(0), torch.arange(4, 8), states([4, 5, 6, 7])
    )
    assert inputs.input_ids.tolist() == ids("uvxx")
    assert_rows(inputs, example.accepted(ids("uvx"), 4, start=4))


def test_contexts_precede_generations() -> None:
    first = DraftInputs(int32([1]), torch.tensor([5]), torch.ones(1, H, dtype=torch.bfloat16))
    second = DraftInputs(int32([2, 3]), torch.tensor([8, 9]), torch.zeros(2, H))
    both = concatenate(first, second)
    assert both.input_ids.tolist() == [1, 2, 3]
    assert both.position_ids.tolist() == [5, 8, 9]
    # the type is that of the step's states, whatever the pools have
    assert both.hidden_states.dtype == torch.bfloat16
    assert both.hidden_states[:, 0].tolist() == [1.0, 0.0, 0.0]


# --- wrong arguments ---


ARGUMENTS: dict[Callable[..., Any], dict[str, Any]] = {
    generation_window: {
        "entry_tokens": torch.zeros(2, 3, dtype=torch.int32),
        "entry_states": torch.zeros(2, 3, H),
        "first_entry": torch.tensor([0, 0]),
        "last_tokens": int32([1, 2]),
        "first_position": torch.tensor([0, 0]),
        "window": 2,
    },
    context_rows: {
        "input_ids": int32([1, 2, 3]),
        "position_ids": torch.arange(3),
        "hidden_states": torch.zeros(3, H),
        "context_lens": int32([2, 1]),
        "last_tokens": int32([4, 5]),
    },
    context_rows_with_history: {
        "rows": DraftInputs(int32([2, 9, 8]), torch.arange(3), torch.zeros(3, H)),
        "chunk_ids": int32([1, 2, 3]),
        "pool_tokens": torch.zeros(2, 4, dtype=torch.int32),
        "pool_states": torch.zeros(2, 4, H),
        "context_lens": [2, 1],
        "history_lens": [0, 4],
    },
    accepted_rows: {
        "accepted_tokens": torch.zeros(2, 3, dtype=torch.int32),
        "position_ids": torch.arange(6),
        "hidden_states": torch.zeros(6, H),
    },
}
LENS = "context_lens: expected 3 rows of 2 contexts"


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        (generation_window, {"window": 4}, "at most E = 3 rows"),
        (generation_window, {"entry_states": torch.zeros(2, 2, H)}, r"states \[2, 3, H\]"),
        (generation_window, {"first_entry": torch.tensor([0])}, r"first_entry: expected .* \[2\]"),
        (generation_window, {"last_tokens": int32([1])}, r"last_tokens: expected .* \[2\]"),
        (generation_window, {"first_position": int32([1])}, r"first_position: expected .* \[2\]"),
        (context_rows, {"position_ids": torch.arange(4)}, r"position_ids: expected .* \[3\]"),
        (context_rows, {"hidden_states": torch.zeros(2, H)}, r"states: expected .* \[3, H\]"),
        (context_rows, {"last_tokens": int32([4])}, r"last_tokens: expected .* \[2\]"),
        (context_rows_with_history, {"chunk_ids": int32([1])}, r"chunk_ids: expected .* \[3\]"),
        (context_rows_with_history, {"context_lens": [2]}, LENS),
        (context_rows_with_history, {"context_lens": [2, 2]}, LENS),
        (context_rows_with_history, {"history_lens": [0]}, LENS),
        (context_rows_with_history, {"history_lens": [5, 0]}, "history_lens: expected 0 to K = 4"),
        (context_rows_with_history, {"pool_states": torch.zeros(2, 3, H)}, r"\[2, 4, 2\]"),
        (accepted_rows, {"position_ids": torch.arange(4)}, r"position_ids: expected .* \[6\]"),
        (accepted_rows, {"hidden_states": torch.zeros(4, H)}, r"states: expected .* \[6, H\]"),
    ],
)
def test_wrong_shapes_are_refused(op: Callable[..., Any], change: Any, message: str) -> None:
    op(**ARGUMENTS[op])
    with pytest.raises(TensorContractError, match=message):
        op(**ARGUMENTS[op] | change)


def test_states_of_other_widths_do_not_follow_each_other() -> None:
    rows = DraftInputs(int32([1]), torch.tensor([5]), torch.ones(1, H))
    wide = DraftInputs(int32([1]), torch.tensor([5]), torch.ones(1, H + 1))
    with pytest.raises(TensorContractError, match="expected rows of one width, got 2 and 3"):
        concatenate(rows, wide)
