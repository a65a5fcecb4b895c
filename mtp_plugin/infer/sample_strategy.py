"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from mtp_plugin.errors import ConfigError


class SampleStrategy(Protocol):
    """How the next token is chosen."""

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids [B] int64 from logits [B, V]."""
        ...


@dataclass(frozen=True)
class GreedySampleStrategy:
    """The most probable token; the lowest id where several are; never NaN."""

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids [B] int64 from logits [B, V]."""
        return _nan_as_impossible(logits).argmax(dim=-1)


@dataclass(frozen=True)
class MultinomialSampleStrategy:
    """A draw from the softmax of the logits."""

    temperature: float = 1.0
    generator: torch.Generator | None = None
    """On the device of the logits; None draws from torch's own generator."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"temperature: expected a value above 0, got {self.temperature}")

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids [B] int64 from logits [B, V]."""
        scaled = _nan_as_impossible(logits).float() / self.temperature
        probabilities = scaled.softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(1)


def _nan_as_impossible(logits: torch.Tensor) -> torch.Tensor:
    # nan_to_num also replaces infinities unless told what they stay
    infinity = float("inf")
    return logits.nan_to_num(nan=-infinity, posinf=infinity, neginf=-infinity)
