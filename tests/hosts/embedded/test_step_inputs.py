"""Inputs of generations: the example on lists, torch and the kernel are equal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import ExecutorError, TensorContractError
from mtp_plugin.hosts.embedded import step_inputs_triton
from mtp_plugin.hosts.embedded.row_table import Row, RowTable, UploadedRows
from mtp_plugin.hosts.embedded.step_inputs import StepInputs, generation_inputs
from mtp_plugin.ops.backend import Backend
from tests.op_arguments import check_strided_arguments, poisoned_memory
from tests.ops.on_device import DEVICE, forbid_launches
from tests.ops.top_k.launches import captured

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
    blocks=st.lists(st.integers(0, 90), max_size=5),
)


@dataclass(frozen=True)
class Store:
    """The columns of the sampler's store that are read."""

    new_tokens: torch.Tensor
    new_tokens_lens: torch.Tensor


def tensors(values: StepInputs | UploadedRows) -> dict[str, torch.Tensor]:
    return {k: v for k, v in vars(values).items() if isinstance(v, torch.Tensor)}


def flattened(values: Iterable[list[int] | int]) -> list[int]:
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


def make_table(max_rows: int = 8) -> RowTable:
    return RowTable(
        max_rows,
        step_rows=K + 1,
        table_width=5,
        sentinel_block=SENTINEL,
        device=DEVICE,
    )


def make_store(seed: int) -> Store:
    rng = torch.Generator().manual_seed(seed)
    together = torch.randint(0, 500, (NUM_SLOTS, 2 * K + 3), generator=rng, dtype=torch.int32)
    lens = torch.randint(0, K + 2, (NUM_SLOTS, 3), generator=rng, dtype=torch.int32)
    # columns of wider tensors, as the sampler's are
    return Store(
        new_tokens=together.to(DEVICE)[:, 1 : K + 2].T.unsqueeze(-1),
        new_tokens_lens=lens.to(DEVICE)[:, 1],
    )


def example(row: Row, store: Store | None, draft_len: int) -> dict[str, list[int] | int]:
    tokens, length = row.tokens, row.length
    if store is not None and row.is_pending:
        tokens = store.new_tokens[:, row.seq_slot, 0].tolist()
        length += int(store.new_tokens_lens[row.seq_slot])
    drafts = min(row.draft_limit, max(row.capacity - 1 - length, 0))
    ids = [token if column <= drafts else 0 for column, token in enumerate(tokens[: draft_len + 1])]
    return {
        "input_ids": [max(token, 0) for token in ids],
        "draft_tokens": ids[1:],
        "positions": [min(length + i, MAX_SEQ_LEN - 1) for i in range(draft_len + 1)],
        "draft_lens": drafts,
        "seq_lens": draft_len + 1,
        "kv_lens": length + draft_len + 1,
        "write_limit": min(length + drafts + 1, row.capacity),
        "capacity": row.capacity,
        "state_slot": row.state_slot,
    }


@settings(max_examples=40)
@given(
    batch=st.lists(rows, min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    has_store=st.booleans(),
    draft_len=st.integers(0, K),
)
def test_example_torch_and_kernel_agree(
    batch: list[Row], seed: int, has_store: bool, draft_len: int
) -> None:
    step = make_table().upload(batch)
    store = make_store(seed) if has_store else None
    sizes = {"draft_len": draft_len, "max_seq_len": MAX_SEQ_LEN}
    expected = generation_inputs(step, store, **sizes, backend=Backend.TORCH)
    with poisoned_memory():
        got = generation_inputs(step, store, **sizes, backend=Backend.TRITON)
    by_request = [example(row, store, draft_len) for row in batch]
    for name, tensor in tensors(expected).items():
        assert tensor.tolist() == flattened(row[name] for row in by_request), name
        assert torch.equal(getattr(got, name), tensor), name
        assert getattr(got, name).dtype == tensor.dtype, name
        assert getattr(got, name).is_contiguous(), name


def test_too_many_rows_or_blocks_are_refused() -> None:
    table = make_table(max_rows=2)
    row = Row([0] * (K + 1), length=1)
    with pytest.raises(ExecutorError, match="3 rows, the table holds 2"):
        table.upload([row] * 3)
    with pytest.raises(ExecutorError, match="a request of 6 blocks, the table holds 5"):
        table.upload([Row([0] * (K + 1), length=1, blocks=list(range(6)))])


@pytest.mark.parametrize("backend", Backend)
def test_no_generations(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, step_inputs_triton)
    step = make_table().upload([])
    sizes = {"draft_len": K, "max_seq_len": MAX_SEQ_LEN}
    inputs = generation_inputs(step, make_store(0), **sizes, backend=backend)
    assert inputs.input_ids.shape == inputs.draft_tokens.shape == (0,)


def test_rows_of_different_tables_are_refused() -> None:
    step = make_table().upload([Row([0] * (K + 1), length=1)] * 2)
    sizes = {"draft_len": K, "max_seq_len": MAX_SEQ_LEN, "backend": Backend.TORCH}
    loose = replace(step, length=step.length.clone())
    with pytest.raises(TensorContractError, match="columns of one table"):
        generation_inputs(loose, None, **sizes)
    stride = step.tokens.stride(0)
    apart = step.tokens.as_strided(step.tokens.shape, (stride, 2))
    with pytest.raises(TensorContractError, match="tokens: expected row-contiguous"):
        generation_inputs(replace(step, tokens=apart), None, **sizes)
    with pytest.raises(TensorContractError, match=r"tokens: expected .* \[G, >= 5\]"):
        generation_inputs(step, None, **(sizes | {"draft_len": K + 1}))


@pytest.mark.parametrize("backend", Backend)
def test_strided_arguments(backend: Backend) -> None:
    """With K = 0, contiguous columns have the stride of one table too."""
    step = make_table().upload([Row([7] * (K + 1), 5 + i, 0, 30, i == 1, i) for i in range(3)])
    rows = replace(step, tokens=step.tokens[:, :1])
    rows = replace(rows, **{name: value.contiguous() for name, value in tensors(rows).items()})
    store = make_store(3)
    store = replace(store, **{name: value.contiguous() for name, value in vars(store).items()})
    read = ["tokens", "length", "draft_limit", "capacity", "is_pending", "seq_slot", "state_slot"]
    check_strided_arguments(
        generation_inputs,
        {"rows": rows, "previous": store},
        refused={f"rows.{name}": "step rows: expected columns of one table" for name in read},
        draft_len=0,
        max_seq_len=MAX_SEQ_LEN,
        backend=backend,
    )


@pytest.mark.gpu
def test_replays_read_the_table_and_the_store_anew() -> None:
    table, store = make_table(), make_store(1)
    first = [Row([1, 2, 3, 4], length=5, draft_limit=3, capacity=30)] * 8
    step = table.upload(first)
    sizes = {"draft_len": K, "max_seq_len": MAX_SEQ_LEN}
    graph, inputs = captured(
        lambda: generation_inputs(step, store, **sizes, backend=Backend.TRITON)
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
        expected = generation_inputs(step, store, **sizes, backend=Backend.TORCH)
        for name, tensor in tensors(expected).items():
            assert torch.equal(getattr(inputs, name), tensor), name
