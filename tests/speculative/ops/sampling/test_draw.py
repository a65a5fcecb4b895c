"""Draws: the story equals torch equals Triton, for options, rows and shapes of every kind."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.sampling import Role
from tests.kernels.top_k.rows import DTYPES
from tests.speculative.ops.on_device import INDEX_DTYPES
from tests.speculative.ops.sampling.cases import Batch

RARE = 1e-3
"""Of all rows, those that rounding may decide."""

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


class Judge:
    """Counts the rows that differ; each must hang on rounding, and they must be rare."""

    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()

    def compare(self, batch: Batch, expected: list[int], tokens: torch.Tensor) -> None:
        assert tokens.dtype == torch.int32
        assert tokens.shape == batch.logits.shape[:1]
        differs = [
            i for i, (a, b) in enumerate(zip(expected, tokens.tolist(), strict=True)) if a != b
        ]
        self.rows["all"] += len(expected)
        self.rows["differ"] += len(differs)
        if differs:
            hangs = batch.undecided().tolist()
            told = [(i, expected[i], int(tokens[i]), batch.drawn()[i]) for i in differs]
            assert all(hangs[i] for i in differs), (told, batch.options)

    def check(self) -> None:
        assert self.rows["differ"] <= max(1, RARE * self.rows["all"]), self.rows


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


def test_torch_and_triton_agree_over_many_chunks() -> None:
    """Where chunks are left out, and where candidates are more than are counted."""
    judge = Judge()

    @settings(max_examples=40)
    @given(vocab=st.sampled_from((1023, 1025, 4096, 4099, 9001, 20011)), **batches)
    def agree(vocab: int, **shape: object) -> None:
        batch = Batch.of(vocab=vocab, **shape)
        expected = batch.tokens(Backend.TORCH).tolist()
        judge.compare(batch, expected, batch.tokens(Backend.TRITON))

    agree()
    assert judge.rows["all"] > 60
    judge.check()
