"""Token history of a request, updated token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST = 65535


@dataclass
class Kept:
    """Of one request."""

    recent: list[int]
    counts: dict[int, int] | None = None
    """None: tokens are not counted."""
    seen: set[int] | None = None
    vocab: int = 0

    def emit(self, tokens: Sequence[int]) -> None:
        """Move on by some tokens."""
        for token in tokens:
            self.recent = [*self.recent[1:], token]
            if self.counts is not None and self.seen is not None and token < self.vocab:
                self.counts[token] = min(self.counts.get(token, 0) + 1, MOST)
                self.seen.add(token)
