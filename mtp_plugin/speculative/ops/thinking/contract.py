"""What ends thinking, on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from typing_extensions import Self

from mtp_plugin.requests.thinking import ThinkingEnd


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

    def moved(self, to: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """With its tensors where ``to`` puts them."""
        return replace(self, end_ids=to(self.end_ids), next_places=to(self.next_places))
