"""Rows of draft inputs: their order, and refused shapes; `test_first_pass.py` has the others."""

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

H = 2


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


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
