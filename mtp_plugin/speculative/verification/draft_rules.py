"""How drafts are drawn from a draft layer's logits."""

from __future__ import annotations

from typing import Protocol

import torch

from mtp_plugin.kernels.backend import Backend
from mtp_plugin.speculative.ops.draft import propose
from mtp_plugin.speculative.step import DraftColumn


class DraftRule(Protocol):
    """How one pass of the draft loop draws its drafts, and what is kept of them."""

    def propose(self, logits: torch.Tensor, place: DraftColumn, *, backend: Backend) -> None:
        """Put the drafts of ``logits`` [R, V] where ``place`` says."""


class GreedyDrafts:
    """The highest value's id; nothing else of the draft is kept."""

    def propose(self, logits: torch.Tensor, place: DraftColumn, *, backend: Backend) -> None:
        propose(logits, place, backend=backend)


GREEDY_DRAFTS = GreedyDrafts()
