"""Columns of the slot table, which has a row of int32 per state slot.

Every table begins with the columns of `REQUEST_COLUMNS`, so that kernels know their indices. The
columns of verification methods follow.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtp_plugin.errors import ConfigError, MetadataError, expect
from mtp_plugin.requests.options import MAX_BAD_WORD_LEN, OPTIONS
from mtp_plugin.requests.stopping import MAX_STOP_IDS, NO_STOP

Number = int | float
"""What a column may be given; a flag is 0 or 1."""

POOL_ROWS = ("bias_row", "allowed_row", "count_row", "words_row")
"""Columns that name a row of a pool: bias, allowed ids, counts of tokens, bad words."""
NO_ROW = -1
NO_TOKEN = -1
NOT_THINKING = -1
INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234e38
"""What is larger counts as so much: no length, and no id of a vocabulary, is."""


def within_float32(number: Number) -> Number:
    """The number, or the largest that float32 holds of its sign."""
    return min(max(number, -FLOAT32_MAX), FLOAT32_MAX)


@dataclass(frozen=True)
class SlotColumn:
    """A number, or a row of numbers, that is kept per slot."""

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
        numbers = [*given, *[self.empty] * (self.width - len(given))]
        if self.kind is int:
            return [int(min(max(number, -INT32_MAX - 1), INT32_MAX)) for number in numbers]
        held = struct.pack(f"{self.width}f", *map(within_float32, numbers))
        return list(struct.unpack(f"{self.width}i", held))


class TableColumns:
    """Which columns a slot table has, and where each begins.

    Raises:
        ConfigError: other columns than `REQUEST_COLUMNS` in front, or two of one name.
    """

    def __init__(self, columns: Sequence[SlotColumn]) -> None:
        self.columns = tuple(columns)
        in_front = self.columns[: len(REQUEST_COLUMNS)]
        expect(
            in_front == REQUEST_COLUMNS,
            ConfigError,
            f"slot table: expected {_names(REQUEST_COLUMNS)} in front, got {_names(in_front)}",
        )
        places: dict[str, tuple[int, SlotColumn]] = {}
        self.width = 0
        """W: int32 per slot."""
        for column in columns:
            expect(
                column.name not in places,
                ConfigError,
                f"slot table: expected columns of different names, got {column.name} twice",
            )
            places[column.name] = (self.width, column)
            self.width += column.width
        self._places = places
        self._empty = [bit for column in columns for bit in column.bits(None)]

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> SlotColumn:
        return self._places[name][1]

    def offset(self, name: str) -> int:
        """Where a column begins."""
        return self._places[name][0]

    def row(self, values: Mapping[str, Number | Sequence[Number]]) -> list[int]:
        """The W int32 of a slot; what is left out is empty.

        Raises:
            MetadataError: a column that there is not, or more numbers than it has room for.
        """
        unknown = [name for name in values if name not in self._places]
        expect(not unknown, MetadataError, f"slot table: there is no column {', '.join(unknown)}")
        row = self._empty.copy()
        for name, value in values.items():
            first, column = self._places[name]
            row[first : first + column.width] = column.bits(value)
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
    SlotColumn("seed", int, width=2),
    *(SlotColumn(name, int, NO_ROW) for name in POOL_ROWS),
    SlotColumn("recent", int, NO_TOKEN, MAX_BAD_WORD_LEN),
    SlotColumn("thought", int, NOT_THINKING),
    SlotColumn("end_place", int),
    SlotColumn("stop_ids", int, NO_STOP, MAX_STOP_IDS),
)
"""First in every table: a request's number (31 bits, in the order of handing in), its prompt's
length, its options, the low and the high word of its seed, its rows in the pools of what does not
fit a slot, its last tokens, how many it emitted since it thinks and its place in the sequence that
ends that, and the ids that end it.

A temperature of 0 is a greedy request's."""

_REQUEST_TABLE = TableColumns(REQUEST_COLUMNS)


def request_column(name: str) -> int:
    """Where one of `REQUEST_COLUMNS` begins, in every table."""
    return _REQUEST_TABLE.offset(name)
