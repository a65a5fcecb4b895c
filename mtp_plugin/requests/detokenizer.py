"""Tokens -> text as it is emitted: incremental detokenization, stop strings, what may be shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from mtp_plugin.errors import ExecutorError, expect

INCOMPLETE = "\ufffd"
"""Replaces invalid and incomplete characters in decoded text."""

LONG = 32
"""Tokens without a whole character at their end, of which some may leave the window."""

SPAN = 4
"""Most bytes, and so most tokens, that one character takes."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that text needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@lru_cache(maxsize=1024)
def _borders(text: str) -> tuple[int, ...]:
    """Of each beginning of a text: the length of its longest end that is a beginning of it too."""
    borders = [0]
    for character in text[1:]:
        length = borders[-1]
        while length and character != text[length]:
            length = borders[length - 1]
        borders.append(length + (character == text[length]))
    return tuple(borders)


class StopSearch:
    """Looks for one stop string in a text that grows; its work is in proportion to the text.

    Args:
        stop: not empty.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of the longest end of the text that the stop string begins with, but for itself
        as a whole."""
        self._borders = _borders(stop)

    def read(self, text: str, start: int) -> int | None:
        """Take the text from ``start`` on; where the stop string first begins that ends in it."""
        stop, borders, matched = self.stop, self._borders, self.matched
        first = None
        for place in range(start, len(text)):
            character = text[place]
            while matched and character != stop[matched]:
                matched = borders[matched - 1]
            if character == stop[matched]:
                matched += 1
            if matched == len(stop):
                if first is None:
                    first = place + 1 - matched
                matched = borders[matched - 1]
        self.matched = matched
        return first


@dataclass(frozen=True)
class Segment:
    """A stretch of shown text of one accepted draft, or of tokens of the target model."""

    text: str
    draft_position: int
    """1 for the first draft of its step and so on; 0: not a draft."""

    @property
    def from_draft(self) -> bool:
        """Whether it is the text of an accepted draft."""
        return self.draft_position > 0


