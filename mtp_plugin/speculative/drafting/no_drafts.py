"""Decoding without drafts, through the same interface."""

from __future__ import annotations

import torch

from mtp_plugin.speculative.drafting.worker import SpecWorker, Step
from mtp_plugin.speculative.step import Accepted


class NoDraftsWorker(SpecWorker):
    """Emits the target's next token and proposes nothing (K = 0)."""

    min_draft_len = 0

    def _draft(
        self, step: Step, accepted: Accepted, drafts: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        """Nothing to draft."""
