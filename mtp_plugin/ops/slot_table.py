"""Build the slot table of a host engine that has none of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from mtp_plugin.errors import MetadataError, expect
from mtp_plugin.ops.logits_processor_state import LogitsProcessorState
from mtp_plugin.ops.sampling.types import DRAFT_COLUMNS, STEP_COLUMN
from mtp_plugin.ops.step import SlotRows, to_device
from mtp_plugin.requests.columns import REQUEST_COLUMNS, Number, SlotColumn, TableColumns
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
        MetadataError: a request names an unknown column, or has more numbers than a column.
    """
    rows = [columns.row(_with_seed(index, options)) for index, options in enumerate(requests)]
    table = to_device(rows, torch.int32, device).view(len(rows), columns.width)
    slot_ids = torch.arange(len(rows), device=device)
    return SlotRows(table, slot_ids, columns, pools)


def _with_seed(index: int, options: RequestOptions) -> dict[str, Number | Sequence[Number]]:
    """Return the options with ``number`` and the two words of ``seed``."""
    values = {name: value for name, value in options.items() if value is not None}
    number, seed = values.setdefault("number", index), values.pop("seed", None)
    expect(
        isinstance(number, int) and (seed is None or isinstance(seed, int)),
        MetadataError,
        f"slot table: expected number and seed to be one integer each, got {number} and {seed}",
    )
    return {**values, "seed": seed_words(cast(int | None, seed), cast(int, number))}
