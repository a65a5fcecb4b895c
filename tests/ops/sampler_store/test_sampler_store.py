"""Storing results: a list-based example, torch reference and Triton agree."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops import sampler_store_triton
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.sampler_store import ResultTensors, store_results
from mtp_plugin.ops.step import NO_INPUT, PAD_TOKEN, STATUS_NO_FINITE_LOGIT, STATUS_OK
from tests.op_arguments import check_arguments
from tests.ops.on_device import DEVICE, INDEX_DTYPES, forbid_launches, poisoned, vector
from tests.ops.top_k.launches import captured


def make_results(
    seed: int, rows: int, k: int, dtype: torch.dtype = torch.int32, spare: int = 0
) -> ResultTensors:
    """Results of `rows` requests with k drafts; all are columns of wider tensors if `spare`."""
    rng = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        wide = torch.randint(-1, 500, (*shape, 1 + spare), generator=rng, dtype=dtype)
        return wide.to(DEVICE)[..., 0]

    return ResultTensors(
        new_tokens=numbers(rows, k + 1),
        next_new_tokens=numbers(rows, k + 1),
        next_draft_tokens=numbers(rows, k),
        new_tokens_lens=numbers(rows),
        status=numbers(rows),
    )


def example(results: ResultTensors, row: int, most: int) -> list[int]:
    def padded(tokens: torch.Tensor, width: int, filling: int = PAD_TOKEN) -> list[int]:
        return (tokens[row].tolist() + [filling] * width)[:width]

    return [
        *padded(results.new_tokens, most + 1),
        *padded(results.next_new_tokens, most + 1, NO_INPUT),
        *padded(results.next_draft_tokens, most),
        int(results.new_tokens_lens[row]),
        STATUS_OK if results.status is None else int(results.status[row]),
    ]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    slots=st.lists(st.integers(0, 8), max_size=7, unique=True),
    most=st.integers(0, 5),
    k=st.integers(0, 6),
    padding=st.integers(0, 2),
    spare=st.integers(0, 2),
    dtype=st.sampled_from(INDEX_DTYPES),
    has_status=st.booleans(),
)
def test_example_reference_and_kernel_agree(
    seed: int,
    slots: list[int],
    most: int,
    k: int,
    padding: int,
    spare: int,
    dtype: torch.dtype,
    has_status: bool,
) -> None:
    results = make_results(seed, len(slots) + padding, k, dtype, spare)
    if not has_status:
        results = replace(results, status=None)
    before = poisoned(9, 3 * most + 4, dtype=torch.int32)
    expected = before.tolist()
    for row, slot in enumerate(slots):
        expected[slot] = example(results, row, most)
    for backend in Backend:
        store = before.clone()
        store_results(store, vector(slots), results, backend=backend)
        assert store.tolist() == expected


def test_letters() -> None:
    """K = 2: a step with one draft returned `a b` for slot 3, its next draft is `c`."""
    a, b, c = 97, 98, 99
    results = ResultTensors(
        new_tokens=vector([a, b], torch.int32).reshape(1, 2),
        next_new_tokens=vector([b, c], torch.int32).reshape(1, 2),
        next_draft_tokens=vector([c], torch.int32).reshape(1, 1),
        new_tokens_lens=vector([2], torch.int32),
        status=vector([STATUS_NO_FINITE_LOGIT], torch.int32),
    )
    for backend in Backend:
        store = poisoned(5, 10, dtype=torch.int32)
        store_results(store, vector([3]), results, backend=backend)
        assert store[3].tolist() == [a, b, -1, b, c, 0, c, -1, 2, 1]


@pytest.mark.parametrize("backend", Backend)
def test_rows_that_are_columns_of_a_wider_store(backend: Backend) -> None:
    wide = poisoned(4, 9, dtype=torch.int32)
    results = make_results(1, 2, 1)
    store_results(wide[:, 1:8], vector([2, 0]), results, backend=backend)
    assert wide[2, 1:8].tolist() == example(results, 0, 1)
    assert wide[0, 1:8].tolist() == example(results, 1, 1)
    untouched = wide.clone()
    untouched[[0, 2], 1:8] = poisoned(2, 7, dtype=torch.int32)
    assert torch.equal(untouched, poisoned(4, 9, dtype=torch.int32))


@pytest.mark.parametrize("backend", Backend)
def test_no_requests(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_launches(monkeypatch, sampler_store_triton)
    store = poisoned(4, 7, dtype=torch.int32)
    store_results(store, vector([]), make_results(0, 0, 1), backend=backend)
    assert torch.equal(store, poisoned(4, 7, dtype=torch.int32))


@pytest.mark.parametrize(
    ("columns", "k", "message"),
    [(8, 1, r"store: expected \[S, 3K\+4\], got \[4, 8\]"), (7, 0, "new_tokens")],
)
def test_stores_of_another_width_are_refused(columns: int, k: int, message: str) -> None:
    store, results = poisoned(4, columns, dtype=torch.int32), make_results(0, 2, 1)
    if k != 1:
        results = replace(results, new_tokens=make_results(0, 2, k).new_tokens)
    with pytest.raises(TensorContractError, match=message):
        store_results(store, vector([1, 2]), results, backend=Backend.TORCH)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    """Replays read the current values of slots and results."""
    store, slots, results = (
        poisoned(6, 13, dtype=torch.int32),
        vector([4, 1]),
        make_results(0, 2, 3),
    )
    graph, _ = captured(lambda: store_results(store, slots, results, backend=Backend.TRITON))
    for seed in range(1, 4):
        fresh = make_results(seed, 2, 3)
        for field in fields(fresh):
            getattr(results, field.name).copy_(getattr(fresh, field.name))
        slots.copy_(vector([seed, 5]))
        store.fill_(-777)
        graph.replay()
        expected = poisoned(6, 13, dtype=torch.int32)
        store_results(expected, slots, fresh, backend=Backend.TORCH)
        assert torch.equal(store, expected)


@pytest.mark.parametrize("backend", Backend)
def test_arguments(backend: Backend) -> None:
    arguments = {"store": poisoned(4, 7, dtype=torch.int32), "slots": vector([1, 2])}
    check_arguments(
        store_results,
        arguments | {"results": make_results(0, 2, 1)},
        refused={"store": "row-contiguous"},
        free={"store: shorter", "slots: shorter"},
        backend=backend,
    )
