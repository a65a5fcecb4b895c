"""What follows from the lengths of a step, as backends read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Group:
    """Neighbouring sequences with equal query rows, attended in one call."""

    first_seq: int
    num_seqs: int
    first_row: int
    query_rows: int

    @property
    def seqs(self) -> slice:
        """Its sequences among those of the step."""
        return slice(self.first_seq, self.first_seq + self.num_seqs)

    @property
    def rows(self) -> slice:
        """Its query rows among those of the step."""
        return slice(self.first_row, self.first_row + self.num_seqs * self.query_rows)


@dataclass(frozen=True)
class Layout:
    """What follows from the lengths of a step."""

    positions: torch.Tensor  # [T] KV position of each query row; negative: dead
    alive: torch.Tensor  # [T] bool: the row writes and reads KV of its request
    write_rows: torch.Tensor  # [T] pool row that each query row writes
    read_rows: torch.Tensor  # [R, S'] pool rows of each sequence, position order
    readable: torch.Tensor  # [R, S'] bool: rows that hold keys of the request
    groups: list[Group]

    @cached_property
    def visible(self) -> list[torch.Tensor]:
        """Per group [B, 1, q, S'] bool: the keys of its sequence that each query row attends.

        A dead row attends the first one, so that it stays finite.
        """
        key_positions = torch.arange(self.read_rows.shape[1], device=self.positions.device)
        last_key = torch.where(self.alive, self.positions, 0)
        return [
            (key_positions <= last_key[group.rows].view(group.num_seqs, 1, group.query_rows, 1))
            for group in self.groups
        ]

    @cached_property
    def flat_read_rows(self) -> torch.Tensor:
        """[R * S'] the rows of all sequences, one behind the other."""
        return self.read_rows.flatten()

    @cached_property
    def unreadable(self) -> torch.Tensor:
        """[R, S', 1, 1] bool: rows that hold no key of the request."""
        return ~self.readable[..., None, None]

    @cached_property
    def unreadable_rows(self) -> torch.Tensor:
        """[N] the same as places among the rows of all sequences; on a CPU, which knows N."""
        return self.unreadable.flatten().nonzero().flatten()


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
