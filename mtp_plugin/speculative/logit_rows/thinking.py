"""What ends thinking, and where requests stand, in torch: the CPU path and the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from typing_extensions import Self

from mtp_plugin.errors import TensorContractError
from mtp_plugin.requests.thinking import ThinkingEnd
from mtp_plugin.speculative.step import SlotRows


@dataclass(frozen=True)
class ThinkingRule:
    """A `ThinkingEnd` whose M ids captured graphs read where they lie."""

    begin_token: int
    end_token: int  # ends thinking by itself, but within an end that is forced; -1: none does
    end_ids: torch.Tensor  # [M] int32: written where a budget is spent
    next_places: torch.Tensor
    """[M, M] int32: at place p, behind an id that is ``end_ids[j]``, so many of them stand last."""

    @classmethod
    def of(cls, end: ThinkingEnd, device: torch.device | str) -> Self:
        """On a device."""
        return cls(
            end.begin,
            end.end_token,
            torch.tensor(end.end, dtype=torch.int32, device=device),
            torch.tensor(end.next_places(), dtype=torch.int32, device=device),
        )

    def check(self, device: torch.device) -> None:
        """Check the tensors.

        Raises:
            TensorContractError: another shape, type or device.
        """
        length = self.end_ids.numel()
        for name, tensor, shape in (
            ("end_ids", self.end_ids, (length,)),
            ("next_places", self.next_places, (length, length)),
        ):
            if not (
                length
                and tensor.shape == shape
                and tensor.dtype == torch.int32
                and tensor.device == device
                and tensor.is_contiguous()
            ):
                raise TensorContractError(
                    f"{name}: expected torch.int32 {list(shape)} without gaps on {device}, of 1 id "
                    f"or more, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                )

    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """With its tensors where ``to`` puts them."""
        return replace(self, end_ids=to(self.end_ids), next_places=to(self.next_places))


@dataclass(frozen=True)
class ThinkingState:
    """Of some requests, all [N] int64."""

    budget: torch.Tensor
    thought: torch.Tensor
    place: torch.Tensor

    @classmethod
    def read(cls, slots: SlotRows, requests: slice) -> Self:
        """As the slots have it."""
        names = ("thinking_token_budget", "thought", "end_place")
        return cls(*(slots.read(name, requests).to(torch.int64) for name in names))

    @property
    def forces(self) -> torch.Tensor:
        """Whether the end must go on [N] bool."""
        return (self.thought >= 0) & (self.budget >= 0) & (self.thought >= self.budget)

    def forced(self, rule: ThinkingRule) -> torch.Tensor:
        """The id that must come next, -1: any."""
        place = self.place.clamp(0, len(rule.end_ids) - 1)
        return torch.where(self.forces, rule.end_ids[place], -1)

    def behind(
        self, tokens: torch.Tensor, is_there: torch.Tensor, rule: ThinkingRule
    ) -> ThinkingState:
        """The state behind ``tokens`` [N], where they are."""
        length = len(rule.end_ids)
        hits = tokens.unsqueeze(1) == rule.end_ids
        places = rule.next_places[self.place.clamp(0, length - 1)]
        place = torch.where(hits, places, 0).amax(dim=1).to(torch.int64)
        thinks = self.thought >= 0
        ends = (tokens == rule.end_token) & (tokens >= 0) & ~self.forces
        ends = (ends | (place == length)) & thinks
        begins = (tokens == rule.begin_token) & ~thinks
        thought = torch.where(thinks & ~ends, self.thought + 1, torch.where(begins, 0, -1))
        place = torch.where(thinks & ~ends, place, 0)
        return ThinkingState(
            self.budget,
            torch.where(is_there, thought, self.thought),
            torch.where(is_there, place, self.place),
        )
