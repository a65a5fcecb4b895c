"""Data classes of the draft inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtp_plugin.ops.step import slots_within


@dataclass(frozen=True)
class History:
    """The last K pairs of (token, target state) of every slot, and the slots of a step.

    K is that of the pools, the maximum number of drafts that a step verifies. A host engine that
    replaces one pool may give it another S.
    """

    tokens: torch.Tensor  # [S, K] int32, contiguous
    states: torch.Tensor  # [S, K, H], contiguous, of any floating type
    slot_ids: torch.Tensor
    """[R] integer, any stride. The padding rows of a batch may share one; an id outside 0 to S-1 is
    the last slot, with S of the smaller pool."""

    @property
    def num_slots(self) -> int:
        """S of the smaller pool."""
        return min(self.tokens.shape[0], self.states.shape[0])

    def slots(self) -> torch.Tensor:
        """Return the slots of the step's requests [R] int64."""
        return slots_within(self.slot_ids, self.num_slots)

    @property
    def max_draft_len(self) -> int:
        """K of the pools."""
        return self.tokens.shape[1]


@dataclass(frozen=True)
class TargetRows:
    """Inputs and outputs of the target model in a step."""

    input_ids: torch.Tensor  # [T] integer, any stride
    hidden_states: torch.Tensor  # [T, H]
    successors: torch.Tensor | None = None
    """[C] integer, any stride: the token that follows each chunk; None without contexts."""


@dataclass(frozen=True)
class DraftWindows:
    """The rows that each request feeds to the first draft pass over K layers."""

    window: int  # per generation request, 1 to K+1
    history_lens: Sequence[int]  # [C] on the host: history rows before each chunk, 0 to K
    spare_rows: int = 0  # additional rows of states, for windows that move by an offset
    may_overwrite_states: bool = False
    """The step's states are not read any more: those of the result may use the same memory."""


@dataclass(frozen=True)
class DraftKVLengths:
    """KV lengths of the host engine, from which those of the draft loop follow."""

    lens: torch.Tensor  # [>= R] int32, any stride; elements from R on are not read
    floor: int | None  # minimum length of a generation request; None: none
