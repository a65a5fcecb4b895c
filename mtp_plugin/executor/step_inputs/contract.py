"""What is read of the step before, and what the generations of a step are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class LastResults(Protocol):
    """The sampler's store, addressed by sequence slot; any strides."""

    @property
    def new_tokens(self) -> torch.Tensor:
        """[>= K+1, S, 1]: the next inputs."""

    @property
    def new_tokens_lens(self) -> torch.Tensor:
        """[S]: how many tokens were emitted."""


@dataclass(frozen=True)
class GenerationInputs:
    """The rows of the generations of a step, true lengths included, on the device.

    A generation of L committed tokens feeds K+1 rows at positions L .. L+K.
    """

    input_ids: torch.Tensor  # [G, K+1] int32: last emitted token, then drafts; absent ones are 0
    draft_tokens: torch.Tensor  # [G, K] int32: its columns from 1 on
    positions: torch.Tensor  # [G, K+1] int64, none past the last one of a sequence
    draft_lens: torch.Tensor  # [G] int32: drafts that count
    seq_lens: torch.Tensor  # [G] int32: K+1
    kv_lens: torch.Tensor  # [G] int32: L+K+1
    write_limit: torch.Tensor  # [G] int32: rows at or past it count for nobody
    capacity: torch.Tensor  # [G] int32: KV rows that the request may touch
    state_slot: torch.Tensor  # [G] int64