class RequestText:
    """The text of one request, the same whatever runs its tokens come in.

    The bytes of an unfinished character wait for those that complete it. A stop string ends the
    text with the token that completes it; where one token completes several, the one that starts
    first counts, of those that start together the shortest. The text is cut at its start. What
    might be the start of a stop string is not shown until it turned out to be none.

    Only :meth:`push` decodes, and only a window of the last ids, so that its cost does not grow
    with the length of the text.

    Args:
        tokenizer: decodes ids.
        stop: stop strings.
        min_tokens: a stop string that is complete within these first tokens does not end the text.
        include_stop: cut the text at the end of the stop string, which is shown like other text.
        skip_special_tokens: leave special tokens out of the text.
        stop_tokens: ids that end the text before them, and the stop string that each is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        stop_tokens: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = stop
        self._stop_tokens = stop_tokens or {}
        self._searches = [StopSearch(each) for each in stop]
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._ids: list[int] = []  # the window: ids that the decoding of later ones depends on
        self._decoded = ""  # their text
        self._read = 0  # ids before it are there as context
        self._known = 0  # length of their text
        self._taken = 0  # characters of the window that are in the text, or held
        self._held = ""  # broken characters of ids that left the window, not in the text yet
        self._num_tokens = 0
        self._text = ""
        self._ends: list[tuple[int, int]] = []  # (end offset, draft position) per token
        self._shown = 0
        self._next_end = 0  # tokens before it are shown
        self._searched = 0
        self._stop_at: int | None = None
        self.stop_string: str | None = None
        """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stop_at is not None

    @property
    def full_text(self) -> str:
        """The text so far, cut at a stop string; an incomplete last character included."""
        if self._stop_at is not None:
            return self._text[: self._stop_at]
        return self._text + self._pending()

    def push(self, token: int, *, from_draft: bool) -> bool:
        """Append one token's text and look for a stop string; whether one ended the text.

        Raises:
            Exception: what the tokenizer raises; the text stays without this token.
        """
        ids = [*self._ids, token]
        decoded = self._decode(ids)
        # what is no text even twice in a row, as a special token, changes nothing of what follows
        if decoded != self._decoded or self._decode([token, token]):
            self._extend(ids, decoded)
        self._num_tokens += 1
        if token in self._stop_tokens and self._num_tokens > self._min_tokens:
            self._stop_before(self._stop_tokens[token])
        # a step appends its accepted drafts, then a token of the target
        before = self._ends[-1][1] if self._ends else 0
        self._ends.append((len(self._text), before + 1 if from_draft else 0))
        if self._stop and not self.stopped:
            self._search()
        return self.stopped

    def keep(self, tokens: Sequence[int]) -> None:
        """Drop all pushed tokens after ``tokens``, which are the first of them.

        Raises:
            ExecutorError: more tokens than were pushed, or text of the others was shown.
        """
        expect(
            len(tokens) <= self._num_tokens,
            ExecutorError,
            f"text: expected at most {self._num_tokens} tokens to keep, got {len(tokens)}",
        )
        text = RequestText(
            self._tokenizer,
            self._stop,
            self._min_tokens,
            include_stop=self._include_stop,
            skip_special_tokens=self._skip_special_tokens,
            stop_tokens=self._stop_tokens,
        )
        for token, (_, draft_position) in zip(tokens, self._ends, strict=False):
            text.push(token, from_draft=draft_position > 0)
        expect(
            self._shown <= len(text._text),
            ExecutorError,
            f"text: {len(tokens)} tokens have {len(text._text)} characters, {self._shown} were "
            f"shown",
        )
        text._shown, text._next_end = self._shown, self._next_end
        vars(self).update(vars(text))

    def drain(self, *, final: bool) -> list[Segment]:
        """The text that may be shown now and was not shown before.

        Args:
            final: the request has ended: nothing is held back any more.
        """
        if final and not self.stopped and self._take_pending():
            draft_position = self._ends[-1][1] if self._ends else 0
            self._ends.append((len(self._text), draft_position))
        limit = self._stop_at if self._stop_at is not None else len(self._text)
        if not final and not self.stopped:
            limit -= self._held_back()
        segments: list[Segment] = []
        while self._next_end < len(self._ends) and self._shown < limit:
            end, draft_position = self._ends[self._next_end]
            text = self._text[self._shown : min(end, limit)]
            self._shown += len(text)
            if end <= limit:
                self._next_end += 1
            if text and segments and segments[-1].draft_position == draft_position:
                segments[-1] = Segment(segments[-1].text + text, draft_position)
            elif text:
                segments.append(Segment(text, draft_position))
        return segments

    def _extend(self, ids: list[int], decoded: str) -> None:
        """Take a window that is a token longer, and the text that is now sure."""
        # further bytes may still make characters of such a tail
        sure = decoded.rstrip(INCOMPLETE)
        if len(self._decoded) > len(decoded) > self._known:
            # fewer characters than before: broken bytes, maybe those of U+FFFD, became whole ones
            sure = decoded
        is_whole = len(sure) == len(decoded) > self._known
        if is_whole:
            # ids before these no longer change the decoding of later ones
            ids = ids[self._read :]
            decoded = self._decode(ids)
        new = sure[self._taken :]
        if new:
            self._text += self._held + new
            self._held = ""
        self._ids, self._decoded = ids, decoded
        if is_whole:
            self._read = len(ids)
            self._known = self._taken = len(decoded)
            return
        self._taken = max(self._taken, len(sure))
        if (len(ids) - self._read) % LONG == 0:
            self._shorten()

    def _shorten(self) -> None:
        """Take ids out of the middle of a long window, where both its ends decode as before.

        The first ids stay, since bytes may be broken by those before them, and so many of the last
        that a character which later ids complete begins among them.
        """
        ids, decoded, size = self._ids, self._decoded, len(self._ids)
        for end in range(size - SPAN, size - 2 * SPAN, -1):
            before = self._decode(ids[:end])
            last = decoded[len(before) :]
            if not last or before + last != decoded:
                continue
            for start in range(self._read + SPAN, self._read + LONG - 2 * SPAN):
                first, kept = self._decode(ids[:start]), ids[:start] + ids[end:]
                if self._decode(kept) == first + last:
                    self._held += decoded[self._taken : len(before)]
                    self._taken = len(first) + max(0, self._taken - len(before))
                    self._ids, self._decoded = kept, first + last
                    return

    def _pending(self) -> str:
        """Text of the ids that are not in the text yet, incomplete characters included."""
        return self._held + self._decoded[self._taken :]

    def _take_pending(self) -> bool:
        """Append the text of `_pending`; whether there is any."""
        rest = self._pending()
        self._text += rest
        self._held, self._taken = "", len(self._decoded)
        return bool(rest)

    def _stop_before(self, stop: str) -> None:
        """End the text at a special token, which is a stop string."""
        self._take_pending()
        if self._include_stop:
            self._text += stop
        self.stop_string, self._stop_at = stop, len(self._text)

    def _search(self) -> None:
        read = [(search.read(self._text, self._searched), search.stop) for search in self._searches]
        self._searched = len(self._text)
        if self._min_tokens and self._num_tokens <= self._min_tokens:
            return  # complete too early: it does not count later either
        found = [(at, stop) for at, stop in read if at is not None]
        if found:
            at, stop = min(found)
            self.stop_string = stop
            self._stop_at = at + len(stop) if self._include_stop else at

    def _held_back(self) -> int:
        """Length of the longest tail that could be the start of a stop string, and be cut off."""
        if self._include_stop:
            return 0
        return max((search.matched for search in self._searches), default=0)

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
