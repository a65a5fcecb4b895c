"""Which slot a request has, over many requests."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from mtp_plugin.errors import NoFreeSlotsError
from mtp_plugin.requests.slots import SlotManager


def test_a_fresh_manager_hands_out_slots_in_order() -> None:
    slots = SlotManager(4)
    assert [slots.add_slot(request_id) for request_id in (70, 5, 900, 1)] == [0, 1, 2, 3]
    assert [slots.get_slot(request_id) for request_id in (1, 900, 5, 70)] == [3, 2, 1, 0]


def test_a_request_keeps_its_slot() -> None:
    slots = SlotManager(2)
    assert slots.add_slot(7) == slots.add_slot(7) == 0
    assert slots.add_slot(8) == 1


def test_an_unknown_request_has_none() -> None:
    slots = SlotManager(1)
    assert slots.get_slot(3) is None
    slots.remove_slot(3)
    assert slots.add_slot(4) == 0


def test_too_many_requests() -> None:
    slots = SlotManager(1)
    slots.add_slot(1)
    with pytest.raises(NoFreeSlotsError, match="No free slots: all 1 are taken, request 2"):
        slots.add_slot(2)
    assert slots.add_slot(1) == 0


def test_a_double_free_frees_once() -> None:
    slots = SlotManager(2)
    slots.add_slot(1)
    slots.remove_slot(1)
    slots.remove_slot(1)
    assert sorted(slots.free_slots) == [0, 1]
    assert {slots.add_slot(2), slots.add_slot(3)} == {0, 1}


def test_the_tensor_of_slots() -> None:
    slots = SlotManager(3)
    requests = [SimpleNamespace(request_id=i) for i in (5, 6, 7)]
    for request in requests:
        slots.add_slot(request.request_id)
    tensor = torch.full((4,), -1)
    slots.fill_slot_id_tensor(requests[::-1], tensor)
    assert tensor.tolist() == [2, 1, 0, -1]
    slots.remove_slot(6)
    with pytest.raises(NoFreeSlotsError, match="request 6 has no slot"):
        slots.fill_slot_id_tensor(requests, tensor)


def test_shutdown_makes_the_pool_whole() -> None:
    slots = SlotManager(3)
    for request_id in (1, 2, 3):
        slots.add_slot(request_id)
    slots.shutdown()
    assert slots.slot_mapping == {}
    assert [slots.add_slot(request_id) for request_id in (4, 5, 6)] == [0, 1, 2]


def test_churn() -> None:
    """10,000 times some end, some twice, and others start; no slot is lost or shared."""
    rng = random.Random(8)
    slots = SlotManager(17)
    live: list[int] = []
    next_id = 0
    for _ in range(10_000):
        for request_id in rng.sample(live, rng.randint(0, len(live))):
            live.remove(request_id)
            slots.remove_slot(request_id)
            if rng.random() < 0.2:
                slots.remove_slot(request_id)
        for _ in range(rng.randint(0, 17 - len(live))):
            live.append(next_id)
            slots.add_slot(next_id)
            next_id += 1
        taken = [slots.get_slot(request_id) for request_id in live]
        assert sorted([*taken, *slots.free_slots]) == list(range(17))
    for request_id in live:
        slots.remove_slot(request_id)
    assert sorted(slots.free_slots) == list(range(17))
    assert next_id > 10_000
