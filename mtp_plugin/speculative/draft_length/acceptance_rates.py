"""Live acceptance rates by draft position."""

from __future__ import annotations

from collections.abc import Mapping


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

    def record(self, num_accepted: int, num_drafted: int) -> None:
        """Count a step that accepted ``num_accepted`` of ``num_drafted`` drafts."""
        verified, accepted, decay = self._verified, self._accepted, self._decay
        for i in range(num_accepted):
            verified[i] = verified[i] * decay + 1
            accepted[i] = accepted[i] * decay + 1
        if num_accepted < num_drafted:
            verified[num_accepted] = verified[num_accepted] * decay + 1
            accepted[num_accepted] *= decay

    def record_all(self, counts: Mapping[tuple[int, int], int]) -> None:
        """Count steps given as (accepted, verified drafts) -> number of steps."""
        for i in range(len(self._verified)):
            decided = {n: c for n, c in counts.items() if min(n[0] + 1, n[1]) > i}
            total = sum(decided.values())
            decay = self._decay**total
            self._verified[i] = self._verified[i] * decay + total
            passed = sum(count for (accepted, _), count in decided.items() if accepted > i)
            self._accepted[i] = self._accepted[i] * decay + passed

    def rate(self, position: int, expected: float, weight: float) -> float:
        """Return the rate of a position, with ``weight`` samples of the rate ``expected`` added."""
        return (self._accepted[position] + weight * expected) / (self._verified[position] + weight)
