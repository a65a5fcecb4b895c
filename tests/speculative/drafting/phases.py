"""Write the slots of a manager as a host engine would."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.state import SlotStateManager
from mtp_plugin.speculative.state.slot_table import SlotValues


def fill_slots(manager: SlotStateManager, slots: dict[int, SlotValues]) -> None:
    """Slot -> some of its columns; the others stay as they are."""
    table, columns = manager.table.rows, manager.table.columns
    for slot, values in slots.items():
        for name, value in values.items():
            bits, first = columns[name].bits(value), columns.offset(name)
            table[slot, first : first + len(bits)] = torch.tensor(bits, dtype=torch.int32)


def set_phases(manager: SlotStateManager, phases: dict[int, bool]) -> None:
    """Slot -> whether it thinks; the delta in force follows."""
    for slot, thinks in phases.items():
        manager.table.column("thinking")[slot] = int(thinks)
        limit = manager.table.column("relaxed_limit")[slot]
        manager.mtp_relaxed_delta_pool[slot] = limit if thinks else 0.0


def phases(manager: SlotStateManager, slots: int) -> list[int]:
    """Whether the first of the slots think."""
    return manager.table.column("thinking")[:slots].tolist()
