"""Decoding without drafts, through the same interface."""

from __future__ import annotations

import torch

from mtp_plugin.batch import Accepted
from mtp_plugin.workers.base import SpecWorker, Step


class PlainWorker(SpecWorker):
    """Emits the target's next token and proposes nothing (K = 0)."""

    min_draft_len = 0

    def _draft(
        self, step: Step, accepted: Accepted, drafts: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        """Nothing to draft."""
