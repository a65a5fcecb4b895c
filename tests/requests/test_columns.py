"""The int32 of a slot: how numbers are stored, and where."""

from __future__ import annotations

import copy
import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import MetadataError
from mtp_plugin.requests.columns import (
    FLOAT32_MAX,
    INT32_MAX,
    LOGIT_CHANGE,
    REQUEST_COLUMNS,
    SlotColumn,
    TableColumns,
    request_column,
)
from mtp_plugin.requests.options import OPTIONS
from mtp_plugin.requests.stopping import MAX_STOP_IDS, NO_STOP

NAMES = [column.name for column in REQUEST_COLUMNS]


def as_float(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


# --- numbers ---


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_floats_are_kept_bit_for_bit(value: float) -> None:
    (bits,) = SlotColumn("x", float).bits(value)
    assert -(2**31) <= bits < 2**31
    back = as_float([bits]).item()
    assert back == value
    assert math.copysign(1, back) == math.copysign(1, value)


@given(st.floats(min_value=-1e38, max_value=1e38))
def test_floats_are_rounded_as_torch_rounds(value: float) -> None:
    (bits,) = SlotColumn("x", float).bits(value)
    assert bits == torch.tensor([value], dtype=torch.float32).view(torch.int32).item()


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (math.inf, FLOAT32_MAX),
        (-math.inf, -FLOAT32_MAX),
        (1e300, FLOAT32_MAX),
        (10**400, FLOAT32_MAX),
        (torch.finfo(torch.float32).max, FLOAT32_MAX),
        (1e-60, 0.0),
        (3, 3.0),
        (True, 1.0),
    ],
)
def test_floats_beyond_32_bits(value: float, kept: float) -> None:
    back = as_float(SlotColumn("x", float).bits(value))
    assert back.item() == torch.tensor(kept, dtype=torch.float32).item()
    assert back.isfinite()


def test_what_is_no_number_stays_none() -> None:
    assert as_float(SlotColumn("x", float).bits(math.nan)).isnan()


@given(st.integers(-INT32_MAX, INT32_MAX))
def test_integers_are_kept(value: int) -> None:
    assert SlotColumn("x", int).bits(value) == [value]


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (2**31 - 1, 2**31 - 1),
        (2**31, INT32_MAX),
        (10**30, INT32_MAX),
        (math.inf, INT32_MAX),
        (-(2**31), -INT32_MAX - 1),
        (-(10**30), -INT32_MAX - 1),
        (True, 1),
        (False, 0),
        (2.0, 2),
    ],
)
def test_integers_beyond_32_bits(value: float, kept: int) -> None:
    (bits,) = SlotColumn("x", int).bits(value)
    assert bits == kept
    assert type(bits) is int
    struct.pack("i", bits)
    assert SlotColumn("x", int, value).bits(None) == [bits]


# --- widths ---


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (None, [-1, -1, -1]),
        ((), [-1, -1, -1]),
        (7, [7, -1, -1]),
        ([7], [7, -1, -1]),
        ((7, 8, 9), [7, 8, 9]),
        ([2**40, -1, 0], [INT32_MAX, -1, 0]),
    ],
)
def test_a_row_of_numbers_is_filled_up(value: object, bits: list[int]) -> None:
    assert SlotColumn("x", int, -1, 3).bits(value) == bits


def test_a_row_of_floats_is_filled_up() -> None:
    column = SlotColumn("x", float, 0.5, 3)
    assert as_float(column.bits([1.25])).tolist() == [1.25, 0.5, 0.5]


# --- places ---

more_columns = st.lists(
    st.builds(
        SlotColumn,
        name=st.text("abcdef", min_size=1, max_size=3),
        kind=st.sampled_from([int, float]),
        empty=st.integers(-3, 3),
        width=st.integers(1, 4),
    ),
    max_size=4,
    unique_by=lambda column: column.name,
)


