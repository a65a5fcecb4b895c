"""Drafts of logits: story, torch and kernels; whatever no pass may touch stays as it is."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.kernels.top_k.launch import split
from mtp_plugin.speculative.ops.draft import draft_argmax, launch, propose
from mtp_plugin.speculative.step import DraftOutput
from tests.doors import check_strided_arguments, poisoned_memory
from tests.kernels.top_k.launches import captured
from tests.kernels.top_k.rows import DTYPES, VOCABS, best_ids, odd_rows, strided
from tests.speculative.ops.bits import same_bits
from tests.speculative.ops.draft import story
from tests.speculative.ops.draft.loop import Loop, real_logits
from tests.speculative.ops.on_device import (
    DEVICE,
    forbid_launches,
    poisoned,
    read_back_forbidden,
    vector,
)

both = pytest.mark.parametrize("backend", Backend)


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
    column = random.Random(seed).randrange(k)
    # what is told
    drafts = vector([story.proposal(row) for row in logits.double().tolist()], torch.int32)
    told = Loop.of(seed, requests, k)
    told.drafts[:requests, column] = drafts
    told.following[:requests, column + 2] = drafts
    if shift:
        told.shifted[told.last_rows + column + 1] = drafts
    if advance:
        told.positions[:requests] += 1
        if max_position is not None:
            told.positions[:requests].clamp_max_(max_position)
        told.kv_lens[:requests] += int(kv)
    for backend in Backend:
        loop = Loop.of(seed, requests, k)
        with poisoned_memory():
            place = loop.column(column, shift, advance, kv, max_position)
            propose(logits, place, backend=backend)
        loop.assert_same(told)
    assert same_bits(logits, before)


@settings(max_examples=25)
@given(
    rows=st.integers(0, 5),
    vocab=st.sampled_from(VOCABS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_draft_argmax(rows, vocab, dtype, seed) -> None:
    logits = strided(odd_rows(torch.Generator().manual_seed(seed), rows, vocab, dtype), 1)
    before = logits.clone()
    told = vector([story.proposal(row) for row in logits.double().tolist()], torch.int32)
    for backend in Backend:
        with poisoned_memory():
            drafts = draft_argmax(logits, backend=backend)
        assert same_bits(drafts, told)
    assert same_bits(logits, before)


@both
@pytest.mark.parametrize(
    ("row", "draft"),
    [([1.0, 3.0, 3.0], 1), ([math.nan, -math.inf, -1.0], 2), ([math.nan, math.nan], 0)],
    ids=["tie", "nan", "nothing"],
)
def test_odd_rows(backend: Backend, row: list[float], draft: int) -> None:
    assert story.proposal(row) == draft
    assert draft_argmax(torch.tensor([row], device=DEVICE), backend=backend).tolist() == [draft]


@both
def test_a_whole_loop_moves_every_window_on(backend: Backend) -> None:
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
        propose(logits, loop.column(column, True, True, True), backend=backend)
        drafts = [story.proposal(row) for row in logits.tolist()]
        sequences = story.move_on(sequences, drafts)
        window = loop.shifted[column + 1 : column + 1 + len(flat)]
        assert window.tolist() == [token for tokens in sequences for token in tokens]


@both
def test_ties_across_pieces_go_to_the_lowest_id(backend: Backend) -> None:
    vocab = 4999
    piece, pieces, _ = split(4, vocab)
    assert pieces > 2
    logits = torch.zeros(4, vocab, device=DEVICE)
    lows = [piece - 1, piece, 2 * piece, vocab - 1]
    for row, low in enumerate(lows):
        logits[row, [low, min(low + 1, vocab - 1), vocab - 1]] = 1.0
    assert draft_argmax(logits, backend=backend).tolist() == lows


@both
def test_strided_arguments(backend: Backend) -> None:
    logits = odd_rows(torch.Generator().manual_seed(2), 3, 9, torch.float32).to(DEVICE)
    refused = {"logits": "logits: expected floats [R, V], V >= 1, with contiguous rows"}
    check_strided_arguments(draft_argmax, {"logits": logits}, refused=refused, backend=backend)
    place = replace(
        Loop.of(2, 3, 2).column(0, True, True, True, 30),
        drafts=poisoned(3, 2, dtype=torch.int32),
        next_tokens=poisoned(3, 3, dtype=torch.int32),
        vocab_ids=vector(range(3, 12), torch.int32),
    )
    refused |= {
        "place.drafts": "drafts: expected torch.int32 [3, > 0] with contiguous rows",
        "place.next_tokens": "next_tokens: expected torch.int32 [3, > 1] with contiguous rows",
        "place.shifted_ids": "shifted_ids: expected a contiguous vector of integers",
        "place.positions": "positions: expected a contiguous vector of integers [3]",
        "place.kv_lens": "kv_lens: expected a contiguous vector of integers [>= 3]",
        "place.vocab_ids": "vocab_ids: expected a contiguous vector",
    }
    arguments = {"logits": logits, "place": place}
    check_strided_arguments(propose, arguments, refused=refused, backend=backend)


def narrower(place: DraftOutput, name: str) -> DraftOutput:
    return replace(place, **{name: getattr(place, name)[:-1]})


def other(place: DraftOutput, name: str, dtype: torch.dtype) -> DraftOutput:
    return replace(place, **{name: getattr(place, name).to(dtype)})


@both
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda place: narrower(place, "drafts"), r"drafts: .* \[2, > 0\] .* got .* \[1, 3\]"),
        (lambda place: narrower(place, "next_tokens"), r"next_tokens: .* \[2, > 1\]"),
        (lambda place: replace(place, column=3), r"drafts: .* \[2, > 3\] .* got .* \[2, 3\]"),
        (lambda place: replace(place, column=-1), r"drafts: .* \[2, > -1\]"),
        (lambda place: narrower(place, "positions"), r"positions: .* \[2\], got .* \[1\]"),
        (
            lambda place: replace(place, positions=vector([1, 2, 3])),
            r"positions: .* \[2\], got .* \[3\]",
        ),
        (lambda place: narrower(place, "kv_lens"), r"kv_lens: .* \[>= 2\], got .* \[1\]"),
        (lambda place: narrower(place, "last_rows"), r"last_rows: expected \[2\] .* got \[1\]"),
        (lambda place: replace(place, last_rows=None), r"last_rows: expected \[2\] .* got None"),
        (lambda place: replace(place, shifted_ids=place.shifted_ids[:0]), "shifted_ids: expected"),
        (
            lambda place: other(place, "drafts", torch.int8),
            "drafts: expected torch.int32 .* got torch.int8",
        ),
        (lambda place: other(place, "next_tokens", torch.int64), "next_tokens: .* got torch.int64"),
        (lambda place: other(place, "positions", torch.float32), "positions: .* got torch.float"),
    ],
)
def test_places_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
    backend: Backend,
    change: Callable[[DraftOutput], DraftOutput],
    message: str,
) -> None:
    """Refused before anything runs or is written."""
    forbid_launches(monkeypatch, launch)
    loop = Loop.of(3, 2, 3)
    before = copy.deepcopy(loop)
    place = change(loop.column(0, True, True, True))
    with pytest.raises(TensorContractError, match=message):
        propose(torch.zeros(2, 5, device=DEVICE), place, backend=backend)
    loop.assert_same(before)


@both
@pytest.mark.parametrize(
    "logits",
    [torch.zeros(5), torch.zeros(2, 0), torch.zeros(2, 5).int(), torch.zeros(5, 2).T],
    ids=["vector", "no columns", "integers", "columns for rows"],
)
def test_logits_that_do_not_fit(backend: Backend, logits: torch.Tensor) -> None:
    place = Loop.of(3, 2, 1).column(0)
    with pytest.raises(TensorContractError, match="logits: expected floats"):
        propose(logits.to(DEVICE), place, backend=backend)
    with pytest.raises(TensorContractError, match="logits: expected floats"):
        draft_argmax(logits.to(DEVICE), backend=backend)


REAL = [(1, 7, 129280), (17, 1, 151935), (64, 3, 129280), (256, 3, 151935), (1024, 3, 151935)]


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "k", "vocab"), REAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_shapes(requests: int, k: int, vocab: int, dtype: torch.dtype) -> None:
    logits = real_logits(requests, vocab, 1, dtype)
    mine = Loop.of(1, requests, k)
    theirs = copy.deepcopy(mine)
    for column in range(k):
        with poisoned_memory():
            place = mine.column(column, True, True, True, 40)
            propose(logits, place, backend=Backend.TRITON)
        place = theirs.column(column, True, True, True, 40)
        propose(logits, place, backend=Backend.TORCH)
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
    assert torch.equal(draft_argmax(far, backend=Backend.TRITON), best_ids(near).int())


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "k", "vocab"), REAL[:4])
def test_in_a_cuda_graph(requests: int, k: int, vocab: int) -> None:
    """All depths in one graph, replayed over other logits and other loops."""
    logits = [real_logits(requests, vocab, depth, torch.bfloat16) for depth in range(k)]
    loop = Loop.of(1, requests, k)

    def step() -> None:
        for column in range(k):
            place = loop.column(column, True, True, True, 55)
            propose(logits[column], place, backend=Backend.TRITON)

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
            place = fresh.column(column, True, True, True, 55)
            propose(logits[column], place, backend=Backend.TORCH)
        loop.assert_same(fresh)
    with read_back_forbidden():
        step()
