"""Pieces of draft inputs against the example."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.draft_inputs import (
    accepted_rows,
    concatenate,
    context_rows,
    context_rows_with_history,
    generation_window,
)
from mtp_plugin.ops.step import DraftInputs
from tests.ops.bits import same_bits
from tests.ops.draft_inputs import example
from tests.ops.draft_inputs.example import Row
from tests.ops.letters import ids

H = 2


def states(positions: list[int], request: int = 0) -> torch.Tensor:
    """The state of position p of a request: recognisable, different in each."""
    names = torch.tensor([1000.0 * request + p for p in positions]).reshape(-1, 1)
    return names + 0.5 * torch.arange(H)


def assert_rows(inputs: DraftInputs, rows: list[Row], request: int = 0, first: int = 0) -> None:
    """Rows [first, first + len(rows)) of the inputs are the story's."""
    part = slice(first, first + len(rows))
    assert inputs.input_ids.dtype == torch.int32
    assert inputs.input_ids[part].tolist() == [row.token for row in rows]
    assert inputs.position_ids[part].tolist() == [row.position for row in rows]
    for row, state in zip(rows, inputs.hidden_states[part], strict=True):
        if row.state is not None:
            assert torch.equal(state, states([row.state], request)[0])


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# --- windows of generations ---


def entries(tokens: list[int], k: int, request: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K pool pairs and this step's K+1 inputs: the last 2K+1 of `tokens`, zero before the start."""
    positions = list(range(len(tokens) - 2 * k - 1, len(tokens)))
    table = torch.zeros(len(positions), H)
    alive = [p for p in positions if p >= 0]
    table[len(positions) - len(alive) :] = states(alive, request)
    return int32([tokens[p] if p >= 0 else 0 for p in positions]), table


def test_window_letters() -> None:
    """K = 3: pool `q r s`, the step read `t u v w` and emitted `u x`."""
    tokens, table = entries(ids("qrstuvw"), 3)
    inputs = generation_window(
        tokens.unsqueeze(0),
        table.unsqueeze(0),
        torch.tensor([1]),
        int32(ids("x")),
        torch.tensor([1]),
        4,
    )
    assert inputs.input_ids.tolist() == ids("stux")
    assert_rows(inputs, example.window(ids("qrstu") + ids("x"), 4))


@given(
    k=st.integers(1, 7),
    num_generations=st.integers(0, 4),
    exact=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_windows(k: int, num_generations: int, exact: bool, seed: int) -> None:
    """Any length down to one prompt token, any count: the window ends before the newest token."""
    rng = random.Random(seed)
    window = k + 1 if exact else k
    tokens, tables, first_entry, last, first_position = [], [], [], [], []
    expected: list[list[Row]] = []
    for g in range(num_generations):
        length = rng.randint(1, 3 * k + 2)
        verified = [rng.randrange(1, 99) for _ in range(length + k + 1)]  # committed, then inputs
        n = rng.randint(1, k + 1)
        bonus = rng.randrange(1, 99)
        request_tokens, table = entries(verified, k, g)
        tokens.append(request_tokens)
        tables.append(table)
        first_entry.append(n + k - window)
        last.append(bonus)
        first_position.append(length + n - window)
        expected.append(example.window([*verified[: length + n], bonus], window))
    shape = (num_generations, 2 * k + 1)
    inputs = generation_window(
        torch.stack(tokens) if tokens else torch.zeros(shape, dtype=torch.int32),
        torch.stack(tables) if tables else torch.zeros(*shape, H),
        torch.tensor(first_entry, dtype=torch.int64),
        int32(last),
        torch.tensor(first_position, dtype=torch.int64),
        window,
    )
    assert inputs.hidden_states.shape == (num_generations * window, H)
    for g, rows in enumerate(expected):
        assert_rows(inputs, rows, request=g, first=g * window)
    assert (inputs.input_ids >= 0).all()
    assert (inputs.position_ids >= 0).all()


def test_a_window_wider_than_the_entries_is_refused() -> None:
    with pytest.raises(TensorContractError, match="at most E = 3 rows"):
        generation_window(
            torch.zeros(1, 3, dtype=torch.int32),
            torch.zeros(1, 3, H),
            torch.tensor([0]),
            int32([1]),
            torch.tensor([0]),
            4,
        )
    with pytest.raises(TensorContractError, match=r"states \[1, 3, H\]"):
        generation_window(
            torch.zeros(1, 3, dtype=torch.int32),
            torch.zeros(1, 2, H),
            torch.tensor([0]),
            int32([1]),
            torch.tensor([0]),
            2,
        )


# --- prompts ---


def test_context_letters() -> None:
    """Prompt `p q r s`, emitted `t`."""
    inputs = context_rows(
        int32(ids("pqrs")), torch.arange(4), states([0, 1, 2, 3]), int32([4]), int32(ids("t"))
    )
    assert inputs.input_ids.tolist() == ids("qrst")
    assert_rows(inputs, example.chunk(ids("pqrst"), 0, 4, history=0))


def test_history_letters() -> None:
    """Prompt `p q r | s`, K = 2, emitted `t`: states of `q r s` with tokens `r s t`."""
    chunk = int32(ids("s"))
    rows = context_rows(chunk, torch.tensor([3]), states([3]), int32([1]), int32(ids("t")))
    inputs = context_rows_with_history(
        rows, chunk, int32(ids("qr")).unsqueeze(0), states([1, 2]).unsqueeze(0), [1], [2]
    )
    assert inputs.input_ids.tolist() == ids("rst")
    assert_rows(inputs, example.chunk(ids("pqrst"), 3, 4, history=2))


@given(k=st.integers(1, 7), num_contexts=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_prompts(k: int, num_contexts: int, seed: int) -> None:
    """Chunks anywhere in their prompts, with as much history as there is."""
    rng = random.Random(seed)
    prompts, starts, ends = [], [], []
    for _ in range(num_contexts):
        prompt = [rng.randrange(1, 99) for _ in range(rng.randint(1, 3 * k) + 1)]
        start = rng.randrange(len(prompt) - 1)
        prompts.append(prompt)
        starts.append(start)
        ends.append(rng.randint(start + 1, len(prompt) - 1))
    spans = list(zip(prompts, starts, ends, strict=True))
    chunk_ids = int32([token for prompt, start, end in spans for token in prompt[start:end]])
    position_ids = torch.tensor([p for _, start, end in spans for p in range(start, end)])
    chunk_states = torch.cat([states([*range(s, e)], r) for r, (_, s, e) in enumerate(spans)])
    lens = [end - start for _, start, end in spans]
    before = chunk_ids.clone(), chunk_states.clone()
    rows = context_rows(
        chunk_ids,
        position_ids,
        chunk_states,
        int32(lens),
        int32([prompt[end] for prompt, _, end in spans]),
    )
    first = 0
    for r, (prompt, start, end) in enumerate(spans):
        assert_rows(rows, example.chunk(prompt, start, end, history=0), r, first)
        first += end - start

    history = [min(k, start) for start in starts]
    pool_tokens = torch.full((num_contexts, k), -777, dtype=torch.int32)
    pool_states = torch.full((num_contexts, k, H), torch.nan)
    for r, ((prompt, start, _), count) in enumerate(zip(spans, history, strict=True)):
        pool_tokens[r, k - count :] = int32(prompt[start - count : start])
        pool_states[r, k - count :] = states([*range(start - count, start)], r)
    again = context_rows_with_history(rows, chunk_ids, pool_tokens, pool_states, lens, history)
    first = 0
    for r, ((prompt, start, end), count) in enumerate(zip(spans, history, strict=True)):
        assert_rows(again, example.chunk(prompt, start, end, history=count), r, first)
        first += count + end - start
    assert again.input_ids.shape == (first,)
    assert same_bits(chunk_ids, before[0])
    assert same_bits(chunk_states, before[1])


# --- accepted columns ---


def test_accepted_letters() -> None:
    """The step read `t u v w` and emitted `u v x`: its rows are `u v x x`."""
    inputs = accepted_rows(
        int32(ids("uvx.")).unsqueeze(0), torch.arange(4, 8), states([4, 5, 6, 7])
    )
    assert inputs.input_ids.tolist() == ids("uvxx")
    assert_rows(inputs, example.accepted(ids("uvx"), 4, start=4))


@given(
    k=st.integers(0, 7), counts=st.lists(st.integers(0, 8), max_size=4), seed=st.integers(0, 2**32)
)
def test_accepted_columns(k: int, counts: list[int], seed: int) -> None:
    """Outputs of every length; columns after the first padding are not read."""
    rng = random.Random(seed)
    runs, columns, starts = [], [], []
    for count in (min(count, k + 1) for count in counts):
        run = [rng.randrange(99) for _ in range(count)]
        tail = [-1] + [rng.choice([-1, 98]) for _ in range(k - count)]
        runs.append(run)
        columns.append(run + tail[: k + 1 - count])
        starts.append(rng.randrange(50))
    positions = [start + i for start in starts for i in range(k + 1)]
    hidden = [states([s + i for i in range(k + 1)], r) for r, s in enumerate(starts)]
    inputs = accepted_rows(
        int32(columns).reshape(len(runs), k + 1),
        torch.tensor(positions, dtype=torch.int64),
        torch.cat(hidden) if hidden else torch.zeros(0, H),
    )
    assert inputs.input_ids.shape == (len(runs) * (k + 1),)
    for r, run in enumerate(runs):
        assert_rows(inputs, example.accepted(run, k + 1, starts[r]), r, first=r * (k + 1))


def test_contexts_precede_generations() -> None:
    first = DraftInputs(int32([1]), torch.tensor([5]), torch.ones(1, H, dtype=torch.bfloat16))
    second = DraftInputs(int32([2, 3]), torch.tensor([8, 9]), torch.zeros(2, H))
    both = concatenate(first, second)
    assert both.input_ids.tolist() == [1, 2, 3]
    assert both.position_ids.tolist() == [5, 8, 9]
    # the type is that of the step's states, whatever the pools have
    assert both.hidden_states.dtype == torch.bfloat16
    assert both.hidden_states[:, 0].tolist() == [1.0, 0.0, 0.0]


# --- wrong arguments ---


def window_of(**change: Any) -> None:
    arguments = {
        "entry_tokens": torch.zeros(2, 3, dtype=torch.int32),
        "entry_states": torch.zeros(2, 3, H),
        "first_entry": torch.tensor([0, 0]),
        "last_tokens": int32([1, 2]),
        "first_position": torch.tensor([0, 0]),
        "window": 2,
    }
    generation_window(**arguments | change)


def rows_of_contexts(**change: Any) -> None:
    arguments = {
        "input_ids": int32([1, 2, 3]),
        "position_ids": torch.arange(3),
        "hidden_states": torch.zeros(3, H),
        "context_lens": int32([2, 1]),
        "last_tokens": int32([4, 5]),
    }
    context_rows(**arguments | change)


def rows_with_history(**change: Any) -> None:
    arguments = {
        "rows": DraftInputs(int32([2, 9, 8]), torch.arange(3), torch.zeros(3, H)),
        "chunk_ids": int32([1, 2, 3]),
        "pool_tokens": torch.zeros(2, 4, dtype=torch.int32),
        "pool_states": torch.zeros(2, 4, H),
        "context_lens": [2, 1],
        "history_lens": [0, 4],
    }
    context_rows_with_history(**arguments | change)


def columns_of(**change: Any) -> None:
    arguments = {
        "accepted_tokens": torch.zeros(2, 3, dtype=torch.int32),
        "position_ids": torch.arange(6),
        "hidden_states": torch.zeros(6, H),
    }
    accepted_rows(**arguments | change)


@pytest.mark.parametrize(
    ("call", "change", "message"),
    [
        (window_of, {"first_entry": torch.tensor([0])}, r"first_entry: expected .* \[2\]"),
        (window_of, {"last_tokens": int32([1])}, r"last_tokens: expected .* \[2\]"),
        (window_of, {"first_position": int32([1] * 3)}, r"first_position: expected .* \[2\]"),
        (
            rows_of_contexts,
            {"position_ids": torch.arange(4)},
            r"position_ids: expected .* \[3\]",
        ),
        (
            rows_of_contexts,
            {"hidden_states": torch.zeros(2, H)},
            r"states: expected .* \[3, H\]",
        ),
        (rows_of_contexts, {"last_tokens": int32([4])}, r"last_tokens: expected .* \[2\]"),
        (rows_with_history, {"chunk_ids": int32([1])}, r"chunk_ids: expected .* \[3\]"),
        (rows_with_history, {"context_lens": [2]}, "context_lens: expected 3 rows of 2 contexts"),
        (
            rows_with_history,
            {"context_lens": [2, 2]},
            "context_lens: expected 3 rows of 2 contexts",
        ),
        (rows_with_history, {"history_lens": [0]}, "context_lens: expected 3 rows of 2 contexts"),
        (rows_with_history, {"history_lens": [5, 0]}, "history_lens: expected 0 to K = 4"),
        (rows_with_history, {"pool_states": torch.zeros(2, 3, H)}, r"states: expected \[2, 4, 2\]"),
        (columns_of, {"position_ids": torch.arange(4)}, r"position_ids: expected .* \[6\]"),
        (columns_of, {"hidden_states": torch.zeros(4, H)}, r"states: expected .* \[6, H\]"),
    ],
)
def test_wrong_shapes_are_refused(call: Callable[..., None], change: Any, message: str) -> None:
    call()
    with pytest.raises(TensorContractError, match=message):
        call(**change)


def test_states_of_other_widths_do_not_follow_each_other() -> None:
    rows = DraftInputs(int32([1]), torch.tensor([5]), torch.ones(1, H))
    wide = DraftInputs(int32([1]), torch.tensor([5]), torch.ones(1, H + 1))
    with pytest.raises(TensorContractError, match="expected rows of one width, got 2 and 3"):
        concatenate(rows, wide)
