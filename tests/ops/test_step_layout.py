"""The shape of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.step import StepLayout, to_device


def layout(**changed: object) -> StepLayout:
    fields = {
        "chunk_lens": (3, 1),
        "num_generations": 2,
        "draft_len": 2,
        "context_lens": torch.tensor([3, 1]),
    }
    return StepLayout(**(fields | changed))  # type: ignore[arg-type]


def test_counts() -> None:
    step = layout()
    assert (step.num_contexts, step.num_requests, step.num_ctx_tokens) == (2, 4, 4)
    assert (step.step_rows, step.num_tokens, step.num_logit_rows) == (3, 10, 8)


def test_generations_alone() -> None:
    step = layout(chunk_lens=(), context_lens=torch.empty(0, dtype=torch.int32), draft_len=0)
    assert (step.num_contexts, step.num_ctx_tokens, step.num_tokens) == (0, 0, 2)


def test_missing_positions_are_refused_by_name() -> None:
    with pytest.raises(TensorContractError, match="draws: needs the step's positions, got None"):
        layout().expect_positions("draws")
    positions = torch.arange(10)
    assert layout(positions=positions).expect_positions("draws") is positions


def test_logit_positions_are_computed_once_a_step() -> None:
    """Verification and every draft pass read them."""
    step = layout(positions=torch.tensor([5, 6, 7, 0, 9, 10, 11, 20, 21, 22]))
    first = step.first_logit_positions("sampling")
    assert first.tolist() == [7, 0, 9, 20]
    assert step.first_logit_positions("sampling") is first
    with pytest.raises(TensorContractError, match="sampling: needs the step's positions"):
        layout().first_logit_positions("sampling")


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_to_device_copies_what_it_is_given(kind: Callable[[list[int]], Any]) -> None:
    given = kind([1, 2])
    moved = to_device(given, torch.int64, "cpu")
    given[0] = 9
    assert moved.tolist() == [1, 2]
