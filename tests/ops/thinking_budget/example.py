"""A thinking budget expected token by token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tags:
    """The token ids that begin and end thinking."""

    begin: int
    end: tuple[int, ...]
    end_token: int


@dataclass
class Thinker:
    """A request: how many tokens it generated since thinking began, and how many of the end."""

    budget: int | None
    thought: int | None = None  # None: it does not think
    written: int = 0

    def must_give(self, tags: Tags) -> int | None:
        """The only id that may come next; None: any may."""
        is_spent = None not in (self.budget, self.thought) and self.thought >= self.budget
        return tags.end[self.written] if is_spent else None

    def take(self, token: int, tags: Tags) -> None:
        """One more token."""
        if self.thought is None:
            self.thought, self.written = (0 if token == tags.begin else None), 0
            return
        is_forced = self.must_give(tags) is not None
        said = [*tags.end[: self.written], token]
        while said != list(tags.end[: len(said)]):
            del said[0]
        ends_here = token == tags.end_token >= 0 and not is_forced
        if len(said) == len(tags.end) or ends_here:
            self.thought, self.written = None, 0
        else:
            self.thought, self.written = self.thought + 1, len(said)
