"""Pieces of the vocabulary, and what every one of them reduces to."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.top1 import MAX_BLOCKS, TILE, split, top1_partials
from tests.op_arguments import poisoned_memory
from tests.ops.on_device import DEVICE
from tests.ops.top_k.rows import (
    DTYPES,
    VOCABS,
    best_ids,
    bounds_of,
    odd_rows,
    seams,
    strided,
    without_nan,
)

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


def test_few_rows_are_cut_finer() -> None:
    for heavy in (False, True):
        blocks = [split(rows, 129280, heavy=heavy)[1] for rows in (1, 16, 17, 64, 65, 1024)]
        assert blocks == sorted(blocks, reverse=True)
        assert blocks[0] > blocks[-1] > 1


def test_the_cases_below_are_cut_between_planted_ties() -> None:
    """Else nothing that follows would see a merge."""
    for rows, heavy in ((3, False), (3, True), (40, False), (40, True)):
        cut = bounds_of(rows, VOCABS[-1], heavy)[0].stop
        assert {cut - 1, cut} <= set(seams(rows, VOCABS[-1]))


@settings(max_examples=6)
@given(
    rows=st.integers(0, 6),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    spare=st.integers(0, 3),
    smooth=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_top1_of_every_block(rows, vocab, dtype, spare, smooth, seed) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = strided(odd_rows(rng, rows, vocab, dtype, smooth=smooth), spare)
    with poisoned_memory():
        partials = top1_partials(logits)
    bounds = bounds_of(rows, vocab, heavy=False)
    assert partials.num_blocks == len(bounds)
    for part, block in enumerate(bounds):
        top = without_nan(logits[:, block]).float().amax(dim=1)
        assert torch.equal(partials.values[:, part], top)
        assert torch.equal(partials.ids[:, part], (best_ids(logits[:, block]) + block.start).int())


def test_rows_must_be_contiguous() -> None:
    columns = torch.zeros(4, 6, device=DEVICE).t()
    with pytest.raises(TensorContractError, match="row-contiguous"):
        top1_partials(columns)
    with pytest.raises(TensorContractError, match=r"got .*\[4\]"):
        top1_partials(torch.zeros(4, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [129280, 151935])
@pytest.mark.parametrize("rows", [4, 17, 65, 1024])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_rows(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(rows, vocab, device=DEVICE).to(dtype)
    for seam in seams(rows, vocab)[::7]:
        logits[seam % rows, seam] = torch.inf
    with poisoned_memory():
        partials = top1_partials(logits)
    for part, block in enumerate(bounds_of(rows, vocab, heavy=False)):
        assert torch.equal(partials.values[:, part], logits[:, block].float().amax(dim=1))
        assert torch.equal(partials.ids[:, part], (best_ids(logits[:, block]) + block.start).int())
