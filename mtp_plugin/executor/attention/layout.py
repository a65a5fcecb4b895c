"""What follows from the lengths of a step, as backends read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Group:
    """Neighbouring sequences with equal query rows, attended in one call."""

    first_seq: int
    num_seqs: int
    first_row: int
    query_rows: int


@dataclass(frozen=True)
class Layout:
    """What follows from the lengths of a step."""

    positions: torch.Tensor  # [T] KV position of each query row; negative: dead
    alive: torch.Tensor  # [T] bool: the row writes and reads KV of its request
    write_rows: torch.Tensor  # [T] pool row that each query row writes
    read_rows: torch.Tensor  # [R, S'] pool rows of each sequence, position order
    readable: torch.Tensor  # [R, S'] bool: rows that hold keys of the request
    groups: list[Group]


@dataclass(frozen=True)
class RowCounts:
    """Query rows of a step as the host knows them: contexts of any length, then generations of one.

    Generations of unequal rows count as ragged, and so does everything in front of them.
    """

    ragged: tuple[int, ...]
    """Rows of each of the first sequences."""
    num_uniform: int
    """Sequences behind them."""
    uniform_rows: int
    """Rows of each of those; 0 where there are none."""

    @classmethod
    def of(cls, seq_lens: list[int], num_contexts: int) -> RowCounts:
        """Counts of a step, contexts first."""
        generations = seq_lens[num_contexts:]
        if len(set(generations)) != 1:
            return cls(tuple(seq_lens), 0, 0)
        return cls(tuple(seq_lens[:num_contexts]), len(generations), generations[0])

    @property
    def ragged_rows(self) -> int:
        """Rows of the first sequences together."""
        return sum(self.ragged)
