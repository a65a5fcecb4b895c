"""Log-sum-exp partials of `sample_tokens`: example, torch and Triton agree, and tokens are
those of a draw that leaves nothing."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops import row_sums
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.row_sums import FEW_ROWS, RowSums
from mtp_plugin.ops.sampling import TRUNCATION_SIZE
from mtp_plugin.ops.sampling import sample_triton as launch
from tests.op_arguments import poisoned_memory
from tests.ops.chunks import check_sums, reference_sums
from tests.ops.on_device import DEVICE, vector
from tests.ops.sampling.cases import Batch, slots_of
from tests.ops.sampling.example import Options
from tests.ops.slots import column
from tests.ops.top_k.launches import captured
from tests.ops.top_k.rows import DTYPES

INF, NAN = float("inf"), float("nan")
shapes = {
    "seed": st.integers(0, 2**31),
    "contexts": st.integers(0, 3),
    "generations": st.integers(0, 2),
    "width": st.integers(1, 3),
    "dtype": st.sampled_from(DTYPES),
    "gap": st.integers(0, 2),
    "ahead": st.booleans(),
}


def ask(batch: Batch, numbers: list[int]) -> torch.Tensor:
    """Set the requests' number of logprobs; returns which rows have some [N] bool."""
    slots = batch.slots.slot_ids[: len(numbers)]
    column(batch.slots, "logprobs")[slots] = vector(numbers, torch.int32)
    return vector([numbers[request] >= 0 for request, _ in batch.sampled_positions()], torch.bool)


def sample(batch: Batch, backend: Backend, *, with_truncation: bool) -> tuple[torch.Tensor, ...]:
    """Tokens, truncation and sums."""
    with poisoned_memory():
        sums = RowSums.unwritten(batch.logits)
        truncation = (
            torch.empty(len(batch.logits), TRUNCATION_SIZE, device=DEVICE)
            if with_truncation
            else None
        )
        tokens = batch.tokens(backend, truncation=truncation, sums=sums)
    return tokens, torch.empty(0) if truncation is None else truncation, sums


def check(
    batch: Batch, rows: torch.Tensor, backend: Backend, *, with_truncation: bool = False
) -> None:
    tokens, truncation, sums = sample(batch, backend, with_truncation=with_truncation)
    check_sums(sums, reference_sums(batch.logits), rows)
    assert torch.equal(tokens, batch.tokens(backend))
    if with_truncation:
        alone = torch.full_like(truncation, NAN)
        batch.tokens(backend, truncation=alone)
        assert torch.equal(truncation, alone)


@pytest.mark.parametrize("backend", Backend)
def test_sums_equal_the_example(backend: Backend) -> None:
    @settings(max_examples=24 if backend is Backend.TORCH else 10)
    @given(vocab=st.sampled_from((1, 2, 31, 300, 4097)), with_truncation=st.booleans(), **shapes)
    def agree(vocab: int, seed: int, with_truncation: bool, **shape: object) -> None:
        batch = Batch.of(seed, vocab, **shape)
        rng = random.Random(seed)
        rows = ask(batch, [rng.choice((-1, 0, 20)) for _ in batch.options])
        check(batch, rows, backend, with_truncation=with_truncation)

    agree()


@pytest.mark.thinned
@pytest.mark.parametrize("few_rows", [0, FEW_ROWS])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_sums_of_many_blocks(parts: int, few_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program reads one block or more, small or large."""
    monkeypatch.setattr(launch, "_plan", launch._plan.__wrapped__)  # keeps none
    monkeypatch.setattr(launch, "SCAN_BLOCKS", ((0, parts),))
    monkeypatch.setattr(launch, "SCAN_BLOCKS_OF_FEW", ((0, parts),))
    monkeypatch.setattr(row_sums, "FEW_ROWS", few_rows)

    @settings(max_examples=6)
    @given(vocab=st.sampled_from((4096, 9001)), with_truncation=st.booleans(), **shapes)
    def agree(vocab: int, with_truncation: bool, seed: int, **shape: object) -> None:
        batch = Batch.of(seed, vocab, **shape)
        rng = random.Random(seed)
        rows = ask(batch, [rng.choice((-1, 0, 20)) for _ in batch.options])
        check(batch, rows, Backend.TRITON, with_truncation=with_truncation)

    agree()


EVERY = [
    Options(0.0),
    Options(0.0, top_k=5),
    Options(0.7, seed=1),
    Options(1.0, top_k=3, seed=2),
    Options(1.0, top_k=50, top_p=0.5, seed=3),
    Options(1.0, top_p=0.9, seed=4),
    Options(2.0, top_p=0.95, seed=5),  # flat
    Options(100.0, min_p=0.5, seed=6),
    Options(1e-4, top_k=10_000, top_p=1e-30, min_p=1.0, seed=7),
]


def batch_of(row: torch.Tensor, options: list[Options]) -> Batch:
    """A row per request, all alike."""
    rows = row.to(DEVICE).expand(len(options), -1).clone()
    requests = LogitRows(len(options), 1, vector(range(len(options))))
    return Batch(rows, requests, slots_of(options, random.Random(1)), options)


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("vocab", [1, 5, 4097])
def test_rows_without_values_and_with_infinities(backend: Backend, vocab: int) -> None:
    nothing = torch.full((vocab,), -INF)
    one, high = nothing.clone(), torch.ones(vocab)
    one[-1] = -3e38
    one[0] = NAN if vocab > 1 else -3e38
    high[-1] = INF
    for row in (nothing, torch.full((vocab,), NAN), one, high, torch.full((vocab,), INF)):
        batch = batch_of(row, EVERY)
        rows = ask(batch, [0] * len(EVERY))
        check(batch, rows, backend)
        if not bool((row > -INF).any()):
            assert sample(batch, backend, with_truncation=False)[2].masses.tolist() == [0.0] * len(
                EVERY
            )


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_column_belongs_to_one_chunk(dtype: torch.dtype, rows: int) -> None:
    layout = RowSums.unwritten(torch.zeros(rows, 3, dtype=dtype)).layout
    block, number = layout.block, layout.chunks
    columns = torch.arange(2 * block + 3)
    chunks = layout.chunks_of(columns)
    assert torch.equal(chunks // number, columns // block)
    assert chunks.bincount(minlength=3 * number).tolist() == (
        [block // number] * 2 * number + [3] + [0] * (number - 1)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("generations", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (64, torch.float16)]
)
def test_sums_of_a_captured_graph_follow_its_inputs(generations: int, dtype: torch.dtype) -> None:
    shape = {"contexts": 0, "generations": generations, "width": 4, "dtype": dtype}
    batch = Batch.of(8, 129280, **shape)
    rows = ask(batch, [request % 3 - 1 for request in range(generations)])

    def step() -> RowSums:
        sums = RowSums.unwritten(batch.logits)
        batch.tokens(Backend.TRITON, sums=sums)
        return sums

    graph, sums = captured(step)
    for seed in range(3):
        batch.logits.copy_(Batch.of(seed, 129280, **shape).logits)
        graph.replay()
        check_sums(sums, reference_sums(batch.logits), rows)
