from __future__ import annotations

import pytest
import torch

from mtp_plugin.infer import (
    GreedySampleStrategy,
    RandomSampleStrategy,
    RequestSampleStrategy,
    SamplingRule,
)
from mtp_plugin.requests.options import SamplingParams

NAN, INF = float("nan"), float("inf")


ROWS = [
    ([0.0, 2.0, 1.0], 1),
    ([3.0, 1.0, 3.0], 0),
    ([NAN, 1.0, 2.0], 2),
    ([-INF, NAN, -5.0], 2),
    ([1.0, INF, 5.0], 1),
]


@pytest.mark.parametrize(
    ("row", "token"),
    ROWS,
    ids=["largest", "lowest id of a tie", "no NaN", "NaN as -inf", "+inf as maximum"],
)
def test_greedy(row: list[float], token: int) -> None:
    strategy = RequestSampleStrategy(SamplingRule(SamplingParams(), [0]))
    sampled = strategy.sample(torch.tensor([row]))
    assert sampled.dtype is torch.int64
    assert sampled.tolist() == strategy.output == [token]


def test_greedy_batch() -> None:
    sampled = GreedySampleStrategy().sample(torch.tensor([row for row, _ in ROWS]))
    assert sampled.dtype is torch.int64
    assert sampled.tolist() == [token for _, token in ROWS]


def test_random_batch_has_the_distribution_of_each_row() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -INF], [NAN, 1.0, 1.0, 0.0], [1.0, INF, 5.0, INF]])
    strategy = RandomSampleStrategy(temperature=0.7, seed=5)
    sampled = torch.stack([strategy.sample(logits) for _ in range(4000)], dim=1)
    assert sampled.dtype is torch.int64
    shares = torch.nn.functional.one_hot(sampled, 4).double().mean(dim=1)
    expected = torch.tensor([[0.0, 2.0, 1.0, -INF], [-INF, 1.0, 1.0, 0.0]]).double() / 0.7
    torch.testing.assert_close(shares[:2], expected.softmax(dim=-1), rtol=0, atol=0.03)
    assert shares[2].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert bool((shares[:2][expected == -INF] == 0).all())


def test_random_batch_repeats_with_its_seed() -> None:
    logits = torch.zeros(64, 100)
    first, again, other = (RandomSampleStrategy(seed=seed).sample(logits) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
