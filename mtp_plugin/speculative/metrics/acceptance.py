"""Acceptance figures, counted from tokens that were really emitted."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Label:
    """What reports must say of a verification mode whose texts are not the target's own."""

    name: str  # of the mode
    settings: str  # its options, in short
    note: str  # what a reader has to know
    is_drawn: bool = False
    """Draws accept the drafts: figures are those asked for, and tell nothing of drafts or text."""

    def __str__(self) -> str:
        return f"{self.name} acceptance ({self.settings}): {self.note}"


def num_decided_drafts(num_emitted: int, num_drafted: int, *, ends: bool) -> int:
    """Of a step's drafts those that its emitted tokens tell of.

    Of a run that ends its request the drafts in front of the last token, which stood: whether a
    draft was that token or what follows a rejected one, none behind it could have counted.
    """
    return min(num_drafted, max(num_emitted - 1, 0)) if ends else num_drafted


@dataclass
class AcceptanceStats:
    """A histogram of emitted tokens per target step; every figure derives from it.

    A run that a stop or a limit cuts counts its cut, and of its drafts those that are told of
    (:func:`num_decided_drafts`). Context steps (one token each) do not count.
    """

    max_draft_len: int
    histogram: list[int] = field(default_factory=list)  # index: emitted tokens of a step, 0..K+1
    num_drafted: int = 0
    label: Label | None = None
    """Of the verification that the figures come from; None: the text is the target's own."""

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
        """Accepted drafts over drafts verified, without those that an end left no room for; 0.0
        before the first draft."""
        accepted = sum(count * max(emitted - 1, 0) for emitted, count in enumerate(self.histogram))
        return accepted / self.num_drafted if self.num_drafted else 0.0
