"""What is kept per slot on the device: one table, a column per option and per state of a mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mtp_plugin.requests.columns import REQUEST_COLUMNS, Number, SlotColumn, TableColumns
from mtp_plugin.speculative.logits_processor_state import DraftMask, LogitsProcessorState
from mtp_plugin.speculative.step import SlotRows, to_device

SlotValues = Mapping[str, Number | Sequence[Number]]
"""Of one slot, by column; what is left out is empty."""


class SlotTable:
    """A row of int32 per slot; floats stand in it bit for bit.

    The columns of `REQUEST_COLUMNS` come first, at the same places in every table.

    Args:
        num_slots: S. columns: behind those that every table has. device: of the steps.
    """

    def __init__(self, num_slots: int, columns: Sequence[SlotColumn], device: torch.device) -> None:
        self.columns = TableColumns((*REQUEST_COLUMNS, *columns))
        empty = torch.tensor(self.columns.row({}), dtype=torch.int32)
        self.rows = empty.repeat(num_slots, 1).to(device)
        """[S, W]."""

    def column(self, name: str) -> torch.Tensor:
        """A view of one column [S], or [S, width] of a wide one."""
        column, first = self.columns[name], self.columns.offset(name)
        view = self.rows[:, first : first + column.width]
        view = view.view(torch.float32) if column.kind is float else view
        return view if column.width > 1 else view.squeeze(1)

    def rows_of(
        self,
        slot_ids: torch.Tensor,
        pools: LogitsProcessorState | None = None,
        bans: DraftMask | None = None,
    ) -> SlotRows:
        """The rows of a step's requests, [R] int64."""
        return SlotRows(self.rows, slot_ids, self.columns, pools, bans)

    def write(self, slots: Mapping[int, SlotValues]) -> torch.Tensor:
        """Replace whole rows, in one copy for all of them; behind what runs on the device.

        Returns:
            The slots [N] int64, on the device.
        """
        written = [[slot, *self.columns.row(values)] for slot, values in slots.items()]
        moved = to_device(written, torch.int32, self.rows.device)
        places = moved[:, 0].to(torch.int64)
        self.rows.index_copy_(0, places, moved[:, 1:])
        return places
