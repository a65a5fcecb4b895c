"""The slot table of an engine."""

from __future__ import annotations

import pytest
import torch

from mtp_plugin.errors import MetadataError
from mtp_plugin.hosts.vllm.options import VllmOptions
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_slots import RequestSlots
from tests.ops.on_device import DEVICE, vector


def make_slots() -> RequestSlots:
    return RequestSlots(4, DEVICE, EngineSettings(VllmOptions(), 3))


def read(slots: RequestSlots, name: str, index: int) -> list[float]:
    return slots.of(vector([index])).read(name, slice(0, 1)).reshape(-1).tolist()


def test_every_row_is_a_greedy_request_at_first() -> None:
    slots = make_slots()
    assert slots.table.shape == (5, slots.columns.width)
    assert slots.of(vector(range(5))).read("temperature", slice(0, 5)).tolist() == [0.0] * 5


def test_staged_rows_are_written_by_apply_only() -> None:
    slots = make_slots()
    before = slots.table.clone()
    slots.stage(2, {"temperature": 0.5, "top_k": 7}, 11)
    assert torch.equal(slots.table, before)
    slots.apply()
    assert read(slots, "temperature", 2) == [0.5]
    assert read(slots, "top_k", 2) == [7]
    others = [0, 1, 3, 4]
    assert torch.equal(slots.table[others], before[others])


def test_a_new_request_overwrites_the_whole_row() -> None:
    slots = make_slots()
    slots.stage(1, {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25}, 11)
    slots.apply()
    slots.stage(1, {"temperature": 0.75}, 12)
    slots.apply()
    assert read(slots, "temperature", 1) == [0.75]
    assert read(slots, "top_k", 1) == [0]
    assert read(slots, "top_p", 1) == [1.0]
    assert read(slots, "min_p", 1) == [0.0]
    assert read(slots, "seed", 1) == [12, 0]


def test_the_last_of_two_requests_staged_for_a_row_is_written() -> None:
    slots = make_slots()
    slots.stage(1, {"top_k": 7}, 1)
    slots.stage(1, {"top_k": 9}, 2)
    slots.apply()
    assert (read(slots, "top_k", 1), read(slots, "seed", 1)) == ([9], [2, 0])


def test_the_table_keeps_its_address() -> None:
    slots = make_slots()
    address = slots.table.data_ptr()
    for index in range(4):
        slots.stage(index, {"temperature": 1.0}, index)
        slots.apply()
    slots.apply()
    assert slots.table.data_ptr() == address
    assert slots.of(vector([0])).table.data_ptr() == address
    assert slots.of_padded(vector([0, -1])).table.data_ptr() == address


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (0, [0, 0]),
        (1, [1, 0]),
        (2**31, [-(2**31), 0]),
        (2**32 + 5, [5, 1]),
        (2**63 - 1, [-1, 2**31 - 1]),
        (-1, [-1, -1]),
        (-(2**63), [0, -(2**31)]),
        (-(2**63) + 7, [7, -(2**31)]),
    ],
)
def test_seeds_of_64_bits_keep_all_bits(seed: int, words: list[int]) -> None:
    slots = make_slots()
    slots.stage(0, {}, seed)
    slots.apply()
    assert read(slots, "seed", 0) == words


def test_requests_are_numbered_in_the_order_of_staging() -> None:
    slots = make_slots()
    for index in (3, 1, 3):
        slots.stage(index, {}, 0)
    slots.apply()
    assert (read(slots, "number", 1), read(slots, "number", 3)) == ([1], [2])


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(MetadataError, match="there is no column top_q"):
        make_slots().stage(0, {"top_q": 1}, 0)
