"""What is kept of a step's requests: which rows and numbers are read, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.step import SlotRows, check_slots
from mtp_plugin.requests.columns import REQUEST_COLUMNS, SlotColumn
from tests.ops.on_device import DEVICE, INDEX_DTYPES, vector
from tests.ops.slots import held, slot_rows

COLUMNS = [SlotColumn("share", float), SlotColumn("pair", float, 0.0, 2), SlotColumn("one", int)]


def some_rows(requests: int, **layout: object) -> SlotRows:
    values = [
        {
            "number": r,
            "share": r + 0.5,
            "pair": [r + 0.25, -r],
            "one": -r,
            "stop_ids": range(r % 4),
        }
        for r in range(requests)
    ]
    return slot_rows(values, COLUMNS, **layout)


@settings(max_examples=20)
@given(
    requests=st.integers(0, 6),
    seed=st.integers(0, 99),
    gap=st.integers(0, 2),
    id_stride=st.integers(1, 3),
    id_dtype=st.sampled_from([*INDEX_DTYPES, torch.int16, torch.uint8]),
    data=st.data(),
)
def test_numbers_are_those_of_the_requests(requests, seed, gap, id_stride, id_dtype, data) -> None:
    slots = some_rows(requests, seed=seed, gap=gap, id_stride=id_stride, id_dtype=id_dtype)
    check_slots(slots, requests, DEVICE, ["number", "one"])
    first = data.draw(st.integers(0, requests))
    some = slice(first, data.draw(st.integers(first, requests)))
    of = range(some.start, some.stop)
    assert slots.of(some).tolist() == [int(slots.slot_ids[r]) for r in of]
    for name, dtype in (("number", torch.int32), ("one", torch.int32), ("share", torch.float32)):
        read = slots.read(name, some)
        assert (read.dtype, read.shape) == (dtype, (len(of),))
        assert read.tolist() == [held(slots, r, name) for r in of]
    for name, width in (("stop_ids", 32), ("pair", 2)):
        read = slots.read(name, some)
        assert read.shape == (len(of), width)
        assert read.tolist() == [held(slots, r, name) for r in of]
    assert slots.read("share", some).tolist() == [r + 0.5 for r in of]


def test_what_is_read_is_a_copy() -> None:
    slots = some_rows(3)
    slots.read("one", slice(0, 3)).fill_(9)
    assert slots.read("one", slice(0, 3)).tolist() == [0, -1, -2]


def test_requests_may_share_a_slot() -> None:
    slots = replace(some_rows(2, slots=[1, 4]), slot_ids=vector([4, 1, 4, 4]))
    check_slots(slots, 4, DEVICE)
    assert slots.read("number", slice(0, 4)).tolist() == [1, 0, 1, 1]


def test_tables_and_slots_that_do_not_fit() -> None:
    good = some_rows(3)
    table, width = good.table, good.columns.width
    message = rf"slot table: expected row-contiguous torch.int32 tensor \[>= 1, {width}\]"
    for wrong in (
        table.long(),
        table[:, 1:],
        table[0],
        torch.zeros(width, 7, dtype=torch.int32, device=DEVICE).t(),
        table.to("meta"),
    ):
        with pytest.raises(TensorContractError, match=message):
            check_slots(replace(good, table=wrong), 3, DEVICE)
    message = r"slot_ids: expected integer tensor \[>= 3\]"
    for wrong in (
        good.slot_ids[:2],
        good.slot_ids.bool(),
        good.slot_ids.unsqueeze(0),
        good.slot_ids.to("meta"),
    ):
        with pytest.raises(TensorContractError, match=message):
            check_slots(replace(good, slot_ids=wrong), 3, DEVICE)


def test_columns_that_are_not_there_are_named() -> None:
    slots = some_rows(1)
    check_slots(slots, 1, DEVICE, ["share", "stop_ids"])
    with pytest.raises(TensorContractError) as caught:
        check_slots(slots, 1, DEVICE, ["share", "thinking", "stop_ids", "relaxed_topk"])
    names = [column.name for column in (*REQUEST_COLUMNS, *COLUMNS)]
    assert str(caught.value) == (
        f"slot table: expected columns thinking, relaxed_topk too, got {', '.join(names)}"
    )
    assert names[:2] == ["number", "prompt_len"]
    assert names[-4:] == ["stop_ids", "share", "pair", "one"]
