from __future__ import annotations

import pytest
import torch

from mtp_plugin.infer import GreedySampleStrategy

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
