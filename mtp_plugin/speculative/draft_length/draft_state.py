"""The draft state of a request."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from mtp_plugin.speculative.draft_length.acceptance_rates import AcceptanceRates


@dataclass
class DraftState:
    """How many drafts a request can use, after the steps launched so far."""

    limit: int
    """Maximum number of drafts that the current step verifies for the request."""
    warm: int
    """Number of drafts for which its draft KV and history are complete; 0: cold."""
    proposed: int = 0
    """Number of drafts that its last launched step makes for the next one."""
    most: int = sys.maxsize
    """Maximum number of drafts that the request allows (``max_draft_len``)."""
    acceptance: AcceptanceRates | None = None
    """Live acceptance rates, with ``mtp.adaptive_draft_len``; None before the first step."""

    @classmethod
    def fresh(cls, draft_len: int, most: int = sys.maxsize) -> DraftState:
        """Return the state of a warm request with K drafts, limited only by ``most``."""
        limit = min(draft_len, most)
        return cls(limit=limit, warm=draft_len, proposed=draft_len, most=most)

    @property
    def usable(self) -> int:
        """Return how many drafts it can verify, whatever a step makes."""
        return min(self.warm, self.most)

    def restart(self, draft_len: int) -> None:
        """Reset for a step that computes the prompt from its start: warm, without drafts."""
        self.warm, self.proposed = draft_len, 0

    def launch(self, draft_len: int, stays_warm: int) -> None:
        """Update for a step of ``draft_len`` that keeps draft KV for ``stays_warm`` drafts."""
        self.limit = min(draft_len, self.proposed, self.usable)
        self.proposed = draft_len
        self.warm = min(self.warm, stays_warm)
