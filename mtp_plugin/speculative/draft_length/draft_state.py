"""What a request can draft."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass
class DraftState:
    """What a request can draft, as the steps launched so far left it."""

    limit: int
    """Most drafts that the step at hand verifies for the request."""
    warm: int
    """Drafts for which its draft KV and history are complete; 0: cold."""
    proposed: int = 0
    """Drafts that its newest launched step makes for the one after it."""
    most: int = sys.maxsize
    """Drafts that the request itself wants at most."""

    @classmethod
    def fresh(cls, draft_len: int, most: int = sys.maxsize) -> DraftState:
        """A request that nothing but its own ``most`` turns down: K everywhere."""
        limit = min(draft_len, most)
        return cls(limit=limit, warm=draft_len, proposed=draft_len, most=most)

    @property
    def usable(self) -> int:
        """Drafts that it can verify, whatever a step makes."""
        return min(self.warm, self.most)

    def restart(self, draft_len: int) -> None:
        """The whole prompt is read (again): warm, and nothing proposed."""
        self.warm, self.proposed = draft_len, 0

    def launch(self, draft_len: int, stays_warm: int) -> None:
        """Take part in a step of ``draft_len`` that keeps draft KV for ``stays_warm`` drafts."""
        self.limit = min(draft_len, self.proposed, self.usable)
        self.proposed = draft_len
        self.warm = min(self.warm, stays_warm)
