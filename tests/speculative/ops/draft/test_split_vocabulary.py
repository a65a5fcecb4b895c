"""Drafts of a vocabulary that is split over ranks are those of the whole one."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.draft import draft_argmax, local_top1, merge_top1
from tests.doors import check_strided_arguments, poisoned_memory
from tests.kernels.top_k.launches import captured
from tests.kernels.top_k.rows import DTYPES, VOCABS, odd_rows, strided
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.draft import story
from tests.speculative.ops.draft.loop import real_logits
from tests.speculative.ops.on_device import DEVICE, vector

VALUES = [-math.inf, math.nan, math.inf, -1.0, 0.0, 0.0, 1.0, 1.0, 2.0]
both = pytest.mark.parametrize("backend", Backend)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@given(vocab=st.integers(1, 12), rows=st.integers(0, 4), seed=st.integers(0, 2**32))
def test_r37_a_split_vocabulary_drafts_as_a_whole_one(
    ranks: int, vocab: int, rows: int, seed: int
) -> None:
    """R37: equal maxima on two ranks go to the lowest global id, padding columns to nobody."""
    dice = random.Random(seed)
    table = [[dice.choice(VALUES) for _ in range(vocab)] for _ in range(rows)]
    share = -(-vocab // ranks)
    whole = torch.tensor(table).reshape(rows, vocab)
    for backend in Backend:
        pairs = []
        for rank in range(ranks):
            first = min(rank * share, vocab)
            real = min(share, vocab - first)
            columns = torch.full((rows, share), 1e9)  # padding that would win if it counted
            columns[:, :real] = whole[:, first : first + real]
            pairs.append(local_top1(columns.to(DEVICE), first, real, backend=backend))
        values = torch.stack([value for value, _ in pairs])
        ids = torch.stack([token for _, token in pairs])
        drafts = merge_top1(values, ids, backend=backend)
        told = vector([story.proposal(row) for row in table], torch.int32)
        assert same_bits(drafts, told)


@settings(max_examples=15)
@given(
    rows=st.integers(0, 5),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
@example(rows=5, vocab=4999, dtype=torch.float32, seed=1)  # cut into pieces
def test_every_result_is_written(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> None:
    logits = strided(odd_rows(torch.Generator().manual_seed(seed), rows, vocab, dtype), 2)
    columns = vocab - 1  # the last one is padding
    table = logits[:, :columns].double().tolist()
    best = [story.proposal(row) if columns else 0 for row in table]
    tops = [row[i] if columns else -math.inf for row, i in zip(table, best, strict=True)]
    tops = [-math.inf if math.isnan(value) else value for value in tops]
    for backend in Backend:
        with poisoned_memory():
            values, ids = local_top1(logits, 7, columns, backend=backend)
        assert same_bits(values, vector(tops, torch.float32))
        assert same_bits(ids, vector([7 + i for i in best], torch.int32))
        gathered = torch.stack([values, values]), torch.stack([ids + 3, ids])
        with poisoned_memory():
            merged = merge_top1(*gathered, backend=backend)
        assert same_bits(merged, ids)


@both
def test_strided_arguments(backend: Backend) -> None:
    logits = odd_rows(torch.Generator().manual_seed(2), 3, 9, torch.float32).to(DEVICE)
    check_strided_arguments(
        local_top1,
        {"logits": logits},
        refused={"logits": "logits: expected floats [R, V], V >= 0, with contiguous rows"},
        first_id=7,
        num_ids=8,
        backend=backend,
    )
    pairs = {
        "values": torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], device=DEVICE),
        "ids": vector([4, 9, 6, 7, 8, 5], torch.int32).view(2, 3),
    }
    assert merge_top1(**pairs, backend=backend).tolist() == [7, 8, 6]
    check_strided_arguments(merge_top1, pairs, backend=backend)


@both
def test_sizes_that_do_not_fit(backend: Backend) -> None:
    logits = torch.zeros(4, 9, device=DEVICE)
    for columns in (-1, 10):
        with pytest.raises(TensorContractError, match=rf"num_ids: expected 0..9, .*got {columns}"):
            local_top1(logits, 0, columns, backend=backend)
    with pytest.raises(TensorContractError, match="logits: expected floats"):
        local_top1(logits[0], 0, 9, backend=backend)
    values, ids = logits[:2], logits[:2].int()
    for bad in (values[0], values[:0], values.double()):
        with pytest.raises(TensorContractError, match=r"values: expected torch.float32 \[ranks, R"):
            merge_top1(bad, ids, backend=backend)
    for bad in (ids[:, :8], ids[:1], ids.long(), ids.to("meta")):
        with pytest.raises(TensorContractError, match=r"ids: expected torch.int32 \[2, 9\] on"):
            merge_top1(values, bad, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [(1, 129280), (64, 129280), (256, 151935)])
def test_in_a_cuda_graph(rows: int, vocab: int) -> None:
    """Two ranks' halves and their merge, replayed over other logits."""
    logits, other = (real_logits(rows, vocab, seed, torch.bfloat16) for seed in (1, 2))
    share = -(-vocab // 2)
    values = torch.empty(2, rows, device=DEVICE)
    ids = torch.empty(2, rows, dtype=torch.int32, device=DEVICE)

    def step() -> torch.Tensor:
        halves = (logits, 0, share), (logits[:, share:], share, vocab - share)
        for rank, half in enumerate(halves):
            best = local_top1(*half, backend=Backend.TRITON)
            values[rank].copy_(best[0])
            ids[rank].copy_(best[1])
        return merge_top1(values, ids, backend=Backend.TRITON)

    graph, merged = captured(step)
    logits.copy_(other)
    graph.replay()
    assert torch.equal(merged, draft_argmax(other, backend=Backend.TORCH))
