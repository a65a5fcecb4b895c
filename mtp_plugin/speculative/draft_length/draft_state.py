"""The draft state of a request, and its live acceptance rates."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass


class AcceptanceRates:
    """Exponential averages of the acceptance rate of each draft position.

    The rate of position i is conditional: of the steps that accepted drafts 1..i-1 and verified
    draft i, the share that accepted it. A position that is not verified keeps its rate.

    Args:
        horizon: number of samples over which a position is averaged.
    """

    def __init__(self, draft_len: int, *, horizon: int) -> None:
        self._decay = 1 - 1 / horizon
        self._verified = [0.0] * draft_len
        self._accepted = [0.0] * draft_len
        self._counts: Counter[tuple[int, int]] = Counter()
        """(accepted, verified drafts) of steps that are not in the averages yet."""

    def record(self, num_accepted: int, num_drafted: int) -> None:
        """Count a step that accepted ``num_accepted`` of ``num_drafted`` drafts."""
        self._counts[num_accepted, num_drafted] += 1

    def rate(self, position: int, expected: float, weight: float) -> float:
        """Return the rate of a position, with ``weight`` samples of the rate ``expected`` added."""
        if self._counts:
            self._average()
        return (self._accepted[position] + weight * expected) / (self._verified[position] + weight)

    def _average(self) -> None:
        counts, self._counts = self._counts, Counter()
        for i in range(len(self._verified)):
            decided = {n: c for n, c in counts.items() if min(n[0] + 1, n[1]) > i}
            total = sum(decided.values())
            decay = self._decay**total
            self._verified[i] = self._verified[i] * decay + total
            passed = sum(count for (accepted, _), count in decided.items() if accepted > i)
            self._accepted[i] = self._accepted[i] * decay + passed


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
