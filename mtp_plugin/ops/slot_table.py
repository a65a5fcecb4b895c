"""Build the slot table of a host engine that has none of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import cast

import torch

from mtp_plugin.errors import MetadataError, expect, expect_int, format_value
from mtp_plugin.ops.logits_processor_state import LogitsProcessorState
from mtp_plugin.ops.sampling.types import DRAFT_COLUMNS, STEP_COLUMN
from mtp_plugin.ops.step import SlotRows, to_device
from mtp_plugin.requests.columns import (
    NO_ROW,
    POOL_ROWS,
    REQUEST_COLUMNS,
    Number,
    SlotColumn,
    TableColumns,
)
from mtp_plugin.requests.seeds import seed_words

RequestOptions = Mapping[str, Number | Sequence[Number] | None]
"""Values by column; ``seed``: one integer of 64 bits, or None."""

OPS_COLUMNS = TableColumns(
    (
        *REQUEST_COLUMNS,
        *DRAFT_COLUMNS,
        STEP_COLUMN,
        SlotColumn("thinking", int),
        SlotColumn("relaxed_topk", int, 1),
        SlotColumn("relaxed_limit", float),
    )
)
"""The columns that the ops of this package read."""


def build_slot_rows(
    requests: Sequence[RequestOptions],
    *,
    columns: TableColumns = OPS_COLUMNS,
    pools: LogitsProcessorState | None = None,
    device: torch.device | str,
) -> SlotRows:
    """Build a slot table with one row per request, in the order of the batch.

    A column that a request does not name has its ``empty`` value, so that a request without any
    option is greedy. ``number`` is the index of the request if it is not given. The copy to the
    device does not synchronize. An engine that captures CUDA graphs builds a table once for all its
    slots, and later copies the rows of new requests into ``table``.

    Args:
        requests: R mappings of column names to values. ``seed`` is one integer, reduced modulo
            2**64; without it, the seed is derived from ``number``.
        columns: of the table.
        pools: logits-processor state that the columns ``bias_row``, ``allowed_row``, ``count_row``
            and ``words_row`` refer to; None: no request has a row there.
        device: of the table.

    Returns:
        A table [R, W] int32 with slots 0 to R-1.

    Raises:
        MetadataError: a request names an unknown column, has more numbers than a column, a value
            that is no number, or a row that the pools do not have.
    """
    rows = [columns.row(_values(i, options, columns, pools)) for i, options in enumerate(requests)]
    table = to_device(rows, torch.int32, device).view(len(rows), columns.width)
    slot_ids = torch.arange(len(rows), device=device)
    return SlotRows(table, slot_ids, columns, pools)


def _values(
    index: int,
    options: RequestOptions,
    columns: TableColumns,
    pools: LogitsProcessorState | None,
) -> dict[str, Number | Sequence[Number]]:
    """Return the checked options with ``number`` and the two words of ``seed``."""
    expect(
        isinstance(options, Mapping),
        MetadataError,
        f"slot table: expected a mapping of columns to numbers per request, got "
        f"{format_value(options)}",
    )
    values = {name: value for name, value in options.items() if value is not None}
    unknown = [name for name in values if name not in columns]
    if unknown:
        names = ", ".join(column.name for column in columns.columns)
        raise MetadataError(
            f"slot table: there is no column {', '.join(map(str, unknown))}; expected {names}"
        )
    number, seed = values.setdefault("number", index), values.pop("seed", None)
    for name, value in {"number": number, "seed": 0 if seed is None else seed}.items():
        expect_int(f"slot table, {name}", value, error=MetadataError)
    for name, value in values.items():
        _expect_numbers(columns[name], value)
    if pools is not None:
        last = pools.num_rows - 1
        for name in POOL_ROWS:
            expect_int(f"slot table, {name}", values.get(name, NO_ROW), NO_ROW, last, MetadataError)
    return {**values, "seed": seed_words(cast(int | None, seed), cast(int, number))}


def _expect_numbers(column: SlotColumn, value: object) -> None:
    """Check that ``value`` is a number of the column's kind, or a sequence of them."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    for number in cast(Sequence[object], value) if is_list else (value,):
        if not isinstance(number, Real) or math.isnan(number):
            kind, also = "a number", "" if column.width == 1 else " or a sequence of numbers"
        elif column.kind is int and math.isfinite(number) and number % 1:
            kind, also = "an integer", ""
        else:
            continue
        raise MetadataError(
            f"slot table, {column.name}: expected {kind}{also}, got {format_value(value)}"
        )
