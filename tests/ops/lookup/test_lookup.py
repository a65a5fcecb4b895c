"""Prompt lookup: the example in plain Python, torch and Triton agree exactly."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.errors import TensorContractError
from mtp_plugin.ops import lookup_triton
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.lookup import look_up_drafts
from tests.op_arguments import check_arguments
from tests.ops.on_device import DEVICE, INDEX_DTYPES, forbid_launches
from tests.ops.top_k.launches import captured


def example(tokens: list[int], k: int, least: int, most: int) -> list[int]:
    for number in range(min(most, len(tokens)), least - 1, -1):
        for end in range(len(tokens) - 1, number - 1, -1):
            if tokens[end - number : end] == tokens[-number:]:
                following = tokens[end:]
                return [following[i % len(following)] for i in range(k)]
    return [-1] * k


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize(
    ("tokens", "least", "most", "drafts"),
    [
        ([5, 6, 7, 8, 5, 6], 2, 8, [7, 8, 5]),
        ([5, 6, 5, 6], 2, 8, [5, 6, 5]),
        ([1, 5, 6, 9, 5, 6, 8, 1, 5, 6], 2, 8, [9, 5, 6]),
        ([1, 5, 6, 9, 5, 6, 8, 1, 5, 6], 2, 2, [8, 1, 5]),
        ([4, 4, 4], 1, 8, [4, 4, 4]),
        ([5, 6, 7, 6], 2, 8, [-1, -1, -1]),
        ([5, 6, 7, 6], 1, 8, [7, 6, 7]),
        ([6], 1, 8, [-1, -1, -1]),
        ([], 1, 8, [-1, -1, -1]),
    ],
)
def test_longest_and_most_recent_match(tokens, least, most, drafts, backend) -> None:
    row = torch.tensor([tokens + [9] * (12 - len(tokens))], device=DEVICE)
    lengths = torch.tensor([len(tokens)], device=DEVICE)
    found = look_up_drafts(row, lengths, 3, min_match=least, max_match=most, backend=backend)
    assert found.dtype == torch.int32
    assert found.tolist() == [example(tokens, 3, least, most)] == [drafts]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    width=st.integers(0, 40),
    k=st.integers(0, 5),
    block=st.sampled_from((4, 16)),
    dtype=st.sampled_from(INDEX_DTYPES),
)
def test_example_torch_and_triton_agree(seed, width, k, block, dtype) -> None:
    """Blocks of few columns, so that matches lie in several; lengths outside 0..W are clamped."""
    rng = random.Random(seed)
    least = rng.randint(1, 3)
    most = least + rng.randint(0, 4)
    rows = [[rng.randrange(rng.choice((2, 4))) - 1 for _ in range(width)] for _ in range(5)]
    lengths = [rng.randint(-1, width + 2) for _ in rows]
    expected = [
        example(row[: max(length, 0)], k, least, most)
        for row, length in zip(rows, lengths, strict=True)
    ]
    tokens = torch.tensor(rows, dtype=dtype, device=DEVICE).view(5, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup_triton, "BLOCK", block)
        for backend in Backend:
            found = look_up_drafts(
                tokens,
                torch.tensor(lengths, dtype=dtype, device=DEVICE),
                k,
                min_match=least,
                max_match=most,
                backend=backend,
            )
            assert found.tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    width=st.integers(0, 40),
    pending=st.integers(0, 4),
    k=st.integers(1, 5),
    block=st.sampled_from((4, 16)),
    dtypes=st.tuples(*[st.sampled_from(INDEX_DTYPES)] * 3),
)
def test_chosen_rows_are_looked_up_with_the_drafts_that_follow_them(
    seed, width, pending, k, block, dtypes
) -> None:
    """Rows outside of 0..S-1 are clamped; a draft is compared and copied as any other token."""
    rng = random.Random(seed)
    least = rng.randint(1, 3)
    most = least + rng.randint(0, 4)
    texts = [[rng.randrange(3) for _ in range(width)] for _ in range(4)]
    lengths = [rng.randint(0, width) for _ in texts]
    rows = [rng.randint(-1, 4) for _ in range(6)]
    drafts = [[rng.randrange(3) for _ in range(pending)] for _ in rows]
    expected = []
    for row, following in zip(rows, drafts, strict=True):
        clamped = min(max(row, 0), 3)
        text = texts[clamped][: lengths[clamped]] + following
        expected.append(example(text, k, least, most))
    tokens = torch.tensor(texts, dtype=dtypes[0], device=DEVICE).view(4, width)
    given_drafts = torch.tensor(drafts, dtype=dtypes[1], device=DEVICE).view(6, pending)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup_triton, "BLOCK", block)
        for backend in Backend:
            found = look_up_drafts(
                tokens,
                torch.tensor(lengths, device=DEVICE),
                k,
                min_match=least,
                max_match=most,
                rows=torch.tensor(rows, dtype=dtypes[2], device=DEVICE),
                drafts=given_drafts,
                backend=backend,
            )
            assert found.tolist() == expected


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("counts", [None, [1, 0, 2, 1]])
def test_rows_with_a_match_are_kept_by_row(counts, backend) -> None:
    """A prompt that is not finished has none; a row that is not looked up keeps what it had."""
    tokens = torch.tensor([[1, 2, 3, 1, 2]] * 3 + [[1, 2, 3, 4, 5]] * 3, device=DEVICE)
    rows, lengths = [4, 0, 2, 3], torch.full((6,), 5, device=DEVICE)
    expected = [False, True, True, False, False, True]
    matches = torch.tensor([False, True, False, True, True, True], device=DEVICE)
    for row, count in zip(rows, counts or [1] * 4, strict=True):
        expected[row] = example(tokens[row].tolist(), 1, 2, 8) != [-1] and count > 0
    found = look_up_drafts(
        tokens,
        lengths,
        2,
        rows=torch.tensor(rows, device=DEVICE),
        matches=matches,
        num_sampled=None if counts is None else torch.tensor(counts, device=DEVICE),
        backend=backend,
    )
    assert matches.tolist() == expected
    assert found[1].tolist() == [3, 1]
    look_up_drafts(tokens, lengths, 2, matches=matches, backend=backend)
    assert matches.tolist() == [True] * 3 + [False] * 3
    look_up_drafts(tokens[:, :0], lengths, 2, rows=lengths[:1] - 3, matches=matches)
    assert matches.tolist() == [True, True] + [False] * 4


@pytest.mark.parametrize("backend", Backend)
def test_arguments(backend: Backend) -> None:
    arguments = {
        "tokens": torch.tensor([[1, 2, 3, 1, 2], [7, 7, 7, 7, 0]], device=DEVICE),
        "lengths": torch.tensor([5, 4], device=DEVICE),
        "rows": torch.tensor([1, 0, 1], device=DEVICE),
        "drafts": torch.tensor([[7, 0], [3, 1], [7, 7]], device=DEVICE),
        "matches": torch.tensor([False, True], device=DEVICE),
        "num_sampled": torch.tensor([1, 0, 2], device=DEVICE),
    }
    check_arguments(
        look_up_drafts,
        arguments,
        refused={"tokens": "row-contiguous", "drafts": "row-contiguous", "matches": "contiguous"},
        k=2,
        backend=backend,
    )
    for wrong in (
        {"k": 0},
        {"k": 1025},
        {"k": 1, "min_match": 0},
        {"k": 1, "min_match": 2**31},
        {"k": 1, "min_match": 3, "max_match": 2},
        {"k": 1, "max_match": 2**31},
    ):
        name, number = list(wrong.items())[-1]
        with pytest.raises(TensorContractError, match=f"{name}: expected .*, got {number}"):
            look_up_drafts(**arguments, **wrong, backend=backend)
    largest = {"k": 1024, "min_match": 1, "max_match": 2**31 - 1}
    tokens, lengths = arguments["tokens"], arguments["lengths"]
    found = look_up_drafts(tokens, lengths, **largest, backend=backend)
    assert found.tolist() == [([3, 1, 2] * 342)[:1024], [7] * 1024]


@pytest.mark.parametrize("backend", Backend)
def test_nothing_is_launched_without_rows_columns_or_drafts(backend, monkeypatch) -> None:
    forbid_launches(monkeypatch, lookup_triton)
    for requests, width, k in ((0, 4, 2), (2, 0, 2), (2, 4, 0)):
        tokens = torch.zeros(requests, width, dtype=torch.int64, device=DEVICE)
        lengths = torch.zeros(requests, dtype=torch.int64, device=DEVICE)
        found = look_up_drafts(tokens, lengths, k, backend=backend)
        assert found.tolist() == [[-1] * k] * requests


@pytest.mark.gpu
def test_real_shapes_in_a_cuda_graph() -> None:
    """Captured once, replayed over other texts; without synchronization."""
    tokens = torch.randint(0, 4, (64, 32768), dtype=torch.int32, device=DEVICE)
    lengths = torch.randint(0, 32769, (64,), device=DEVICE)
    rows = torch.randperm(64, device=DEVICE)[:32]
    drafts = torch.randint(0, 4, (32, 3), device=DEVICE)
    counts, matches, expected = drafts[:, 0], *torch.zeros(2, 64, dtype=torch.bool, device=DEVICE)
    for more in ({}, {"rows": rows, "drafts": drafts, "num_sampled": counts}):
        run = partial(look_up_drafts, tokens, lengths, 5, **more)
        graph, found = captured(partial(run, matches=matches, backend=Backend.TRITON))
        for _ in range(2):
            tokens.random_(0, 4)
            lengths.random_(0, 32769)
            graph.replay()
            assert torch.equal(found, run(matches=expected, backend=Backend.TORCH))
            assert torch.equal(matches, expected)
