"""Truncation of rows of a real size, on every path of the kernels, and rows without numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.sampling import TRUNCATION_SIZE
from mtp_plugin.ops.sampling import truncation_search_triton as search_kernel
from mtp_plugin.requests.columns import TopPMass
from tests.ops.on_device import DEVICE
from tests.ops.sampling.cases import Batch, batch_of_rows
from tests.ops.sampling.example import Options
from tests.ops.top_k.rows import DTYPES

VOCAB = 16_501
MANY = 1 if DEVICE.type == "cpu" else 64
INF, NAN = float("inf"), float("nan")


def normal(number: int, spread: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    noise = torch.Generator().manual_seed(7)
    return (torch.randn(number, VOCAB, generator=noise) * spread).to(dtype)


def sample(batch: Batch) -> list[torch.Tensor]:
    """Tokens without and with the truncation as output."""
    truncation = torch.zeros(batch.rows.num_rows, TRUNCATION_SIZE, device=DEVICE)
    return [batch.tokens(Backend.TRITON, truncation=given) for given in (None, truncation)]


@pytest.mark.parametrize(
    ("options", "spread"),
    [
        (Options(0.8, top_k=50, top_p=0.9), 3),  # few candidates
        (Options(0.6, top_k=20, top_p=0.95, min_p=0.05), 3),
        (Options(0.3, top_p=0.95), 3),
        (Options(0.3, top_k=VOCAB + 1, top_p=0.95), 3),
        (Options(0.3, min_p=0.02), 3),
        (Options(1.0, top_k=120), 3),  # more
        (Options(1.0, top_k=300, top_p=0.7), 3),  # a list of them
        (Options(1.0, top_p=0.6), 2),
        (Options(1.0, min_p=0.02), 1),
        (Options(1.0, top_k=5000, top_p=0.999), 1),  # all chunks, again and again
        (Options(1.0, top_k=1000, top_p=0.95), 2),  # a guess of how deep they lie
        (Options(0.7, top_k=257, min_p=1e-3), 1),
        (Options(2.0, top_k=3000, top_p=0.5), 1),
        (Options(1.0, top_k=4095), 2),
        (Options(1.0, top_k=4096, top_p=0.99), 2),
        (Options(2.0, top_p=0.9), 0.1),
        (Options(100.0, top_k=9000, min_p=0.97), 1),
        (Options(100.0, top_p=0.4), 30),
        (Options(3.0, top_k=VOCAB - 1, top_p=0.5, min_p=0.1), 1),
        (Options(1.0), 2),  # no cut
        (Options(1.0, top_k=VOCAB), 2),
        (Options(0.0, top_k=50), 2),
        # top-p of the mass of all tokens: it cuts the top k, or does not
        (Options(1.0, top_k=100, top_p=0.2, top_p_mass=TopPMass.ALL), 2),
        (Options(1.0, top_k=20, top_p=0.999, top_p_mass=TopPMass.ALL), 2),
        (Options(1.0, top_k=300, top_p=0.3, min_p=0.01, top_p_mass=TopPMass.ALL), 2),
        (Options(1.0, top_k=2000, top_p=0.3, top_p_mass=TopPMass.ALL), 1),
        (Options(1.0, top_k=5000, top_p=0.3, top_p_mass=TopPMass.ALL), 1),
        (Options(1.0, top_k=6000, top_p=0.95, min_p=1e-3, top_p_mass=TopPMass.ALL), 1),
        # of those that min-p keeps
        (Options(1.0, top_p=0.8, min_p=0.02, top_p_mass=TopPMass.MIN_P), 3),
        (Options(1.0, top_p=0.8, min_p=0.02, top_p_mass=TopPMass.MIN_P), 1),
        (Options(2.0, top_p=0.6, min_p=0.02, top_p_mass=TopPMass.MIN_P), 1),
        (Options(1.0, top_k=60, top_p=0.8, min_p=0.03, top_p_mass=TopPMass.MIN_P), 3),
        (Options(1.0, top_k=1500, top_p=0.8, min_p=0.02, top_p_mass=TopPMass.MIN_P), 1),
        (Options(2.0, top_k=6000, top_p=0.5, min_p=0.05, top_p_mass=TopPMass.MIN_P), 1),
        (Options(2.0, top_k=9000, top_p=0.5, min_p=0.15, top_p_mass=TopPMass.MIN_P), 1),
    ],
    ids=str,
)
def test_tokens_equal_reference_on_every_path(options: Options, spread: float) -> None:
    dtype = DTYPES[options.top_k % 3]
    requests = [options._replace(seed=seed) for seed in range(MANY)]
    batch = batch_of_rows(normal(len(requests), spread, dtype), requests)
    expected = batch.tokens(Backend.TORCH)
    for tokens in sample(batch):
        differs = tokens != expected
        assert not bool((differs & ~batch.undecided()).any())
        assert int(differs.sum()) <= 1


@pytest.mark.thinned("is_always")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="guesses are replaced in the interpreter")
@pytest.mark.parametrize("key", [0, 1_040_000_000, 1_065_353_216, 2_139_095_040])
@pytest.mark.parametrize("is_always", [False, True])
def test_wrong_depth_guess_gives_the_same_tokens(
    key: int, is_always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Depths 0, 0.13, 1 and none: too few ids, or more than are listed."""
    guessed, keys = search_kernel.guess_bounds, []

    def guess(need: Any, by_mass: Any, bounds: Any, *others: Any) -> Any:
        keys.append(key)
        if len(keys) > 1 and not is_always:
            return guessed(need, by_mass, bounds, *others)
        far = tl.full([], key, tl.int32)
        return bounds.low, tl.minimum(tl.maximum(far, bounds.low + 1), bounds.high)

    monkeypatch.setattr(search_kernel, "guess_bounds", guess)
    for options in (Options(1.0, top_k=1000, top_p=0.9, seed=1), Options(0.9, top_k=600, seed=2)):
        keys.clear()
        batch = batch_of_rows(normal(1, 2), [options])
        tokens = batch.tokens(Backend.TRITON)
        assert len(keys) >= 1
        assert torch.equal(tokens, batch.tokens(Backend.TORCH))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="guesses are replaced in the interpreter")
