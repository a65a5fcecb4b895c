"""The slot table: per-request options and verification state on the device, a row per slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mtp_plugin.ops.logits_processor_state import DraftMask, LogitsProcessorState
from mtp_plugin.ops.step import SlotRows, to_device
from mtp_plugin.requests.columns import REQUEST_COLUMNS, Number, SlotColumn, TableColumns

SlotValues = Mapping[str, Number | Sequence[Number]]
"""Values of one slot by column; missing columns get their ``empty`` value."""


class SlotTable:
    """An int32 tensor with one row per slot; float32 values are stored bit for bit.

    The columns of `REQUEST_COLUMNS` come first, at the same offsets in every table.

    Args:
        num_slots: S.
        columns: columns after `REQUEST_COLUMNS`.
        device: device of the steps.
    """

    def __init__(self, num_slots: int, columns: Sequence[SlotColumn], device: torch.device) -> None:
        self.columns = TableColumns((*REQUEST_COLUMNS, *columns))
        empty = torch.tensor(self.columns.row({}), dtype=torch.int32)
        self.rows = empty.repeat(num_slots, 1).to(device)
        """[S, W]."""

    def column(self, name: str) -> torch.Tensor:
        """Return a view of one column: [S], or [S, width] for a wide column."""
        column, first = self.columns[name], self.columns.offset(name)
        view = self.rows[:, first : first + column.width]
        view = view.view(torch.float32) if column.kind is float else view
        return view if column.width > 1 else view.squeeze(1)

    def rows_of(
        self,
        slot_ids: torch.Tensor,
        pools: LogitsProcessorState | None = None,
        draft_mask: DraftMask | None = None,
    ) -> SlotRows:
        """Return the rows of a step's requests; ``slot_ids`` is [R] int64."""
        return SlotRows(self.rows, slot_ids, self.columns, pools, draft_mask)

    def write(self, slots: Mapping[int, SlotValues]) -> torch.Tensor:
        """Replace the rows of slots with one host-to-device copy, in stream order.

        Returns:
            The slots [N] int64, on the device.
        """
        return self.write_rows({slot: self.columns.row(values) for slot, values in slots.items()})

    def write_rows(self, rows: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """As `write`, of rows [W] int32 that `TableColumns.row` returned."""
        written = [[slot, *row] for slot, row in rows.items()]
        moved = to_device(written, torch.int32, self.rows.device)
        indices = moved[:, 0].to(torch.int64)
        self.rows.index_copy_(0, indices, moved[:, 1:])
        return indices
