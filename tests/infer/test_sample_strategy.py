from __future__ import annotations

import pytest
import torch

from mtp_plugin.errors import TensorContractError
from mtp_plugin.infer import RequestSampleStrategy, SamplingRule
from mtp_plugin.requests.options import SamplingParams

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
    strategy = RequestSampleStrategy(SamplingRule(SamplingParams(), [0]))
    sampled = strategy.sample(torch.tensor([row]))
    assert sampled.dtype is torch.int64
    assert sampled.tolist() == strategy.output == [token]


def test_rows_of_one_request_alone() -> None:
    strategy = RequestSampleStrategy(SamplingRule(SamplingParams(), [0]))
    for shape in ((2, 3), (3,)):
        with pytest.raises(TensorContractError, match=r"logits: expected \[1, V\], got"):
            strategy.sample(torch.zeros(shape))
