"""The draft loop as an example of one request's tokens and numbers.

A layer here is arithmetic on one row, so that every input of every pass can be worked out: states
are whole numbers, the target's by token and position, a layer's by what the row reads.
"""

from __future__ import annotations

from typing import NamedTuple

VOCAB = 61


def target_state(token: int, position: int) -> int:
    """The target's state of a token at a position."""
    return (7 * token + 13 * position + 1) % 251


def layer_state(depth: int, token: int, position: int, state: int) -> int:
    """What the layer of a depth makes of a row."""
    return (5 * token + 7 * position + 3 * state + 11 * depth) % 241


def proposal(state: int) -> int:
    """The head's first choice."""
    return state % VOCAB


class Row(NamedTuple):
    """One row that a layer reads."""

    token: int
    position: int
    state: int | None  # None: the result of the row is not read, its state does not matter


class Pass(NamedTuple):
    """What one call of a layer is to see of a request; dead rows in front are None."""

    rows: list[Row | None]
    kv_len: int
    draft: int


def run_of(drafts: list[int], target: list[int | None]) -> list[int]:
    """The emitted run: what matches, then the target's own; a row without a value ends it."""
    run: list[int] = []
    for draft, choice in zip(drafts, target, strict=False):
        if draft != choice:
            break
        run.append(draft)
    bonus = target[len(run)]
    return run if bonus is None else [*run, bonus]


def vanilla(text: list[int], first: int, k: int, chain: str) -> list[Pass]:
    """One layer per depth over rows [first, newest), the newest token having no state yet.

    Args:
        text: tokens up to the newest, verified. first: may be negative near a prompt's start.
    """
    newest = len(text) - 1
    dead = max(0, -first)
    positions = list(range(max(first, 0), newest))
    tokens = [text[p + 1] for p in positions]
    states = [target_state(text[p], p) for p in positions]
    passes = []
    for depth in range(k):
        rows = [Row(*row) for row in zip(tokens, positions, states, strict=True)]
        outputs = [layer_state(depth, *row) for row in rows]
        draft = proposal(outputs[-1])
        passes.append(Pass([None] * dead + rows, newest, draft))
        tokens = [*tokens[1:], draft]
        if chain == "output":
            states = outputs
        elif chain == "target_shift":
            states = [*states[1:], outputs[-1]]
    return passes


def eagle_prompt(text: list[int], start: int, k: int, highest: int) -> list[Pass]:
    """A chunk that starts at `start` moved on by one, then one row per pass."""
    newest = len(text) - 1
    rows = [Row(text[p + 1], p, target_state(text[p], p)) for p in range(start, newest)]
    return _eagle(rows, len(rows) - 1, newest, newest, k, highest)


def eagle_generation(
    length: int, inputs: list[int], run: list[int], k: int, highest: int
) -> list[Pass]:
    """The K+1 rows that the target read, their tokens replaced by the run; then one row per pass.

    Args:
        length: committed tokens before the step, L.
    """
    columns = run + [run[-1]] * (k + 1 - len(run))
    positions = [min(length + i, highest) for i in range(k + 1)]
    rows: list[Row | None] = [
        Row(token, position, target_state(read, position) if i < len(run) else None)
        for i, (token, position, read) in enumerate(zip(columns, positions, inputs, strict=True))
    ]
    return _eagle(rows, len(run) - 1, length + k + 1, length + len(run), k, highest)


def _eagle(
    rows: list[Row | None], last: int, kv_len: int, newest: int, k: int, highest: int
) -> list[Pass]:
    row = rows[last]
    passes = []
    for position in range(newest, newest + k):
        state = layer_state(0, *row)
        draft = proposal(state)
        passes.append(Pass(rows, kv_len, draft))
        row = Row(draft, min(position, highest), state)
        rows, kv_len = [row], position + 1
    return passes
