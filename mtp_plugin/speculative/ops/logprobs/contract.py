"""What log-probabilities come as."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_plugin.requests.logprobs import (
    ENTRY_WIDTH,
    RANK_PLACE,
    TOKEN_PLACE,
    TOP_IDS_PLACE,
    TOP_VALUES_PLACE,
    VALUE_PLACE,
)

LOGPROB_OPTIONS = frozenset({"logprobs"})
"""Options of a request that are read here."""


@dataclass(frozen=True)
class LogProbs:
    """An entry per emitted token; all that it has are columns of one tensor: it moves in one copy.

    What nobody asked for, and what stands behind a run, is filled.
    """

    entries: torch.Tensor  # [R, K+1, ENTRY_WIDTH] int32, see `requests.logprobs`

    @classmethod
    def unwritten(cls, requests: int, width: int, device: torch.device | str) -> LogProbs:
        """Tensors to write to, for R ``requests`` of up to ``width`` tokens."""
        shape = (requests, width, ENTRY_WIDTH)
        return cls(torch.empty(shape, dtype=torch.int32, device=device))

    @property
    def tokens(self) -> torch.Tensor:
        """[R, K+1] int32, -1 where there is no entry."""
        return self.entries[..., TOKEN_PLACE]

    @property
    def ranks(self) -> torch.Tensor:
        """[R, K+1] int32: one more than the ids in front of the token; 0 without an entry."""
        return self.entries[..., RANK_PLACE]

    @property
    def values(self) -> torch.Tensor:
        """[R, K+1] float32: of the tokens; 0 without an entry."""
        return self.entries[..., VALUE_PLACE].view(torch.float32)

    @property
    def top_ids(self) -> torch.Tensor:
        """[R, K+1, MAX_LOGPROBS] int32: the most likely ids, -1 behind what was asked for."""
        return self.entries[..., TOP_IDS_PLACE:TOP_VALUES_PLACE]

    @property
    def top_values(self) -> torch.Tensor:
        """[R, K+1, MAX_LOGPROBS] float32: of the most likely ids, 0 where there is none."""
        return self.entries[..., TOP_VALUES_PLACE:].view(torch.float32)