@given(following=more_columns)
def test_request_columns_are_at_the_same_places_in_every_table(following: list[SlotColumn]) -> None:
    columns = TableColumns((*REQUEST_COLUMNS, *following))
    assert [columns.offset(name) for name in NAMES] == [request_column(name) for name in NAMES]
    assert columns.width == sum(column.width for column in columns.columns)
    # one after the other, without a gap
    end = 0
    for column in columns.columns:
        assert columns.offset(column.name) == end
        assert column.name in columns
        assert columns[column.name] is column
        end += column.width
    assert end == columns.width == len(columns.row({}))


@given(following=more_columns, data=st.data())
def test_a_row_has_every_number_at_its_place(
    following: list[SlotColumn], data: st.DataObject
) -> None:
    columns = TableColumns((*REQUEST_COLUMNS, *following))
    given = [column for column in columns.columns if column.name != LOGIT_CHANGE]
    named = data.draw(st.lists(st.sampled_from(given), unique_by=lambda c: c.name))
    numbers = st.integers(-1000, 1000)
    values = {
        column.name: data.draw(st.lists(numbers, min_size=column.width, max_size=column.width))
        for column in named
    }
    row = torch.tensor(columns.row(values), dtype=torch.int32)
    for column in columns.columns:
        first = columns.offset(column.name)
        held = row[first : first + column.width]
        held = held.view(torch.float32) if column.kind is float else held
        if column.name == LOGIT_CHANGE:
            continue
        assert held.tolist() == values.get(column.name, [column.empty] * column.width)


def test_what_every_table_has() -> None:
    """Every option that kernels read, and nothing twice."""
    kept = [name for name, option in OPTIONS.items() if option.column is not None]
    assert NAMES[: len(kept) + 2] == ["number", "prompt_len", *kept]
    assert {"seed", "stop_ids"} <= set(NAMES)
    columns = TableColumns(REQUEST_COLUMNS)
    one = struct.unpack("i", struct.pack("f", 1.0))[0]
    empty = {"top_p": one, "repetition_penalty": one, "logprobs": -1, "thinking_token_budget": -1}
    assert columns.row({})[: len(kept) + 2] == [0, 0, *[empty.get(name, 0) for name in kept]]
    first = request_column("stop_ids")
    assert columns.row({})[first : first + MAX_STOP_IDS] == [NO_STOP] * MAX_STOP_IDS
    assert columns.row({"stop_ids": (5, 6)})[request_column("stop_ids") :][:3] == [5, 6, NO_STOP]


@pytest.mark.parametrize(
    ("values", "change"),
    [
        ({}, 0),
        ({"temperature": 0.7, "top_k": 5, "min_tokens": 9, "thinking_token_budget": 0}, 0),
        ({"words_row": 0, "bias_row": -1, "presence_penalty": None, "repetition_penalty": 1}, 0),
        ({"allowed_row": 0}, 1),
        ({"count_row": 3, "repetition_penalty": 1.3, "frequency_penalty": [0.5]}, 1),
        ({"count_row": 3, "repetition_penalty": 0.9, "presence_penalty": 1}, 1),
        ({"count_row": 3, "repetition_penalty": 2, "presence_penalty": -0.5}, 1),
        ({"bias_row": 0, "allowed_row": 0}, 1),
    ],
)
def test_logit_change_follows_from_the_other_columns(values: Any, change: int) -> None:
    columns = TableColumns(REQUEST_COLUMNS)
    assert columns.row(values)[request_column(LOGIT_CHANGE)] == change
    with pytest.raises(MetadataError, match="logit_change follows from the other columns; leave"):
        columns.row({**values, LOGIT_CHANGE: change})


def test_columns_can_be_copied_with_the_table_that_has_them() -> None:
    columns = TableColumns((*REQUEST_COLUMNS, SlotColumn("mine", float, 0.5)))
    copied = copy.deepcopy(columns)
    assert copied.row({"mine": 2}) == columns.row({"mine": 2})
    assert copied.columns == columns.columns
