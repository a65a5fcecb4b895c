"""`sample_tokens`: example, torch and Triton agree for all options, rows and shapes."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.ops import row_sums
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.sampling import Role
from mtp_plugin.ops.sampling import sample_triton as launch
from tests.ops.on_device import DEVICE, INDEX_DTYPES, vector
from tests.ops.sampling.cases import Batch, slots_of
from tests.ops.sampling.example import Options
from tests.ops.sampling.margins import Comparison
from tests.ops.top_k.rows import DTYPES

batches = {
    "seed": st.integers(0, 2**31),
    "contexts": st.integers(0, 3),
    "generations": st.integers(0, 2),
    "width": st.integers(1, 3),
    "dtype": st.sampled_from(DTYPES),
    "index_dtype": st.sampled_from(INDEX_DTYPES),
    "gap": st.integers(0, 2),
    "role": st.sampled_from(Role),
    "ahead": st.booleans(),
    "cut": st.booleans(),
}


def test_example_torch_and_triton_agree() -> None:
    comparison = Comparison()

    @settings(max_examples=32)
    @given(vocab=st.sampled_from((1, 2, 7, 31, 127, 300)), **batches)
    def agree(vocab: int, **shape: object) -> None:
        batch = Batch.of(vocab=vocab, **shape)
        expected = batch.example()
        for backend in Backend:
            comparison.compare(batch, expected, batch.tokens(backend))

    agree()
    assert comparison.rows["all"] > 100
    comparison.check()


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("parts", "max_grid_y", "few_rows"), [(1, 65535, 33), (2, 1, 33), (1, 1, 0), (4, 65535, 0)]
)
def test_torch_and_triton_agree_over_many_chunks(
    parts: int, max_grid_y: int, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with chunks left out, and with more candidates than are ranked; a program reads
    one piece or more, small or large, as it does of many rows, and rows may lie along either side
    of the grid."""
    monkeypatch.setattr(launch, "_plan", launch._plan.__wrapped__)  # keeps none
    monkeypatch.setattr(launch, "SCAN_BLOCKS", ((0, parts),))
    monkeypatch.setattr(launch, "SCAN_BLOCKS_OF_FEW", ((0, parts),))
    monkeypatch.setattr(row_sums, "FEW_ROWS", few_rows)
    monkeypatch.setattr(launch, "MAX_GRID_Y", max_grid_y)
    comparison = Comparison()

    @settings(max_examples=8)
    @given(vocab=st.sampled_from((1025, 4096, 4099, 9001)), **batches)
    def agree(vocab: int, **shape: object) -> None:
        batch = Batch.of(vocab=vocab, **shape)
        expected = batch.tokens(Backend.TORCH).tolist()
        comparison.compare(batch, expected, batch.tokens(Backend.TRITON))

    agree()
    assert comparison.rows["all"] > 10
    comparison.check()


def rows_of_noise(kind: str, shape: tuple[int, int]) -> torch.Tensor:
    noise = torch.Generator().manual_seed(1)
    lowest = torch.finfo(torch.float32).min
    return {
        "a step apart": lambda: 30_000 + 0.002 * torch.randn(shape, generator=noise),
        "one value": lambda: torch.full(shape, 3e4),
        "the lowest": lambda: torch.full(shape, lowest),
        "all there are": lambda: (torch.rand(shape, generator=noise) * 2 - 1) * -lowest,
    }[kind]()


@pytest.mark.thinned(cases=3)
@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        ("a step apart", 1e-4),
        ("one value", 1e-5),
        ("the lowest", 1.0),
        ("all there are", 1.3e38),
        ("all there are", 3.4e38),
    ],
)
def test_rounding_leaves_no_chunk_out(kind: str, temperature: float) -> None:
    """Rows with large or infinite exponents, or a scale that is nearly zero."""
    rng, number, vocab = random.Random(1), 6, 4099
    options = [Options(temperature, seed=rng.getrandbits(60)) for _ in range(number)]
    rows = LogitRows(number, 1, vector([3] * number))
    logits = rows_of_noise(kind, (number, vocab)).to(DEVICE)
    batch = Batch(logits, rows, slots_of(options, rng), options)
    comparison = Comparison()
    comparison.compare(batch, batch.tokens(Backend.TORCH).tolist(), batch.tokens(Backend.TRITON))
    comparison.check()
