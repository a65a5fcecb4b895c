"""Acceptance statistics, counted from the tokens that were really output."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Label:
    """Note for reports about a verification method whose output differs from the target's own."""

    name: str  # verification method
    settings: str  # its options, abbreviated
    note: str  # what readers of a report must know
    is_drawn: bool = False
    """Drafts are accepted at random with configured rates, so that statistics do not measure the
    drafter and the output is not meaningful."""

    def __str__(self) -> str:
        return f"{self.name} acceptance ({self.settings}): {self.note}"


def num_decided_drafts(num_emitted: int, num_drafted: int, *, ends: bool) -> int:
    """Return the number of drafts of a step whose acceptance is known from its output tokens.

    Usually all. If the step ends its request, only the drafts before the last output token count:
    they were accepted, and later drafts had no chance.

    Args:
        num_emitted: output tokens of the step.
        num_drafted: drafts that the step verified.
        ends: whether the step ended its request.
    """
    return min(num_drafted, max(num_emitted - 1, 0)) if ends else num_drafted


@dataclass
class AcceptanceStats:
    """Histogram of output tokens per target step, from which all statistics are computed.

    A step that a stop condition truncates counts with its remaining tokens and the drafts of
    :func:`num_decided_drafts`. Context steps (one token each) are not counted.
    """

    max_draft_len: int
    histogram: list[int] = field(default_factory=list)  # index: output tokens of a step, 0..K+1
    num_drafted: int = 0
    label: Label | None = None
    """Label of the verification method; None: the output is the target's own."""

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
        if self.label is None or (other.label is not None and other.label.is_drawn):
            self.label = other.label

    @property
    def steps(self) -> int:
        """Number of target steps."""
        return sum(self.histogram)

    @property
    def emitted(self) -> int:
        """Number of output tokens of these steps."""
        return sum(count * emitted for emitted, count in enumerate(self.histogram))

    @property
    def acceptance_length(self) -> float:
        """Output tokens per step; 0.0 before the first step."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def per_position(self) -> list[float]:
        """Entry i: share of steps in which the first i+1 drafts were all accepted."""
        if not self.steps:
            return [0.0] * self.max_draft_len
        return [sum(self.histogram[i + 2 :]) / self.steps for i in range(self.max_draft_len)]

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts divided by those of :func:`num_decided_drafts`; 0.0 without drafts."""
        accepted = sum(count * max(emitted - 1, 0) for emitted, count in enumerate(self.histogram))
        return accepted / self.num_drafted if self.num_drafted else 0.0
