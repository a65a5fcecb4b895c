"""Flat rows shared by several programs: same tokens as with one program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.row_sums import ChunkLayout
from mtp_plugin.ops.sampling import TRUNCATION_SIZE, sample_tokens
from mtp_plugin.ops.sampling import sample_triton as launch
from mtp_plugin.ops.sampling import truncation_search_triton as search_kernel
from tests.op_arguments import poisoned_memory
from tests.ops.on_device import DEVICE
from tests.ops.sampling.cases import Batch, batch_of_rows
from tests.ops.sampling.example import Options

VOCABS = {2: 8_309, 4: 16_501}
"""By number of shares, of which each needs 32 chunks; the last chunk is not whole."""
INF, NAN = float("inf"), float("nan")

KINDS = [
    "normal",
    "one value",
    "few values",
    "sorted",
    "period of chunks",
    "period of shares",
    "ends",
    "tails",
    "one share's",
    "few chunks",
    "dense front",
]


def row_of(kind: str, shares: int) -> torch.Tensor:
    """A row with more candidates than are listed."""
    noise, vocab = torch.Generator().manual_seed(11), VOCABS.get(shares, VOCABS[4])
    values = torch.randn(vocab, generator=noise)
    columns = torch.arange(vocab)
    chunks = ChunkLayout.of(values[None]).chunks_of(columns)
    if kind == "one value":
        return torch.full((vocab,), -2.5)
    if kind == "few values":
        return (values * 0.05 + 4).to(torch.bfloat16).float()
    if kind == "sorted":
        return values.sort().values
    if kind == "period of chunks":
        return values * 0.01 + columns % 128 * 0.01
    if kind == "period of shares":
        return values * 0.2 + chunks % shares * 0.5
    if kind == "ends":
        return values * 0.1 + 3.0 * ((columns < 2500) | (columns >= vocab - 2500))
    if kind == "tails":
        values[:1000] = NAN
        values[-2000:] = -INF
        return values
    if kind == "one share's":
        return values * 0.001 - 5.0 * (chunks % shares != shares - 1)
    if kind == "dense front":  # that promises more ids than there are
        near = (columns < 3700) | ((columns % 4096 < 1024) & (columns % 32 == 0))
        return values * 0.3 - 30.0 * ~near
    if kind == "few chunks":  # that hold more ids than are listed
        return values * 0.001 - 30.0 * (chunks >= 40)
    return values


def sample(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and truncation of a launch over poisoned memory."""
    truncation = torch.full((batch.rows.num_rows, TRUNCATION_SIZE), NAN, device=DEVICE)
    with poisoned_memory():
        tokens = sample_tokens(
            batch.logits,
            batch.rows,
            batch.slots,
            vocab_ids=batch.vocab_ids,
            truncation=truncation,
            backend=Backend.TRITON,
        )
    return tokens, truncation