@pytest.mark.parametrize("wrong", ["too near", "too far", "too wide", "always too wide"])
def test_wrong_guess_of_a_mass_gives_the_same_tokens(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guessed, guesses = search_kernel.guess_bounds, []

    def guess(need: Any, by_mass: Any, bounds: Any, *others: Any) -> Any:
        guesses.append(1)
        if len(guesses) > 1 and not wrong.startswith("always"):
            return guessed(need, by_mass, bounds, *others)
        low = bounds.high - 1 if wrong == "too far" else bounds.low
        return low, bounds.low + 1 if wrong == "too near" else bounds.high

    monkeypatch.setattr(search_kernel, "guess_bounds", guess)
    batch = batch_of_rows(normal(1, 1), [Options(1.0, top_p=0.9, min_p=1e-4, seed=9)])
    truncation = torch.zeros(1, TRUNCATION_SIZE, device=DEVICE)
    tokens = batch.tokens(Backend.TRITON, truncation=truncation)
    assert len(guesses) == (4 if wrong.startswith("always") else 2)
    assert torch.equal(tokens, batch.tokens(Backend.TORCH))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="passes are counted in the interpreter")
@pytest.mark.parametrize(("top_k", "passes"), [(300, 0), (1000, 0), (2500, 0), (3500, 2)])
def test_complete_list_takes_no_pass(
    top_k: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If top-k keeps few tokens, they are listed completely and top-p searches the list."""
    between, seen = search_kernel.list_between, []

    def count(*given: Any) -> Any:
        seen.append(1)
        return between(*given)

    monkeypatch.setattr(search_kernel, "list_between", count)
    batch = batch_of_rows(normal(1, 2), [Options(1.0, top_k=top_k, top_p=0.95, seed=3)])
    tokens = batch.tokens(Backend.TRITON)
    assert len(seen) == passes
    assert torch.equal(tokens, batch.tokens(Backend.TORCH))


@pytest.mark.thinned("kept")
@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("kept", [1, 150, 1000, 6000])
def test_ties_keep_the_lowest_ids(kept: int, backend: Backend) -> None:
    """Thresholds among equal values: a row of one value, and one with three higher ids."""
    flat = torch.full((VOCAB,), -2.5)
    raised = flat.clone()
    raised[[5000, 11_000, 3]] = -2.25
    weight = 2.718281828**0.25
    share = (kept - 0.5) / VOCAB
    raised_share = (3 * weight + kept - 0.5) / (3 * weight + VOCAB - 3)
    requests = [
        (flat, Options(1.0, top_k=kept), range(kept)),
        (flat, Options(1.0, top_p=share), range(kept)),
        (raised, Options(1.0, top_k=kept + 3), {*range(kept + 1), 3, 5000, 11_000}),
        (raised, Options(1.0, top_p=raised_share), {*range(kept + 1), 3, 5000, 11_000}),
        (raised, Options(1.0, top_k=kept + 3, min_p=0.9), {3, 5000, 11_000}),
    ]
    for row, options, among in requests:
        many = [options._replace(seed=seed) for seed in range(MANY)]
        batch = batch_of_rows(row.expand(MANY, -1), many)
        truncation = torch.zeros(MANY, TRUNCATION_SIZE, device=DEVICE)
        for given in (None, truncation):
            tokens = batch.tokens(backend, truncation=given)
            assert torch.equal(tokens, batch.tokens(Backend.TORCH))
            assert set(tokens.tolist()) <= set(among)


@pytest.mark.parametrize("backend", Backend)
def test_tokens_that_reach_top_p_exactly_are_the_last(backend: Backend) -> None:
    """2**14 equal values: the first quarter has exactly the mass 0.25, and no token follows it."""
    batch = batch_of_rows(torch.zeros(1, 2**14), [Options(1.0, top_p=0.25, seed=1)])
    truncation = torch.zeros(1, TRUNCATION_SIZE, device=DEVICE)
    assert int(batch.tokens(backend, truncation=truncation)) < 2**12
    assert truncation[0].tolist() == [0.0, 0.0, 2**12 - 1, 2**12]


@pytest.mark.parametrize("backend", Backend)
def test_low_temperature_returns_argmax(backend: Backend) -> None:
    """Also for logits so large that noise does not change their differences."""
    rows = normal(6, 3)[:, :5000] * torch.tensor([[1.0], [100.0], [1e6], [1e20], [1e30], [1e37]])
    for temperature in (1e-4, 1e-3):
        requests = [Options(temperature, top_p=top_p, seed=2) for top_p in (1.0, 0.9) * 3]
        batch = batch_of_rows(rows, requests)
        assert torch.equal(batch.tokens(backend).long(), rows.to(DEVICE).argmax(dim=1))


@pytest.mark.parametrize("vocab", [4096 * 32, 4096 * 32 + 1])
def test_many_chunks_within_the_depth(vocab: int) -> None:
    """As many as their counts have room for in a word, and more."""
    requests = [
        Options(1.0, top_k=1000, seed=1),
        Options(0.01, top_k=60, seed=2),
        Options(1.0, top_p=0.95, seed=3),
    ]
    batch = batch_of_rows(torch.linspace(3, 4, vocab).expand(3, -1), requests)
    assert torch.equal(batch.tokens(Backend.TRITON), batch.tokens(Backend.TORCH))


def odd_row(kind: str) -> torch.Tensor:
    """A row with more candidates than the list holds, which is hard to estimate from a sample."""
    values = normal(1, 1)[0]
    if kind == "zeros of both signs":
        return values * 0
    if kind == "few values":
        return (values * 0.05 + 4).to(torch.bfloat16).float()
    if kind == "sorted":
        return values.sort().values
    if kind == "two heights":
        return values * 0.01 + 2.0 * (torch.arange(VOCAB) % 2)
    if kind == "sampled low":  # every other chunk's first places
        return values * 0.5 - 3.0 * (torch.arange(VOCAB) % 1024 < 8)
    if kind == "few chunks":
        return values * 0.001 - 30.0 * (torch.arange(VOCAB) >= 5000)
    return values


@pytest.mark.thinned("options")
@pytest.mark.parametrize(
    "kind",
    [
        "zeros of both signs",
        "few values",
        "sorted",
        "two heights",
        "sampled low",
        "few chunks",
        "normal",
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        Options(1.0, top_p=0.4, seed=1),
        Options(2.0, top_p=0.97, seed=2),
        Options(1.0, top_k=VOCAB // 2, seed=3),
        Options(1e30, top_k=VOCAB - 5, top_p=0.6, min_p=0.01, seed=4),
    ],
    ids=str,
)
def test_more_candidates_than_the_list_holds(kind: str, options: Options) -> None:
    batch = batch_of_rows(odd_row(kind)[None], [options])
    expected = batch.tokens(Backend.TORCH)
    for tokens in sample(batch):
        assert not bool(((tokens != expected) & ~batch.undecided()).any())


@pytest.mark.parametrize(
    "options",
    [
        Options(1.0, top_p=0.95, min_p=0.01, seed=1),
        Options(1.0, top_k=9000, min_p=0.01, seed=2),
        Options(3.0, top_p=0.99, min_p=0.2, seed=3),
    ],
    ids=str,
)
def test_kept_mass_excludes_tokens_below_min_p(options: Options) -> None:
    batch = batch_of_rows(normal(1, 2), [options])
    truncation = [torch.zeros(1, TRUNCATION_SIZE, device=DEVICE) for _ in Backend]
    tokens = [
        batch.tokens(backend, truncation=of)
        for backend, of in zip(Backend, truncation, strict=True)
    ]
    assert torch.equal(*tokens)
    torch.testing.assert_close(truncation[0][:, 3], truncation[1][:, 3])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="passes are counted in the interpreter")
def test_flat_row_takes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    for name in ("list_between", "measure_up_to", "sample_chunks"):
        kernel = getattr(search_kernel, name)

        def counted(*values: object, name: str = name, kernel: Any = kernel) -> Any:
            passes.append(name)
            return kernel(*values)

        monkeypatch.setattr(search_kernel, name, counted)
    options = Options(1.0, top_p=0.95, seed=1)
    batch = batch_of_rows(normal(1, 2), [options])
    expected = [torch.zeros(1, TRUNCATION_SIZE, device=DEVICE) for _ in Backend]
    tokens = [
        batch.tokens(backend, truncation=truncation)
        for backend, truncation in zip(Backend, expected, strict=True)
    ]
    assert torch.equal(*tokens)
    assert passes == ["list_between"]
