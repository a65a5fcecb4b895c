"""Strategies that choose the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from mtp_plugin.errors import ConfigError, TensorContractError, expect, format_value
from mtp_plugin.infer.logprobs import usable
from mtp_plugin.infer.sampling_rule import SamplingRule


class SampleStrategy(Protocol):
    """How the next token is chosen."""

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Return token ids [B] int64, chosen from logits [B, V]."""
        ...


class GreedySampleStrategy:
    """Choose the argmax of every row; NaN counts as -inf, and ties go to the lowest id."""

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """See `SampleStrategy.sample`.

        Raises:
            TensorContractError: the shape is not [B, V], or a row has no value above -inf.
        """
        return _usable_rows(logits).argmax(dim=-1).to(logits.device)


class RandomSampleStrategy:
    """Sample every row from softmax(logits / temperature); NaN counts as -inf.

    In a row with +inf the lowest such id is chosen. Requests with other options have a
    `RequestSampleStrategy`.

    Args:
        temperature: finite and above 0.
        seed: seed of the random numbers.

    Raises:
        ConfigError: the temperature is out of range.
    """

    def __init__(self, temperature: float = 1.0, seed: int = 0) -> None:
        expect(
            temperature > 0 and math.isfinite(temperature),
            ConfigError,
            f"temperature: expected a finite number above 0, got {format_value(temperature)}",
        )
        self.temperature = temperature
        self._rng = torch.Generator().manual_seed(seed)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """See `SampleStrategy.sample`.

        Raises:
            TensorContractError: the shape is not [B, V], or a row has no value above -inf.
        """
        rows = _usable_rows(logits).double()
        highest, argmax = rows.max(dim=-1, keepdim=True)
        is_finite = highest < torch.inf
        shifted = torch.where(is_finite, rows - highest, 0.0)
        probs = (shifted / self.temperature).softmax(dim=-1)
        sampled = torch.multinomial(probs, 1, generator=self._rng)
        return torch.where(is_finite, sampled, argmax).squeeze(1).to(logits.device)


class RequestSampleStrategy:
    """Apply the sampling rule of one request to its rows in order, and keep the chosen tokens.

    Args:
        rule: the sampling rule of the request.
        output: its output tokens so far.
    """

    def __init__(self, rule: SamplingRule, output: Sequence[int] = ()) -> None:
        self.rule = rule
        self.output = list(output)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token id [1] int64, chosen from logits [1, V].

        Raises:
            TensorContractError: there is more than one row.
        """
        expect(
            logits.dim() == 2 and len(logits) == 1,
            TensorContractError,
            f"logits: expected [1, V], got {list(logits.shape)}",
        )
        token = self.rule.choose(logits[0], self.output)
        self.output.append(token)
        return torch.tensor([token], device=logits.device)


def _usable_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return logits [B, V] in float32 on the CPU, NaN as -inf."""
    expect(
        logits.dim() == 2 and logits.shape[1] > 0,
        TensorContractError,
        f"logits: expected [B, V] with at least one column, got {list(logits.shape)}",
    )
    rows = usable(logits)
    empty = (rows == -torch.inf).all(dim=1).nonzero().flatten().tolist()
    expect(
        not empty,
        TensorContractError,
        f"logits: expected a value above -inf in every row, got none in rows {empty}",
    )
    return rows
