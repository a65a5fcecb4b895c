"""The snapshot restores objects, containers and tensors in place."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import torch

from mtp_plugin.hosts.megatron.snapshot import Snapshot
from mtp_plugin.requests.slots import SlotManager


def test_restores_what_a_root_refers_to() -> None:
    slots = SlotManager(3)
    slots.add_slot(5)
    tensor, waiting, names, other = torch.arange(3), deque([1, 2]), {"a"}, SimpleNamespace(kept=1)
    root = {"slots": slots, "pair": (tensor, [waiting, names]), "other": other}
    snapshot = Snapshot(root)
    slots.add_slot(6)
    slots.remove_slot(5)
    slots.new_name = 1
    tensor.zero_()
    waiting.popleft()
    names.add("b")
    other.kept = 2
    root.pop("pair")
    snapshot.restore()
    assert slots.slot_mapping == {5: 0}
    assert slots.free_slots == [1, 2]
    assert not hasattr(slots, "new_name")
    assert tensor.tolist() == [0, 1, 2]
    assert waiting == deque([1, 2])
    assert names == {"a"}
    assert list(root) == ["slots", "pair", "other"]
    assert other.kept == 2  # not an object of this package


def test_restores_cycles_and_skips_types() -> None:
    cycle: list[object] = []
    slots = SlotManager(1)
    cycle += [cycle, slots]
    snapshot = Snapshot(cycle, (SlotManager,))
    slots.add_slot(1)
    cycle.clear()
    snapshot.restore()
    assert cycle == [cycle, slots]
    assert slots.slot_mapping == {1: 0}
