"""The rule that ends thinking and the state of requests, in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import Self

from mtp_plugin.ops.checks import AtLeast, expect_tensor
from mtp_plugin.ops.step import SlotRows
from mtp_plugin.requests.thinking import ThinkingEnd


@dataclass(frozen=True)
class ThinkingRule:
    """A `ThinkingEnd` of M ids as tensors that captured graphs read."""

    begin_token: int
    end_token: int  # ends thinking alone, except within a forced end sequence; -1: none
    end_ids: torch.Tensor  # [M] int32: the forced end sequence
    next_progress: torch.Tensor
    """[M, M] int32: progress in the end sequence after progress p and the id ``end_ids[j]``."""

    @classmethod
    def of(cls, end: ThinkingEnd, device: torch.device | str) -> Self:
        """Create the tensors on a device."""
        return cls(
            end.begin,
            end.end_token,
            torch.tensor(end.end, dtype=torch.int32, device=device),
            torch.tensor(end.next_progress(), dtype=torch.int32, device=device),
        )

    def check(self, device: torch.device) -> None:
        """Check the tensors.

        Raises:
            TensorContractError: another shape, dtype or device.
        """
        layout: dict[str, Any] = {"dtype": torch.int32, "device": device, "contiguous": True}
        expect_tensor("end_ids", self.end_ids, shape=(AtLeast(1),), **layout)
        length = self.end_ids.numel()
        expect_tensor("next_progress", self.next_progress, shape=(length, length), **layout)

    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the rule with ``to`` applied to its tensors."""
        return replace(self, end_ids=to(self.end_ids), next_progress=to(self.next_progress))


@dataclass(frozen=True)
class ThinkingState:
    """Thinking budget, thinking-token count and end-sequence progress of requests, [N] int64."""

    budget: torch.Tensor
    num_thinking: torch.Tensor
    progress: torch.Tensor

    @classmethod
    def read(cls, slots: SlotRows, requests: slice) -> Self:
        """Read the state from the slots."""
        names = ("thinking_token_budget", "num_thinking", "end_progress")
        return cls(*(slots.read(name, requests).to(torch.int64) for name in names))

    @property
    def forces(self) -> torch.Tensor:
        """Whether the end sequence is forced [N] bool."""
        return (self.num_thinking >= 0) & (self.budget >= 0) & (self.num_thinking >= self.budget)

    def forced(self, rule: ThinkingRule) -> torch.Tensor:
        """The forced next id [N]; -1: any id may follow."""
        progress = self.progress.clamp(0, len(rule.end_ids) - 1)
        return torch.where(self.forces, rule.end_ids[progress], -1)

    def after(
        self, tokens: torch.Tensor, is_there: torch.Tensor, rule: ThinkingRule
    ) -> ThinkingState:
        """The state after ``tokens`` [N], for requests where ``is_there``."""
        length = len(rule.end_ids)
        hits = tokens.unsqueeze(1) == rule.end_ids
        next_progress = rule.next_progress[self.progress.clamp(0, length - 1)]
        progress = torch.where(hits, next_progress, 0).amax(dim=1).to(torch.int64)
        thinks = self.num_thinking >= 0
        ends = (tokens == rule.end_token) & (tokens >= 0) & ~self.forces
        ends = (ends | (progress == length)) & thinks
        begins = (tokens == rule.begin_token) & ~thinks
        num_thinking = torch.where(
            thinks & ~ends, self.num_thinking + 1, torch.where(begins, 0, -1)
        )
        progress = torch.where(thinks & ~ends, progress, 0)
        return ThinkingState(
            self.budget,
            torch.where(is_there, num_thinking, self.num_thinking),
            torch.where(is_there, progress, self.progress),
        )
