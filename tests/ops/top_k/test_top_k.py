"""Pieces of the vocabulary, and what every one of them reduces to."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.top1 import MAX_BLOCKS, TILE, split, top1_partials
from tests.ops.on_device import DEVICE

BIG = 300_000


@settings(max_examples=120)
@given(rows=st.integers(0, 5000), vocab=st.integers(1, BIG), heavy=st.booleans())
@example(rows=1, vocab=129280, heavy=False)
@example(rows=1, vocab=151935, heavy=True)
@example(rows=16, vocab=TILE * MAX_BLOCKS + 1, heavy=True)
@example(rows=64, vocab=2**21 + 1, heavy=False)
def test_blocks_cover_the_vocabulary_once(rows: int, vocab: int, heavy: bool) -> None:
    block_len, num_blocks, tile = split(rows, vocab, heavy=heavy)
    bounds = [(part * block_len, min((part + 1) * block_len, vocab)) for part in range(num_blocks)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == vocab
    assert all(first < end for first, end in bounds)  # no program without work
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    assert 1 <= num_blocks <= MAX_BLOCKS
    # a tile is a power of two that wastes less than half of a small vocabulary
    assert tile & (tile - 1) == 0
    assert tile <= TILE
    assert block_len % tile == 0
    assert tile >= min(vocab, TILE)
    assert split(rows, vocab, heavy=heavy) == (block_len, num_blocks, tile)


def test_rows_must_be_contiguous() -> None:
    columns = torch.zeros(4, 6, device=DEVICE).t()
    with pytest.raises(TensorContractError, match="row-contiguous"):
        top1_partials(columns)
    with pytest.raises(TensorContractError, match=r"got .*\[4\]"):
        top1_partials(torch.zeros(4, device=DEVICE))
