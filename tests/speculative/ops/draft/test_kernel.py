"""The kernels against the reference and the story; whatever no pass may touch stays as it is."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.kernels.top_k import launch as reduce_launch
from mtp_plugin.kernels.top_k.launch import split
from mtp_plugin.speculative.ops.draft import launch, reference
from mtp_plugin.speculative.step import DraftColumn
from tests.kernels.top_k.launches import captured, poisoned_outputs
from tests.kernels.top_k.rows import DTYPES, VOCABS, best_ids, odd_rows, strided
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.draft import story
from tests.speculative.ops.on_device import DEVICE, poisoned, read_back_forbidden


@dataclass
class Loop:
    """The buffers of a draft loop with room around everything, so that stray writes are seen."""

    drafts: torch.Tensor  # [R + 1, K + 1]
    following: torch.Tensor  # [R + 1, K + 3], the column is one further on
    shifted: torch.Tensor
    last_rows: torch.Tensor
    positions: torch.Tensor  # [R + 1]
    kv_lens: torch.Tensor  # [R + 1]

    @classmethod
    def of(cls, seed: int, requests: int, k: int) -> Loop:
        r = random.Random(seed)
        lens = [r.randint(1, 4) for _ in range(requests)]
        numbers = [r.randint(0, 60) for _ in range(requests + 1)]
        return cls(
            poisoned(requests + 1, k + 1, dtype=torch.int32),
            poisoned(requests + 1, k + 3, dtype=torch.int32),
            poisoned(sum(lens) + k, dtype=torch.int32),
            torch.tensor(lens, dtype=torch.int64).cumsum(0).sub(1).to(DEVICE),
            torch.tensor(numbers, device=DEVICE),
            torch.tensor(numbers, dtype=torch.int32, device=DEVICE) + 9,
        )

    def column(
        self, column: int, shift: bool, advance: bool, kv: bool, max_position: int | None
    ) -> DraftColumn:
        requests = self.last_rows.shape[0]
        return DraftColumn(
            self.drafts[:requests, :-1],
            self.following[:requests, 1:-1],
            column,
            self.shifted if shift else None,
            self.last_rows if shift else None,
            self.positions[:requests] if advance else None,
            self.kv_lens[:requests] if advance and kv else None,
            max_position,
        )

    def assert_same(self, other: Loop) -> None:
        for field in fields(self):
            assert same_bits(getattr(self, field.name), getattr(other, field.name)), field.name


@settings(max_examples=40)
@given(
    requests=st.integers(0, 5),
    k=st.integers(1, 7),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    behind=st.integers(0, 2),
    shift=st.booleans(),
    advance=st.booleans(),
    kv=st.booleans(),
    max_position=st.sampled_from([None, 30]),
    seed=st.integers(0, 2**31),
)
def test_a_draft_goes_to_every_reader_and_nowhere_else(
    requests, k, vocab, dtype, behind, shift, advance, kv, max_position, seed
) -> None:
    dice = torch.Generator().manual_seed(seed)
    logits = strided(odd_rows(dice, requests, vocab, dtype), behind)
    before = logits.clone()
    mine = Loop.of(seed, requests, k)
    theirs, start = copy.deepcopy(mine), copy.deepcopy(mine)
    column = random.Random(seed).randrange(k)
    options = (column, shift, advance, kv, max_position)
    with poisoned_outputs(launch, reduce_launch):
        launch.propose(logits, mine.column(*options))
    reference.propose(logits, theirs.column(*options))
    mine.assert_same(theirs)
    # and what the reference says is what is told
    told = [story.proposal(row) for row in logits.double().tolist()]
    assert mine.drafts[:requests, column].tolist() == told
    assert mine.following[:requests, column + 2].tolist() == told
    if shift:
        assert mine.shifted[mine.last_rows + column + 1].tolist() == told
    if advance:
        moved = start.positions[:requests] + 1
        moved = moved if max_position is None else moved.clamp_max(max_position)
        assert torch.equal(mine.positions[:requests], moved)
        grown = start.kv_lens[:requests] + int(kv)
        assert torch.equal(mine.kv_lens[:requests], grown)
    assert same_bits(logits, before)


@settings(max_examples=15)
@given(
    rows=st.integers(0, 5),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_draft_argmax(rows, vocab, dtype, seed) -> None:
    logits = strided(odd_rows(torch.Generator().manual_seed(seed), rows, vocab, dtype), 1)
    with poisoned_outputs(launch, reduce_launch):
        drafts = launch.draft_argmax(logits)
    assert same_bits(drafts, reference.draft_argmax(logits))
    assert drafts.tolist() == [story.proposal(row) for row in logits.double().tolist()]


def test_a_whole_loop_moves_every_window_on() -> None:
    """Depth after depth reads its window one place further on, as the story moves sequences."""
    k, vocab, dice, r = 4, 2049, torch.Generator().manual_seed(5), random.Random(5)
    sequences = [[r.randrange(vocab) for _ in range(n)] for n in (3, 1, 2)]
    flat = [token for tokens in sequences for token in tokens]
    loop = Loop.of(0, 3, k)
    loop.last_rows = torch.tensor([2, 3, 5], device=DEVICE)
    loop.shifted = poisoned(len(flat) + k, dtype=torch.int32)
    loop.shifted[: len(flat)] = torch.tensor(flat, dtype=torch.int32)
    for column in range(k):
        logits = odd_rows(dice, 3, vocab, torch.float32).to(DEVICE)
        launch.propose(logits, loop.column(column, True, True, True, None))
        drafts = [story.proposal(row) for row in logits.tolist()]
        sequences = story.move_on(sequences, drafts)
        window = loop.shifted[column + 1 : column + 1 + len(flat)]
        assert window.tolist() == [token for tokens in sequences for token in tokens]


def test_ties_across_pieces_go_to_the_lowest_id() -> None:
    vocab = 4999
    piece, pieces, _ = split(4, vocab)
    assert pieces > 2
    logits = torch.zeros(4, vocab, device=DEVICE)
    lows = [piece - 1, piece, 2 * piece, vocab - 1]
    for row, low in enumerate(lows):
        logits[row, [low, min(low + 1, vocab - 1), vocab - 1]] = 1.0
    assert launch.draft_argmax(logits).tolist() == lows


REAL = [(1, 7, 129280), (17, 1, 151935), (64, 3, 129280), (256, 3, 151935), (1024, 3, 151935)]


def real_logits(rows: int, vocab: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    dice = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=dice).to(DEVICE, dtype)
    logits[3::17] = torch.nan
    logits[5::7, ::2] = -torch.inf
    logits[6::7, 11::5003] = torch.inf
    return logits


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "k", "vocab"), REAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_shapes(requests: int, k: int, vocab: int, dtype: torch.dtype) -> None:
    logits = real_logits(requests, vocab, 1, dtype)
    mine = Loop.of(1, requests, k)
    theirs = copy.deepcopy(mine)
    for column in range(k):
        with poisoned_outputs(launch, reduce_launch):
            launch.propose(logits, mine.column(column, True, True, True, 40))
        reference.propose(logits, theirs.column(column, True, True, True, 40))
        mine.assert_same(theirs)
    assert torch.equal(mine.drafts[:requests, 0], best_ids(logits).int())


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device_memory: Callable[[int], None]) -> None:
    stride, rows, vocab = 2**29 + 24, 6, 151935
    device_memory(12)
    near = real_logits(rows, vocab, 3, torch.bfloat16)
    buffer = torch.empty(rows * stride, dtype=torch.bfloat16, device=DEVICE)
    far = buffer.as_strided((rows, vocab), (stride, 1))
    far.copy_(near)
    assert (rows - 1) * stride > 2**31
    assert torch.equal(launch.draft_argmax(far), best_ids(near).int())


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "k", "vocab"), REAL[:4])
def test_in_a_cuda_graph(requests: int, k: int, vocab: int) -> None:
    """All depths in one graph, replayed over other logits and other loops."""
    logits = [real_logits(requests, vocab, depth, torch.bfloat16) for depth in range(k)]
    loop = Loop.of(1, requests, k)

    def step() -> None:
        for column in range(k):
            launch.propose(logits[column], loop.column(column, True, True, True, 55))

    graph, _ = captured(step)
    for seed in (10, 20):
        fresh = Loop.of(1, requests, k)  # the same rows, other positions
        fresh.positions += seed
        fresh.kv_lens += seed
        for depth in range(k):
            logits[depth].copy_(real_logits(requests, vocab, seed + depth, torch.bfloat16))
        for field in fields(loop):
            getattr(loop, field.name).copy_(getattr(fresh, field.name))
        graph.replay()
        torch.cuda.synchronize()
        for column in range(k):
            reference.propose(logits[column], fresh.column(column, True, True, True, 55))
        loop.assert_same(fresh)
    with read_back_forbidden():
        step()
