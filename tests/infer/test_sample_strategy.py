from __future__ import annotations

import pytest
import torch

from mtp_plugin.errors import ConfigError
from mtp_plugin.infer import GreedySampleStrategy, MultinomialSampleStrategy

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("row", "token"),
    [
        ([0.0, 2.0, 1.0], 1),
        ([3.0, 1.0, 3.0], 0),
        ([NAN, 1.0, 2.0], 2),
        ([-INF, NAN, -5.0], 2),
        ([1.0, INF, 5.0], 1),
    ],
    ids=["largest", "lowest id of a tie", "no NaN", "NaN as -inf", "+inf as maximum"],
)
def test_greedy(row: list[float], token: int) -> None:
    sampled = GreedySampleStrategy().sample(torch.tensor([row, row]))
    assert sampled.dtype is torch.int64
    assert sampled.tolist() == [token, token]


def test_multinomial_follows_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -INF, NAN])
    strategy = MultinomialSampleStrategy(generator=torch.Generator().manual_seed(0))
    counts = strategy.sample(logits.expand(20_000, 5)).bincount(minlength=5) / 20_000
    torch.testing.assert_close(counts[:3], logits[:3].softmax(dim=0), rtol=0, atol=0.02)
    assert counts[3:].tolist() == [0, 0]


def test_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0]]).expand(20_000, 2)
    cold = MultinomialSampleStrategy(0.25, torch.Generator().manual_seed(0))
    share = cold.sample(logits).float().mean()
    assert abs(share - torch.sigmoid(torch.tensor(4.0))) < 0.01


def test_same_seed_same_draws() -> None:
    logits = torch.zeros(50, 100)
    draws = [
        MultinomialSampleStrategy(generator=torch.Generator().manual_seed(seed)).sample(logits)
        for seed in (3, 3, 4)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_without_a_generator_torch_s_own_is_used() -> None:
    logits = torch.zeros(50, 100)
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        draws.append(MultinomialSampleStrategy().sample(logits))
    assert torch.equal(*draws)


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
def test_bad_temperature(temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"^temperature: expected a value above 0, got "):
        MultinomialSampleStrategy(temperature)
