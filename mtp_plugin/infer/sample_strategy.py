"""From logits to the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.infer.sampling_rule import SamplingRule


class SampleStrategy(Protocol):
    """How the next token is chosen."""

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids [B] int64 from logits [B, V]."""
        ...


class RequestSampleStrategy:
    """One request's rule, applied to one row after another; it remembers what it chose.

    Args:
        rule: of the request.
        output: its tokens so far.
    """

    def __init__(self, rule: SamplingRule, output: Sequence[int] = ()) -> None:
        self.rule = rule
        self.output = list(output)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose the token id [1] int64 after the output so far from logits [1, V].

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