def check(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows sample the reference's tokens, with and without truncation as output."""
    tokens, truncation = sample(batch)
    tokens_alone = batch.tokens(Backend.TRITON)
    assert not bool(truncation.isnan().any())
    monkeypatch.setattr(launch, "SHARES", 1)
    alone, cuts_alone = sample(batch)
    hangs = batch.undecided()
    of_one = batch.tokens(Backend.TRITON)
    for others in (tokens_alone, alone, of_one, batch.tokens(Backend.TORCH)):
        assert not bool(((tokens != others) & ~hangs).any())
    # two orders of summation may cut at neighbours
    torch.testing.assert_close(truncation[:, :2], cuts_alone[:, :2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(truncation[:, 3], cuts_alone[:, 3], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "shares"),
    [*((kind, 2) for kind in KINDS), ("normal", 4), ("period of shares", 4), ("one share's", 4)],
)
def test_shared_rows_sample_the_same_tokens(
    kind: str, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SHARES", shares)
    requests = [
        Options(1.0, top_p=0.95, seed=1),
        Options(2.0, top_p=0.4, min_p=0.3, seed=2),
    ]
    check(batch_of_rows(row_of(kind, shares).expand(len(requests), -1), requests), monkeypatch)


def test_all_kinds_of_rows_together_with_shared_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        Options(0.0, top_p=0.9),
        Options(1.0),
        Options(1.0, top_p=0.95),
        Options(0.2, top_p=0.5),
        Options(0.5, top_p=0.9),
        Options(1.0, top_k=6000),
        Options(1.0, top_k=6000, top_p=0.99),
        Options(3.0, min_p=0.1),
        Options(1.0, top_k=40, top_p=0.9),
    ]
    rows = torch.stack([row_of("normal", 4)] * len(requests))
    infinite = torch.stack([rows[0], torch.full(rows[0].shape, -INF), rows[0], rows[0]])
    infinite[0, 77] = INF
    wanted = [Options(1.0, top_p=0.95), Options(1.0, top_p=0.95), *requests[2:4]]
    check(batch_of_rows(torch.cat([rows, infinite]), [*requests, *wanted]), monkeypatch)


def test_default_number_of_shares() -> None:
    noise = torch.Generator().manual_seed(5)
    rows = torch.randn(2, 4096 * 32 + 5, generator=noise)
    assert launch._shares(2, 33 * 32) == launch.SHARES
    batch = batch_of_rows(rows, [Options(1.0, top_p=0.95, seed=1), Options(1.0, top_p=0.8, seed=2)])
    assert torch.equal(batch.tokens(Backend.TRITON), batch.tokens(Backend.TORCH))
    # and again, where the first launch left its counts
    assert torch.equal(batch.tokens(Backend.TRITON), batch.tokens(Backend.TORCH))


def test_shares_depend_on_rows_and_chunks() -> None:
    expected = {1: 8, 4: 8, 33: 8, 34: 1, 9999: 1}
    assert {rows: launch._shares(rows, 1024) for rows in expected} == expected
    assert [launch._shares(1, chunks) for chunks in (8, 255, 256, 999)] == [1, 1, 8, 8]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="guesses are replaced in the interpreter")
@pytest.mark.parametrize("shares", [1, 4])
@pytest.mark.parametrize("wrong", ["too near", "too far", "too wide", "always too wide"])
def test_last_program_continues_after_a_wrong_guess(
    wrong: str, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "SHARES", shares)
    guessed = search_kernel.guess_bounds
    guesses: list[int] = []

    def guess(need: Any, by_mass: Any, bounds: Any, *others: Any) -> Any:
        guesses.append(1)
        if len(guesses) > shares and not wrong.startswith("always"):
            return guessed(need, by_mass, bounds, *others)
        if wrong == "too near":
            return bounds.low, bounds.low + 1
        if wrong == "too far":
            return bounds.high - 1, bounds.high
        return bounds.low, bounds.high

    monkeypatch.setattr(search_kernel, "guess_bounds", guess)
    options = Options(1.0, top_p=0.9, min_p=1e-4, seed=9)
    batch = batch_of_rows(row_of("normal", shares)[None], [options])
    tokens, _ = sample(batch)
    assert len(guesses) == shares + (3 if wrong.startswith("always") else 1)
    assert torch.equal(tokens, batch.tokens(Backend.TORCH))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [129280, 151_937])
def test_any_program_may_be_the_last(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs come in another order every time."""
    for number in (1, 4, 32):
        noise = torch.Generator().manual_seed(number)
        rows = torch.randn(number, vocab, generator=noise) * 2
        requests = [
            Options(0.8, top_p=0.9 + 0.09 * (row % 7) / 7, seed=row) for row in range(number)
        ]
        batch = batch_of_rows(rows, requests)
        assert launch._shares(number, vocab // 128) == launch.SHARES
        tokens, truncation = sample(batch)
        tokens_alone = batch.tokens(Backend.TRITON)
        for _ in range(50):
            again, cuts_again = sample(batch)
            assert torch.equal(again, tokens)
            assert torch.equal(cuts_again, truncation)
            assert torch.equal(batch.tokens(Backend.TRITON), tokens_alone)
        with monkeypatch.context() as patch:
            check(batch, patch)
