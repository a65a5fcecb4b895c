"""Many samples: frequencies follow the probabilities, and samples are independent."""

from __future__ import annotations

import math

import pytest
import torch

from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.logit_rows import LogitRows
from mtp_plugin.ops.sampling import Role, sample_tokens
from mtp_plugin.ops.step import SlotRows
from tests.ops.on_device import DEVICE, vector
from tests.ops.sampling import example
from tests.ops.sampling.cases import COLUMNS, split
from tests.ops.sampling.example import Options

DRAWS = 200_000
ROW = [2.0, -1.0, 0.5, 0.5, 3.0, 1.25, -4.0, 2.5, 0.0, 1.0, -0.5, 1.75]


def sample(
    options: Options,
    number: int,
    backend: Backend,
    *,
    position: int = 0,
    role: Role = Role.TARGET,
) -> torch.Tensor:
    """Samples from `ROW` at consecutive token indices."""
    words = [part - 2**32 if part >= 2**31 else part for part in split(options.seed)]
    table = vector([COLUMNS.row({**options._asdict(), "seed": words})], torch.int32)
    return sample_tokens(
        torch.tensor([ROW], device=DEVICE).expand(number, -1),
        LogitRows(0, number, vector([position])),
        SlotRows(table, vector([0]), COLUMNS),
        role=role,
        backend=backend,
    )


def probabilities(options: Options) -> list[float]:
    """Expected probability of every token."""
    scores = [(value - max(ROW)) / options.temperature for value in ROW]
    kept = set(example.kept(scores, options))
    weights = [math.exp(score) if i in kept else 0.0 for i, score in enumerate(scores)]
    return [weight / sum(weights) for weight in weights]


def check_shares(tokens: torch.Tensor, expected: list[float]) -> None:
    """Chi-square of the counts, with a tail of less than one in a million."""
    counts = torch.bincount(tokens.long(), minlength=len(expected)).tolist()
    assert [count for count, share in zip(counts, expected, strict=True) if share == 0] == [
        0 for share in expected if share == 0
    ]
    number = len(tokens)
    terms = [
        (count - share * number) ** 2 / (share * number)
        for count, share in zip(counts, expected, strict=True)
        if share
    ]
    freedom = len(terms) - 1
    # Wilson and Hilferty's cube root, 5 deviations out
    limit = freedom * (1 - 2 / (9 * freedom) + 5 * math.sqrt(2 / (9 * freedom))) ** 3
    assert math.fsum(terms) < limit, (terms, limit)


OPTIONS = [
    Options(temperature=1.0, seed=1),
    Options(temperature=0.6, seed=2**40 + 7),
    Options(temperature=5.0, seed=3),
    Options(temperature=1.0, top_k=4, seed=4),
    Options(temperature=1.0, top_k=9, seed=5),  # cuts between equals
    Options(temperature=1.0, top_p=0.8, seed=6),
    Options(temperature=2.0, top_p=0.5, seed=7),
    Options(temperature=1.0, min_p=0.1, seed=8),
    Options(temperature=1.5, top_k=8, top_p=0.9, min_p=0.15, seed=9),
]


@pytest.mark.thinned(cases=5)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_token_frequencies_follow_probabilities(options: Options) -> None:
    expected = probabilities(options)
    check_shares(sample(options, DRAWS, Backend.TORCH), expected)


def test_kernel_frequencies_follow_probabilities() -> None:
    """Fewer samples in the interpreter, which is slow; all of them on a GPU."""
    number = DRAWS if DEVICE.type == "cuda" else 8
    for options in OPTIONS:
        tokens = sample(options, number, Backend.TRITON)
        assert torch.equal(tokens, sample(options, number, Backend.TORCH))
        if number == DRAWS:
            check_shares(tokens, probabilities(options))


def test_samples_are_independent() -> None:
    """At neighbouring indices, of two seeds and of two roles, tokens agree by chance alone."""
    options = Options(temperature=1.0, seed=11)
    base = sample(options, DRAWS, Backend.TORCH)
    chance = math.fsum(share**2 for share in probabilities(options))
    bound = 5 * math.sqrt(chance * (1 - chance) / DRAWS)
    for one, other in (
        (base[1:], base[:-1]),
        (base[4:], base[:-4]),
        (base, sample(options._replace(seed=12), DRAWS, Backend.TORCH)),
        (base, sample(options._replace(seed=11 + 2**32), DRAWS, Backend.TORCH)),
        (base, sample(options, DRAWS, Backend.TORCH, role=Role.PLAIN_DRAFT)),
    ):
        agree = float((one == other).double().mean())
        assert abs(agree - chance) < bound
