"""State rollback of requests, in plain Python."""

from __future__ import annotations

from typing import NamedTuple

State = list[int]


class Row(NamedTuple):
    """A request of the batch, the slot of its states, and how many of its drafts were accepted."""

    is_decode: bool
    slot: int
    accepted: int


def roll_back(
    intermediate: list[list[list[State]]],
    current: list[list[State]],
    rows: list[Row],
    num_layers: int,
) -> None:
    """Set the state of every decode request to the one after its last accepted token."""
    for row in rows:
        if row.is_decode and row.slot >= 0:  # slot -1 is padding
            for layer in range(num_layers):
                current[layer][row.slot] = intermediate[layer][row.slot][row.accepted]


def read(state: State, token: int) -> State:
    """A recurrence in which no other tokens lead to the same state."""
    return [(31 * value + token + place) % 2**31 for place, value in enumerate(state)]
