"""Tokens -> text as it is emitted: incremental detokenization, stop strings, what may be shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

INCOMPLETE = "\ufffd"
"""Stands in decoded text for bytes that are no character, or not yet one."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that text needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Segment:
    """A stretch of shown text, and whether its tokens were accepted drafts."""

    text: str
    from_draft: bool


class RequestText:
    """The text of one request, the same whatever runs its tokens come in.

    The bytes of an unfinished character wait for those that complete it. A stop string ends the
    text with the token that completes it; where one token completes several, the one that starts
    first counts. The text is cut at its start. What might be the start of a stop string is not
    shown until it turned out to be none.

    Args:
        tokenizer: decodes ids.
        stop: stop strings.
        min_tokens: a stop string that is complete within these first tokens does not end the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._prefix = 0  # ids before it no longer change the decoding of later ones
        self._read = 0  # ids before it are in the text
        self._early = 0  # characters that later ids have in the text already
        self._text = ""
        self._ends: list[tuple[int, bool]] = []  # (end offset, from_draft) per token
        self._shown = 0
        self._next_end = 0  # tokens before it are shown
        self._searched = 0
        self._stop_at: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stop_at is not None

    @property
    def full_text(self) -> str:
        """The text so far, cut before a stop string; an incomplete last character included."""
        if self._stop_at is not None:
            return self._text[: self._stop_at]
        return self._text + self._pending()

    def push(self, token: int, *, from_draft: bool) -> None:
        """Append one token's text and look for a stop string."""
        self._ids.append(token)
        known = len(self._decode(self._ids[self._prefix : self._read]))
        extended = self._decode(self._ids[self._prefix :])
        # further bytes may still make characters of such a tail
        sure = extended.rstrip(INCOMPLETE)
        self._text += sure[known + self._early :]
        if len(sure) == len(extended) > known:
            self._prefix, self._read, self._early = self._read, len(self._ids), 0
        else:
            self._early = max(self._early, len(sure) - known)
        self._ends.append((len(self._text), from_draft))
        if self._stop and not self.stopped:
            self._search()

    def drain(self, *, final: bool) -> list[Segment]:
        """The text that may be shown now and was not shown before.

        Args:
            final: the request has ended: nothing is held back any more.
        """
        if final and not self.stopped:
            rest = self._pending()
            if rest:
                self._text += rest
                self._read = self._prefix = len(self._ids)
                self._early = 0
                from_draft = self._ends[-1][1] if self._ends else False
                self._ends.append((len(self._text), from_draft))
        limit = self._stop_at if self._stop_at is not None else len(self._text)
        if not final and not self.stopped:
            limit -= self._held_back()
        segments: list[Segment] = []
        while self._next_end < len(self._ends) and self._shown < limit:
            end, from_draft = self._ends[self._next_end]
            text = self._text[self._shown : min(end, limit)]
            self._shown += len(text)
            if end <= limit:
                self._next_end += 1
            if text and segments and segments[-1].from_draft == from_draft:
                segments[-1] = Segment(segments[-1].text + text, from_draft)
            elif text:
                segments.append(Segment(text, from_draft))
        return segments

    def _pending(self) -> str:
        """Text of the ids that are not in the text yet, incomplete characters included."""
        known = len(self._decode(self._ids[self._prefix : self._read]))
        return self._decode(self._ids[self._prefix :])[known + self._early :]

    def _search(self) -> None:
        longest = max(len(s) for s in self._stop)
        if self._min_tokens and len(self._ids) <= self._min_tokens:
            # complete too early: it does not count later either
            self._searched = len(self._text)
            return
        start = max(0, self._searched - longest + 1)
        found = [(at, s) for s in self._stop if (at := self._find_past(s, start)) >= 0]
        self._searched = len(self._text)
        if found:
            self._stop_at = min(found)[0]

    def _find_past(self, stop: str, start: int) -> int:
        """The first occurrence of ``stop`` that ends behind what was searched before, or -1."""
        at = self._text.find(stop, start)
        while at >= 0 and at + len(stop) <= self._searched:
            at = self._text.find(stop, at + 1)
        return at

    def _held_back(self) -> int:
        """Length of the longest tail that could be the start of a stop string."""
        for length in range(max((len(s) for s in self._stop), default=1) - 1, 0, -1):
            tail = self._text[-length:]
            if len(tail) == length and any(s.startswith(tail) for s in self._stop):
                return length
        return 0

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""
