"""Inputs of generations: the list story equals the reference equals the kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import ExecutorError, TensorContractError
from mtp_plugin.executor.row_table import Row, RowTable
from mtp_plugin.executor.step_inputs import generation_inputs, launch
from tests.kernels.top_k.launches import captured, poisoned_outputs
from tests.speculative.ops.on_device import DEVICE

K, NUM_SLOTS, MAX_SEQ_LEN, SENTINEL = 3, 6, 40, 99

rows = st.builds(
    Row,
    tokens=st.lists(st.integers(-1, 500), min_size=K + 1, max_size=K + 1),
    length=st.integers(1, MAX_SEQ_LEN),
    draft_limit=st.integers(0, K),
    capacity=st.integers(0, MAX_SEQ_LEN),
    is_pending=st.booleans(),
    seq_slot=st.integers(0, NUM_SLOTS - 1),
    state_slot=st.integers(0, 9),
    min_tokens_end=st.integers(0, 9),
    stop_ids=st.lists(st.integers(0, 500), max_size=2),
    blocks=st.lists(st.integers(0, 90), max_size=5),
)


def make_table(max_rows: int = 8) -> RowTable:
    return RowTable(
        max_rows,
        step_rows=K + 1,
        stop_width=2,
        table_width=5,
        sentinel_block=SENTINEL,
        device=DEVICE,
    )


def make_store(seed: int) -> SimpleNamespace:
    dice = torch.Generator().manual_seed(seed)
    together = torch.randint(0, 500, (NUM_SLOTS, 2 * K + 3), generator=dice, dtype=torch.int32)
    lens = torch.randint(0, K + 2, (NUM_SLOTS, 3), generator=dice, dtype=torch.int32)
    # columns of wider tensors, as the sampler's are
    return SimpleNamespace(
        new_tokens=together.to(DEVICE)[:, 1 : K + 2].T.unsqueeze(-1),
        new_tokens_lens=lens.to(DEVICE)[:, 1],
    )


def story(row: Row, store: SimpleNamespace | None, draft_len: int) -> dict[str, list[int] | int]:
    tokens, length = row.tokens, row.length
    if store is not None and row.is_pending:
        tokens = store.new_tokens[:, row.seq_slot, 0].tolist()
        length += int(store.new_tokens_lens[row.seq_slot])
    drafts = min(row.draft_limit, max(row.capacity - 1 - length, 0))
    ids = [
        max(token, 0) if column <= drafts else 0
        for column, token in enumerate(tokens[: draft_len + 1])
    ]
    return {
        "input_ids": ids,
        "draft_tokens": ids[1:],
        "positions": [min(length + i, MAX_SEQ_LEN - 1) for i in range(draft_len + 1)],
        "draft_lens": drafts,
        "seq_lens": draft_len + 1,
        "kv_lens": length + draft_len + 1,
        "write_limit": min(length + drafts + 1, row.capacity),
        "capacity": row.capacity,
        "state_slot": row.state_slot,
    }


@settings(max_examples=60)
@given(
    batch=st.lists(rows, min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    has_store=st.booleans(),
    draft_len=st.integers(0, K),
)
def test_story_reference_and_kernel_agree(
    batch: list[Row], seed: int, has_store: bool, draft_len: int
) -> None:
    step = make_table().upload(batch)
    store = make_store(seed) if has_store else None
    sizes = {"draft_len": draft_len, "max_seq_len": MAX_SEQ_LEN}
    expected = generation_inputs(step, store, **sizes)
    with poisoned_outputs(launch):
        got = launch.generation_inputs(step, store, **sizes)
    told = [story(row, store, draft_len) for row in batch]
    for name, tensor in vars(expected).items():
        assert tensor.tolist() == [row[name] for row in told], name
        assert torch.equal(getattr(got, name), tensor), name
        assert getattr(got, name).dtype == tensor.dtype, name
        assert getattr(got, name).is_contiguous(), name


def test_letters() -> None:
    """K = 3: the step before emitted two tokens of a request that the host knows 10 tokens of."""
    row = Row([7, 0, 0, 0], length=10, draft_limit=3, capacity=15, is_pending=True, seq_slot=2)
    store = make_store(0)
    store.new_tokens_lens[2] = 2
    store.new_tokens[:, 2, 0] = torch.tensor([70, 71, 72, 73], dtype=torch.int32)
    inputs = generation_inputs(
        make_table().upload([row]), store, draft_len=K, max_seq_len=MAX_SEQ_LEN
    )
    # 12 tokens are there: 15 rows hold the newest one and two drafts
    assert inputs.input_ids.tolist() == [[70, 71, 72, 0]]
    assert inputs.draft_lens.tolist() == [2]
    assert inputs.positions.tolist() == [[12, 13, 14, 15]]
    assert inputs.write_limit.tolist() == [15]


@settings(max_examples=60)
@given(steps=st.lists(st.lists(rows, min_size=1, max_size=8), min_size=1, max_size=6))
def test_a_table_shows_every_step_as_it_was_written(steps: list[list[Row]]) -> None:
    table = make_table()
    for batch in steps:
        step = table.upload(batch)
        for place, row in enumerate(batch):
            assert step.tokens[place].tolist() == row.tokens
            for name in ("length", "draft_limit", "capacity", "seq_slot", "state_slot"):
                assert int(getattr(step, name)[place]) == getattr(row, name)
            assert bool(step.is_pending[place]) == row.is_pending
            stops = list(row.stop_ids)
            assert step.stop_ids[place].tolist() == stops + [-1] * (2 - len(stops))
            blocks = list(row.blocks)
            assert step.block_table[place].tolist() == blocks + [SENTINEL] * (5 - len(blocks))


def test_a_step_that_does_not_fit_is_refused() -> None:
    table = make_table(max_rows=2)
    row = Row([0] * (K + 1), length=1)
    assert table.holds(2, 2)
    assert not table.holds(3, 0)
    assert not table.holds(1, 3)
    with pytest.raises(ExecutorError, match="3 rows of up to 0 stop ids, the table holds 2 of 2"):
        table.upload([row] * 3)
    with pytest.raises(ExecutorError, match="a request of 6 blocks, the table holds 5"):
        table.upload([Row([0] * (K + 1), length=1, blocks=list(range(6)))])


def test_rows_of_no_table_are_refused() -> None:
    step = make_table().upload([Row([0] * (K + 1), length=1)] * 2)
    loose = type(step)(**{**vars(step), "length": step.length.clone()})
    with pytest.raises(TensorContractError, match="columns of one table"):
        launch.generation_inputs(loose, None, draft_len=K, max_seq_len=MAX_SEQ_LEN)
    with pytest.raises(TensorContractError, match="at least 5 tokens"):
        launch.generation_inputs(step, None, draft_len=K + 1, max_seq_len=MAX_SEQ_LEN)


@pytest.mark.gpu
def test_replays_read_the_table_and_the_store_anew() -> None:
    table, store = make_table(), make_store(1)
    first = [Row([1, 2, 3, 4], length=5, draft_limit=3, capacity=30)] * 8
    step = table.upload(first)
    graph, inputs = captured(
        lambda: launch.generation_inputs(step, store, draft_len=K, max_seq_len=MAX_SEQ_LEN)
    )
    for seed in range(4):
        batch = [
            Row([seed, 2, 3, 4], 5 + i, 3, 30 + i, i % 2 == 0, i % NUM_SLOTS, i) for i in range(8)
        ]
        fresh = make_store(seed)
        store.new_tokens.copy_(fresh.new_tokens)
        store.new_tokens_lens.copy_(fresh.new_tokens_lens)
        table.upload(batch)
        graph.replay()
        expected = generation_inputs(step, store, draft_len=K, max_seq_len=MAX_SEQ_LEN)
        for name, tensor in vars(expected).items():
            assert torch.equal(getattr(inputs, name), tensor), name
