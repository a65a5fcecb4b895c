"""Pieces of the vocabulary, and what every one of them reduces to."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.top_k import relaxed_partials, top1_partials
from mtp_plugin.kernels.top_k.launch import BLOCK, MAX_PIECES, split
from tests.doors import poisoned_memory
from tests.kernels.top_k.rows import DTYPES, VOCABS, best_ids, odd_rows, seams, strided, without_nan
from tests.speculative.ops.on_device import DEVICE

BIG = 300_000


@settings(max_examples=300)
@given(rows=st.integers(0, 5000), vocab=st.integers(1, BIG), heavy=st.booleans())
@example(rows=1, vocab=129280, heavy=False)
@example(rows=1, vocab=151935, heavy=True)
@example(rows=16, vocab=BLOCK * MAX_PIECES + 1, heavy=True)
@example(rows=64, vocab=2**21 + 1, heavy=False)
def test_pieces_cover_the_vocabulary_once(rows: int, vocab: int, heavy: bool) -> None:
    piece, pieces, block = split(rows, vocab, heavy=heavy)
    bounds = [(part * piece, min((part + 1) * piece, vocab)) for part in range(pieces)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == vocab
    assert all(first < end for first, end in bounds)  # no program without work
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    assert 1 <= pieces <= MAX_PIECES
    # a block is a power of two that wastes less than half of a small vocabulary
    assert block & (block - 1) == 0
    assert block <= BLOCK
    assert piece % block == 0
    assert block >= min(vocab, BLOCK)
    assert split(rows, vocab, heavy=heavy) == (piece, pieces, block)


def test_few_rows_are_cut_finer() -> None:
    for heavy in (False, True):
        pieces = [split(rows, 129280, heavy=heavy)[1] for rows in (1, 16, 17, 64, 65, 1024)]
        assert pieces == sorted(pieces, reverse=True)
        assert pieces[0] > pieces[-1] > 1


def bounds_of(rows: int, vocab: int, heavy: bool) -> list[slice]:
    piece, pieces, _ = split(rows, vocab, heavy=heavy)
    return [slice(part * piece, min((part + 1) * piece, vocab)) for part in range(pieces)]


def test_the_cases_below_are_cut_between_planted_ties() -> None:
    """Else nothing that follows would see a merge."""
    for rows, heavy in ((3, False), (3, True), (40, False), (40, True)):
        cut = bounds_of(rows, VOCABS[-1], heavy)[0].stop
        assert {cut - 1, cut} <= set(seams(rows, VOCABS[-1]))


@settings(max_examples=15)
@given(
    rows=st.integers(0, 6),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    behind=st.integers(0, 3),
    smooth=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_top1_of_every_piece(rows, vocab, dtype, behind, smooth, seed) -> None:
    dice = torch.Generator().manual_seed(seed)
    logits = strided(odd_rows(dice, rows, vocab, dtype, smooth=smooth), behind)
    with poisoned_memory():
        partials = top1_partials(logits)
    bounds = bounds_of(rows, vocab, heavy=False)
    assert partials.num_pieces == len(bounds)
    for part, piece in enumerate(bounds):
        top = without_nan(logits[:, piece]).float().amax(dim=1)
        assert torch.equal(partials.values[:, part], top)
        assert torch.equal(partials.ids[:, part], (best_ids(logits[:, piece]) + piece.start).int())


@settings(max_examples=15)
@given(
    num_contexts=st.integers(0, 2),
    num_generations=st.integers(0, 2),
    k=st.integers(1, 4),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    begins=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_weights_and_ranks_of_every_piece(
    num_contexts, num_generations, k, vocab, dtype, begins, seed
) -> None:
    """Of drafted rows whose request thinks or may begin to; the others have a top-1 alone."""
    dice = torch.Generator().manual_seed(seed)
    rows = num_contexts + num_generations * (k + 1)
    logits = strided(odd_rows(dice, rows, vocab, dtype, smooth=True), 2)
    drafts = torch.randint(-1, vocab + 1, (num_generations, k), generator=dice)
    requests = num_contexts + num_generations
    thinking = torch.rand(requests, generator=dice) < 0.6
    begin = vocab + 7
    if begins and num_generations:
        drafts[0, -1] = begin
    with poisoned_memory():
        partials = relaxed_partials(
            logits, drafts.reshape(-1).to(DEVICE), thinking.to(DEVICE), num_contexts, k + 1, begin
        )
    judged = thinking[num_contexts:] | (drafts == begin).any(dim=1)
    usable = without_nan(logits).float().cpu()
    all_ids = torch.arange(vocab)
    for part, piece in enumerate(bounds_of(rows, vocab, heavy=True)):
        values = usable[:, piece]
        assert torch.equal(partials.values[:, part].cpu(), values.amax(dim=1))
        assert torch.equal(partials.ids[:, part].cpu(), (best_ids(values) + piece.start).int())
        for g in range(num_generations):
            for i in range(k if judged[g] else 0):
                row, draft = num_contexts + g * (k + 1) + i, int(drafts[g, i])
                value = usable[row, draft] if 0 <= draft < vocab else torch.tensor(-torch.inf)
                ahead = (values[row] > value) | ((values[row] == value) & (all_ids[piece] < draft))
                assert int(partials.ahead[row, part]) == int(ahead.sum())
                alive = values[row][values[row] > -torch.inf].double()
                relative = (
                    torch.where(alive == alive.max(), 0.0, alive - alive.max()).exp()
                    if len(alive)
                    else alive
                )
                torch.testing.assert_close(
                    float(partials.weights[row, part]), float(relative.sum()), rtol=1e-5, atol=0
                )


def test_rows_must_be_contiguous() -> None:
    columns = torch.zeros(4, 6, device=DEVICE).t()
    with pytest.raises(TensorContractError, match="contiguous rows"):
        top1_partials(columns)
    with pytest.raises(TensorContractError, match="contiguous rows"):
        relaxed_partials(columns, columns, columns, 6, 1, -1)
    with pytest.raises(TensorContractError, match=r"shape \[4\]"):
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
    for part, piece in enumerate(bounds_of(rows, vocab, heavy=False)):
        assert torch.equal(partials.values[:, part], logits[:, piece].float().amax(dim=1))
        assert torch.equal(partials.ids[:, part], (best_ids(logits[:, piece]) + piece.start).int())
