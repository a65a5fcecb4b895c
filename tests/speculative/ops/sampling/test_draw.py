"""Draws: the story equals torch equals Triton, for options, rows and shapes of every kind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative import row_sums
from mtp_plugin.speculative.ops.sampling import Role, launch
from tests.kernels.top_k.rows import DTYPES
from tests.speculative.ops.on_device import INDEX_DTYPES
from tests.speculative.ops.sampling.cases import Batch
from tests.speculative.ops.sampling.margins import Judge

batches = {
    "seed": st.integers(0, 2**31),
    "contexts": st.integers(0, 3),
    "generations": st.integers(0, 2),
    "width": st.integers(1, 3),
    "dtype": st.sampled_from(DTYPES),
    "index_dtype": st.sampled_from(INDEX_DTYPES),
    "behind": st.integers(0, 2),
    "role": st.sampled_from(Role),
    "ahead": st.booleans(),
    "cut": st.booleans(),
}


def test_story_torch_and_triton_agree() -> None:
    judge = Judge()

    @settings(max_examples=80)
    @given(vocab=st.sampled_from((1, 2, 7, 31, 127, 300)), **batches)
    def agree(vocab: int, **shape: object) -> None:
        batch = Batch.of(vocab=vocab, **shape)
        told = batch.story()
        for backend in Backend:
            judge.compare(batch, told, batch.tokens(backend))

    agree()
    assert judge.rows["all"] > 300
    judge.check()


@pytest.mark.parametrize(
    ("parts", "most_behind", "few_rows"), [(1, 65535, 33), (2, 1, 33), (1, 1, 0), (4, 65535, 0)]
)
def test_torch_and_triton_agree_over_many_chunks(
    parts: int, most_behind: int, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where chunks are left out, and where candidates are more than are counted; a program reads
    one piece or more, small or large, as it does of many rows, and rows may stand along either side
    of the grid."""
    monkeypatch.setattr(launch, "PARTS", ((0, parts),))
    monkeypatch.setattr(launch, "PARTS_OF_FEW", ((0, parts),))
    monkeypatch.setattr(row_sums, "FEW_ROWS", few_rows)
    monkeypatch.setattr(launch, "MOST_BEHIND", most_behind)
    judge = Judge()

    @settings(max_examples=20)
    @given(vocab=st.sampled_from((1023, 1025, 4096, 4099, 9001, 20011)), **batches)
    def agree(vocab: int, **shape: object) -> None:
        batch = Batch.of(vocab=vocab, **shape)
        expected = batch.tokens(Backend.TORCH).tolist()
        judge.compare(batch, expected, batch.tokens(Backend.TRITON))

    agree()
    assert judge.rows["all"] > 30
    judge.check()
