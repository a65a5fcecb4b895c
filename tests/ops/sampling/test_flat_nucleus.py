"""Flat nuclei of which only the token is needed: ids are tried by their noisy scores."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.sampling import truncation_triton
from tests.ops.logits_processing.example import LogitsOptions
from tests.ops.logits_processing.pools import pools_of
from tests.ops.on_device import DEVICE
from tests.ops.sampling.cases import Batch, batch_of_rows
from tests.ops.sampling.example import Options
from tests.ops.sampling.margins import Comparison
from tests.ops.sampling.processed_rows import columns_of, write
from tests.ops.top_k.rows import DTYPES, strided

VOCAB = 16_501
NAN, INF = float("nan"), float("inf")
TOP_PS = (0.999999, 0.95, 0.8, 0.5, 0.3, 0.25)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The columns that were tried, in their order."""
    if DEVICE.type != "cpu":
        pytest.skip("tries are seen in the interpreter")
    columns: list[int] = []
    stays = truncation_triton._is_kept

    def expected(column: Any, *others: Any) -> Any:
        columns.append(int(column.handle.data.item()))
        return stays(column, *others)

    monkeypatch.setattr(truncation_triton, "_is_kept", expected)
    return columns


def normal(number: int, vocab: int = VOCAB) -> torch.Tensor:
    noise = torch.Generator().manual_seed(number)
    return torch.randn(number, vocab, generator=noise)


def check(batch: Batch) -> None:
    comparison = Comparison()
    comparison.compare(batch, batch.tokens(Backend.TORCH).tolist(), batch.tokens(Backend.TRITON))
    comparison.check()


@pytest.mark.thinned(cases=2)
@pytest.mark.parametrize(("dtype", "temperature"), [*zip(DTYPES, (0.7, 1.0, 3.0), strict=True)])
def test_every_share_of_mass(temperature: float, dtype: torch.dtype, tried: list[int]) -> None:
    requests = [Options(temperature, top_p=p, seed=1) for p in TOP_PS]
    check(batch_of_rows(normal(len(requests)).to(dtype), requests))
    assert len(tried) >= len(requests)


@pytest.mark.thinned
@pytest.mark.parametrize("min_p", [0.02, 0.3])
def test_min_p_leaves_out_what_would_be_tried(min_p: float, tried: list[int]) -> None:
    requests = [Options(1.5, top_p=p, min_p=min_p, seed=1) for p in TOP_PS]
    batch = batch_of_rows(normal(len(requests)), requests)
    check(batch)
    top = batch.logits.amax(dim=1)
    assert tried
    # what min-p leaves out is no candidate
    for row, token in enumerate(batch.tokens(Backend.TRITON).tolist()):
        depth = (top[row] - batch.logits[row, token]) / 1.5
        assert float((-depth).exp()) >= min_p * (1 - 1e-5)


def test_next_id_ahead_follows_a_removed_one(tried: list[int]) -> None:
    """Columns that are tried have decreasing depths; the last one is the sample."""
    row, wins = normal(1), 0
    for seed in range(8):
        tried.clear()
        batch = batch_of_rows(row, [Options(1.0, top_p=0.3, seed=seed)])
        token = int(batch.tokens(Backend.TRITON))
        assert token == int(batch.tokens(Backend.TORCH))
        values = row[0, tried].tolist()
        assert tried[-1] == token
        assert values == sorted(values)
        wins += len(tried) == 1
    assert 0 < wins < 8


@pytest.mark.parametrize(("top_p", "most"), [(0.95, 1.2), (0.5, 2.2)])
def test_few_are_tried(top_p: float, most: float, tried: list[int]) -> None:
    """About 1 - ln(top_p) each."""
    requests = [Options(1.0, top_p=top_p, seed=seed) for seed in range(12)]
    check(batch_of_rows(normal(1).expand(12, -1), requests))
    assert len(tried) <= most * 12


def test_row_is_read_until_the_result_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id near the maximum is kept as soon as 1 - top_p of the mass is read."""
    if DEVICE.type != "cpu":
        pytest.skip("pieces are counted in the interpreter")
    weighed, seen = truncation_triton._sum_weights, []

    def count(*given: Any) -> Any:
        seen.append(1)
        return weighed(*given)

    monkeypatch.setattr(truncation_triton, "_sum_weights", count)
    vocab = 4096 * 2 * 6
    requests = [Options(2.0, top_p=0.95, seed=seed) for seed in range(3)]
    batch = batch_of_rows(normal(1, vocab).expand(3, -1), requests)
    check(batch)
    # six each, if all were read
    assert len(seen) < 12


@pytest.mark.parametrize("kind", ["tails", "strided", "ids", "edited", "far", "depths of nothing"])
def test_rows_of_every_form(kind: str, tried: list[int]) -> None:
    requests = [Options(1.0, top_p=p, seed=seed) for seed, p in enumerate(TOP_PS[:4])]
    rows = normal(len(requests))
    if kind == "tails":
        rows[:, :1000] = NAN
        rows[:, -2000:] = -INF
    if kind == "strided":
        rows = strided(rows, 5)
    if kind == "far":
        rows = rows * 1e30
        requests = [one._replace(temperature=1e30) for one in requests]
    if kind == "depths of nothing":  # of many differences one depth
        rows = -1e-20 * (torch.arange(VOCAB) % 2).float().expand(len(requests), -1)
        requests = [one._replace(temperature=1e30) for one in requests]
    batch = batch_of_rows(rows, requests)
    if kind == "ids":
        ids = torch.arange(VOCAB, dtype=torch.int32, device=DEVICE) * 3 + 1
        batch = batch.replaced(vocab_ids=ids)
    if kind == "edited":
        near = dict.fromkeys(range(0, VOCAB, 40), 2.0)
        logits_options = [
            LogitsOptions(bias=near if row % 2 else {7: -1.0}) for row in range(len(requests))
        ]
        pools, columns = pools_of(logits_options, VOCAB, random.Random(3))
        expected = [
            {**columns_of(one), **row} for one, row in zip(logits_options, columns, strict=True)
        ]
        write(batch.slots, expected)
        batch = batch.replaced(slots=replace(batch.slots, pools=pools))
        # rounding decides none of these
        assert torch.equal(batch.tokens(Backend.TRITON), batch.tokens(Backend.TORCH))
    else:
        check(batch)
    assert len(tried) >= len(requests)


def test_flat_nucleus_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type != "cpu":
        pytest.skip("lists are seen in the interpreter")

    def listed(*given: Any) -> Any:
        raise AssertionError(given)

    monkeypatch.setattr(truncation_triton, "list_values", listed)
    check(batch_of_rows(normal(1), [Options(1.0, top_p=0.95, seed=1)]))
