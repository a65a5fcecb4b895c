"""The reference against the story."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.speculative.ops.logits import mask_early_stops
from mtp_plugin.speculative.step import RowParameters
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.logits import story

VALUES = [-math.inf, math.nan, math.inf, -1.0, 0.0, 2.0]


@given(
    vocab=st.integers(1, 9),
    requests=st.integers(1, 4),
    width=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_any_rows(vocab: int, requests: int, width: int, dtype: torch.dtype, seed: int) -> None:
    """Requests with up to `width` stop ids, padded with -1, some outside the vocabulary."""
    dice = random.Random(seed)
    stops = [
        [dice.randrange(vocab + 2) for _ in range(dice.randint(0, width))] for _ in range(requests)
    ]
    first = [dice.randrange(8) for _ in range(requests)]
    owners = [dice.randrange(requests) for _ in range(dice.randint(1, 8))]
    indices = [dice.randrange(8) for _ in owners]
    table = [[dice.choice(VALUES) for _ in range(vocab)] for _ in owners]
    logits = torch.tensor(table).to(dtype)
    before = logits.clone()
    padded = [row + [-1] * (width - len(row)) for row in stops]
    masked = mask_early_stops(
        logits,
        RowParameters(torch.tensor(padded, dtype=torch.int32), torch.tensor(first).int()),
        torch.tensor(owners),
        torch.tensor(indices),
    )
    told = [
        story.without_early_stops(row, index, first[owner], stops[owner])
        for row, index, owner in zip(table, indices, owners, strict=True)
    ]
    assert masked.dtype == dtype
    # a NaN counts as -inf anyway, so either may stand where a stop id is masked
    assert torch.equal(_no_nan(masked), _no_nan(torch.tensor(told).to(dtype)))
    assert same_bits(logits, before)


def _no_nan(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(torch.isnan(logits), -math.inf)


def test_nothing_to_do_without_a_first_index() -> None:
    logits = torch.zeros(2, 3)
    parameters = RowParameters(torch.tensor([[1], [2]], dtype=torch.int32), None)
    rows = torch.tensor([0, 1])
    assert mask_early_stops(logits, parameters, rows, rows) is logits


@pytest.mark.parametrize("short", ["row_requests", "token_index"])
def test_rows_of_another_number_are_refused(short: str) -> None:
    rows = {"row_requests": torch.zeros(2).long(), "token_index": torch.zeros(2).long()}
    rows[short] = torch.zeros(3).long()
    parameters = RowParameters(torch.zeros(1, 1).int(), torch.zeros(1).int())
    with pytest.raises(TensorContractError, match=rf"{short}: expected shape \[2\], got \[3\]"):
        mask_early_stops(torch.zeros(2, 3), parameters, **rows)
