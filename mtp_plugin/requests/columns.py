"""Columns of the slot table, which has a row of int32 per state slot.

Every table begins with the columns of `REQUEST_COLUMNS`, so that kernels know their indices. The
columns of verification methods follow.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from mtp_plugin.errors import ConfigError, MetadataError, expect
from mtp_plugin.requests.options import INT32_MAX, MAX_BAD_WORD_LEN, OPTIONS
from mtp_plugin.requests.stopping import MAX_STOP_IDS, NO_STOP

Number = int | float
"""Value of a column; a flag is 0 or 1."""

POOL_ROWS = ("bias_row", "allowed_row", "count_row", "words_row")
"""Columns with the index of a row of a pool: bias, allowed ids, token counts, bad words."""
LOGIT_CHANGE = "logit_change"
"""1 if logits processing changes the logits of a request; follows from its other columns."""
NO_ROW = -1
NO_TOKEN = -1
NOT_THINKING = -1
FLOAT32_MAX = 3.4028234e38
"""Larger values are clamped to this and to `INT32_MAX`, which no length and no id reaches."""


def within_float32(number: Number) -> Number:
    """Clamp a number to the finite range of float32."""
    return min(max(number, -FLOAT32_MAX), FLOAT32_MAX)


class TopPMass(IntEnum):
    """Column ``top_p_mass``: the probability mass that top-p is a share of.

    Hosts differ here, and the column keeps a host's distribution. It matters for requests that have
    top-p with top-k or min-p.
    """

    TOP_K = 0
    """Of the tokens that top-k keeps; min-p applies after top-p."""
    ALL = 1
    """Of all tokens; min-p applies after top-p. SGLang without drafts."""
    MIN_P = 2
    """Of the tokens that top-k and min-p keep. vLLM."""


@dataclass(frozen=True)
class SlotColumn:
    """A number, or ``width`` numbers, per slot."""

    name: str
    kind: type[int] | type[float]  # int32, or float32 bit for bit
    empty: Number = 0  # value in free slots and for unset options
    width: int = 1
    is_pool: bool = False
    """Also an attribute of the manager, which a host may write or replace."""

    def bits(self, value: Number | Sequence[Number] | None) -> list[int]:
        """Return ``value`` as int32 numbers, padded with ``empty``; None is all padding.

        Raises:
            MetadataError: ``value`` has more numbers than the column.
        """
        given = () if value is None else value if isinstance(value, Sequence) else (value,)
        expect(
            len(given) <= self.width,
            MetadataError,
            f"slot column {self.name}: expected at most {self.width} numbers, got {len(given)}",
        )
        padding = [self.empty] * (self.width - len(given))
        if self.kind is int:
            return [int(min(max(n, -INT32_MAX - 1), INT32_MAX)) for n in [*given, *padding]]
        held = struct.pack(f"{self.width}f", *map(within_float32, [*given, *padding]))
        return list(struct.unpack(f"{self.width}i", held))


class TableColumns:
    """The columns of a slot table and their offsets.

    Raises:
        ConfigError: the first columns are not `REQUEST_COLUMNS`, or two columns share a name.
    """

    def __init__(self, columns: Sequence[SlotColumn]) -> None:
        self.columns = tuple(columns)
        first = self.columns[: len(REQUEST_COLUMNS)]
        expect(
            first == REQUEST_COLUMNS,
            ConfigError,
            f"slot table: expected {_names(REQUEST_COLUMNS)} first, got {_names(first)}",
        )
        offsets: dict[str, tuple[int, SlotColumn]] = {}
        self.width = 0
        """W: int32 per slot."""
        for column in columns:
            expect(
                column.name not in offsets,
                ConfigError,
                f"slot table: expected columns of different names, got {column.name} twice",
            )
            offsets[column.name] = (self.width, column)
            self.width += column.width
        self._offsets = offsets
        self._empty = [bit for column in columns for bit in column.bits(None)]

    def __contains__(self, name: str) -> bool:
        return name in self._offsets

    def __getitem__(self, name: str) -> SlotColumn:
        return self._offsets[name][1]

    def offset(self, name: str) -> int:
        """Return the offset of a column in a row."""
        return self._offsets[name][0]

    def row(self, values: Mapping[str, Number | Sequence[Number]]) -> list[int]:
        """Return the row [W] int32 of a slot; columns that are not given are empty.

        `LOGIT_CHANGE` is derived from the columns that are given.

        Raises:
            MetadataError: an unknown column, more numbers than its width, or the derived column.
        """
        unknown = [name for name in values if name not in self._offsets]
        expect(not unknown, MetadataError, f"slot table: there is no column {', '.join(unknown)}")
        expect(
            LOGIT_CHANGE not in values,
            MetadataError,
            f"slot table: {LOGIT_CHANGE} follows from the other columns; leave it out",
        )
        row = self._empty.copy()
        for name, value in values.items():
            first, column = self._offsets[name]
            end = first + column.width
            bits = column.bits(value)
            if name in _PROCESSED and bits != row[first:end]:
                row[self.offset(LOGIT_CHANGE)] = 1
            row[first:end] = bits
        return row


def _names(columns: Sequence[SlotColumn]) -> str:
    return ", ".join(column.name for column in columns) or "no columns"


REQUEST_COLUMNS = (
    SlotColumn("number", int),
    SlotColumn("prompt_len", int),
    *(
        SlotColumn(option.name, option.column, option.empty)
        for option in OPTIONS.values()
        if option.column is not None
    ),
    SlotColumn("top_p_mass", int, TopPMass.TOP_K),
    SlotColumn("seed", int, width=2),
    *(SlotColumn(name, int, NO_ROW) for name in POOL_ROWS),
    SlotColumn(LOGIT_CHANGE, int),
    SlotColumn("recent", int, NO_TOKEN, MAX_BAD_WORD_LEN),
    SlotColumn("num_thinking", int, NOT_THINKING),
    SlotColumn("end_progress", int),
    SlotColumn("stop_ids", int, NO_STOP, MAX_STOP_IDS),
)
"""The first columns of every table.

``number``: index of the request, 31 bits, in order of submission. ``top_p_mass``: a `TopPMass`.
``seed``: low and high word.
`POOL_ROWS`: rows in the pools of logits-processor state. ``logit_change``: see `LOGIT_CHANGE`.
``recent``: the last tokens.
``num_thinking``: generated thinking tokens, and ``end_progress``: how many ids of the
end-of-thinking sequence are matched. ``stop_ids``: token ids that end the request. A greedy request
has temperature 0."""

_PROCESSED = {
    *("bias_row", "allowed_row", "count_row"),
    *(each.name for each in OPTIONS.values() if each.edits_logits and not each.own_kernel),
}
"""Columns that change the logits if they are not empty."""

_REQUEST_TABLE = TableColumns(REQUEST_COLUMNS)


def request_column(name: str) -> int:
    """Return the offset of one of `REQUEST_COLUMNS`, the same in every table."""
    return _REQUEST_TABLE.offset(name)
