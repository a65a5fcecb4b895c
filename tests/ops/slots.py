"""Slot tables in tests: rows at random slots, poison in all elements that must not be used."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.columns import (
    LOGIT_CHANGE,
    REQUEST_COLUMNS,
    Number,
    SlotColumn,
    TableColumns,
)
from tests.op_arguments import storage
from tests.ops.on_device import DEVICE

POISON = 77
"""As a phase it means thinking; as a stop id it is a token."""

Values = Mapping[str, Number | Sequence[Number]]


def slot_rows(
    values: Sequence[Values],
    columns: Sequence[SlotColumn] = (),
    *,
    seed: int = 0,
    slots: Sequence[int] | None = None,
    num_slots: int | None = None,
    gap: int = 0,
    id_stride: int = 1,
    id_dtype: torch.dtype = torch.int64,
) -> SlotRows:
    """The rows of requests that have `values`; columns that these do not name are poison.

    Args:
        slots: of the requests; default: random ones. num_slots: S; default: some more than that.
        gap: int32 between rows. id_stride: of the slots.
    """
    layout = TableColumns((*REQUEST_COLUMNS, *columns))
    most = max([*(slots or ()), len(values) - 1]) + 4 if num_slots is None else num_slots
    mine = random.Random(seed).sample(range(most), len(values)) if slots is None else slots
    wide = torch.full((most, layout.width + gap), POISON, dtype=torch.int32)
    for slot, named in zip(mine, values, strict=True):
        for name, value in named.items():
            bits = torch.tensor(layout[name].bits(value), dtype=torch.int32)
            wide[slot, layout.offset(name) : layout.offset(name) + len(bits)] = bits
        change = layout.offset(LOGIT_CHANGE)
        wide[slot, change] = layout.row(named)[change]
    # ids after those of the step's requests are not read
    ids = torch.full((len(values) + 2, id_stride), 10**6, dtype=torch.int64)
    ids[: len(values), 0] = torch.tensor(mine, dtype=torch.int64)
    narrow = ids.clamp(max=torch.iinfo(id_dtype).max).to(id_dtype)
    return SlotRows(wide.to(DEVICE)[:, : layout.width], narrow.to(DEVICE)[:, 0], layout)


def column(slots: SlotRows, name: str) -> torch.Tensor:
    """A view of a column of all slots [S]; of floats, as floats."""
    view = slots.table[:, slots.columns.offset(name)]
    return view.view(torch.float32) if slots.columns[name].kind is float else view


def held(slots: SlotRows, request: int, name: str) -> Number | list[Number]:
    """The value of a request in a column, read number by number."""
    kind, first = slots.columns[name], slots.columns.offset(name)
    row = slots.table[int(slots.slot_ids[request])].cpu()[first : first + kind.width]
    numbers = (row.view(torch.float32) if kind.kind is float else row).tolist()
    return numbers if kind.width > 1 else numbers[0]


def derive_logit_change(slots: SlotRows, requests: int) -> None:
    """Write the derived column of requests whose columns a test has changed."""
    layout, first = slots.columns, slots.columns.offset(LOGIT_CHANGE)
    names = [each.name for each in REQUEST_COLUMNS if each.name != LOGIT_CHANGE]
    for request in range(requests):
        row = layout.row({name: held(slots, request, name) for name in names})
        slots.table[int(slots.slot_ids[request]), first] = row[first]


def on_copy(slots: SlotRows) -> SlotRows:
    """The same rows on a table of their own."""
    table = slots.table
    copied = storage(table).as_strided(table.shape, table.stride(), table.storage_offset())
    return replace(slots, table=copied)
