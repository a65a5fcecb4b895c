"""Drafts of a reduced vocabulary: example over whole rows, both backends over reduced ones."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.draft import propose
from tests.op_arguments import poisoned_memory
from tests.ops.bits import same_bits
from tests.ops.draft import example
from tests.ops.draft.loop import Loop, real_logits
from tests.ops.on_device import DEVICE, vector
from tests.ops.top_k.launches import captured
from tests.ops.top_k.rows import DTYPES, VOCABS, best_ids, odd_rows, strided, without_nan

both = pytest.mark.parametrize("backend", Backend)


def some_ids(vocab: int, count: int, seed: int) -> list[int]:
    return sorted(random.Random(seed).sample(range(vocab), count))


def int32(ids: list[int]) -> torch.Tensor:
    return vector(ids, torch.int32)


@settings(max_examples=16)
@given(
    requests=st.integers(0, 5),
    k=st.integers(1, 5),
    vocab=st.sampled_from(VOCABS),
    share=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    gap=st.integers(0, 2),
    shift=st.booleans(),
    advance=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_draft_is_the_id_of_its_column(
    requests, k, vocab, share, dtype, gap, shift, advance, seed
) -> None:
    ids = some_ids(vocab, max(1, round(share * vocab)), seed)
    whole = odd_rows(torch.Generator().manual_seed(seed), requests, vocab, dtype)
    logits = strided(whole[:, ids], gap)
    mine = Loop.of(seed, requests, k)
    theirs = copy.deepcopy(mine)
    column = random.Random(seed).randrange(k)
    vocab_ids = int32(ids)
    for loop, backend in ((mine, Backend.TRITON), (theirs, Backend.TORCH)):
        output = replace(loop.column(column, shift, advance, True, 30), vocab_ids=vocab_ids)
        with poisoned_memory():
            propose(logits, output, backend=backend)
    mine.assert_same(theirs)
    expected = [example.proposal_among(ids, row) for row in whole.double().tolist()]
    assert mine.drafts[:requests, column].tolist() == expected
    assert mine.following[:requests, column + 2].tolist() == expected
    if shift:
        assert mine.shifted[mine.last_rows + column + 1].tolist() == expected
    assert vocab_ids.tolist() == ids


@both
@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("columns", [9, 2], ids=["whole head", "narrow head"])
def test_heads_of_other_sizes_are_refused(backend: Backend, columns: int, rows: int) -> None:
    output = replace(Loop.of(0, rows, 1).column(0), vocab_ids=int32([1, 4, 6]))
    message = rf"logits: expected \[R, 3\], a column per id .*, got \[{rows}, {columns}\]"
    with pytest.raises(TensorContractError, match=message):
        propose(torch.zeros(rows, columns, device=DEVICE), output, backend=backend)


REAL = [(1, 7, 129280, 32768), (64, 3, 151935, 16001), (256, 1, 151935, 50000)]


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "k", "vocab", "count"), REAL)
def test_in_a_cuda_graph(requests: int, k: int, vocab: int, count: int) -> None:
    """All depths in one graph, replayed over other logits and another list of as many ids."""
    ids, others = (int32(some_ids(vocab, count, seed)) for seed in (1, 2))
    whole = [real_logits(requests, vocab, depth, torch.bfloat16) for depth in range(k)]
    logits = [each[:, ids.long()] for each in whole]
    loop = Loop.of(1, requests, k)
    fresh = copy.deepcopy(loop)

    def step() -> None:
        for column in range(k):
            output = replace(loop.column(column, True), vocab_ids=ids)
            propose(logits[column], output, backend=Backend.TRITON)

    graph, _ = captured(step)
    ids.copy_(others)
    for column, each in enumerate(whole):
        logits[column].copy_(each[:, others.long()])
    graph.replay()
    torch.cuda.synchronize()
    for column in range(k):
        output = replace(fresh.column(column, True), vocab_ids=ids)
        propose(logits[column], output, backend=Backend.TORCH)
        # of the whole row, all but the ids left out
        among = torch.full_like(whole[column], -torch.inf).index_copy(
            1, ids.long(), without_nan(whole[column])[:, ids.long()]
        )
        best = best_ids(among).int()
        best = torch.where(among.amax(dim=1) > -torch.inf, best, ids[0])
        assert same_bits(fresh.drafts[:requests, column], best)
    loop.assert_same(fresh)
