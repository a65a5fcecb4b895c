"""Acceptance figures, counted from tokens that were really emitted."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class AcceptanceStats:
    """A histogram of emitted tokens per target step; every figure derives from it.

    A run that a stop or a limit cuts counts its cut. Context steps (one token each) do not count.
    """

    max_draft_len: int
    histogram: list[int] = field(default_factory=list)  # index: emitted tokens of a step, 0..K+1
    num_drafted: int = 0
    is_synthetic: bool = False
    """Synthetic draws accepted the drafts: the figures are those asked for, and the text is not
    the model's."""

    def __post_init__(self) -> None:
        if not self.histogram:
            self.histogram = [0] * (self.max_draft_len + 2)

    def record(self, num_emitted: int, num_drafted: int) -> None:
        """Count one generation step."""
        self.histogram[num_emitted] += 1
        self.num_drafted += num_drafted

    def merge(self, other: AcceptanceStats) -> None:
        """Add the counts of ``other``."""
        for emitted, count in enumerate(other.histogram):
            self.histogram[emitted] += count
        self.num_drafted += other.num_drafted
        self.is_synthetic |= other.is_synthetic

    @property
    def steps(self) -> int:
        """Target steps counted."""
        return sum(self.histogram)

    @property
    def emitted(self) -> int:
        """Tokens emitted in those steps."""
        return sum(count * emitted for emitted, count in enumerate(self.histogram))

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per step; 0.0 before the first step."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def per_position(self) -> list[float]:
        """Entry i: share of steps in which the first i+1 drafts were all accepted."""
        if not self.steps:
            return [0.0] * self.max_draft_len
        return [sum(self.histogram[i + 2 :]) / self.steps for i in range(self.max_draft_len)]

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over drafts verified; 0.0 before the first draft."""
        accepted = sum(count * max(emitted - 1, 0) for emitted, count in enumerate(self.histogram))
        return accepted / self.num_drafted if self.num_drafted else 0.0
