"""Separates the thinking part of an output from its answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from mtp_plugin.requests.thinking import ThinkingEnd

THINKING, ANSWER = "thinking", "answer"
Piece = tuple[str, str]
"""A phase and its next text."""


class ThinkingTracker:
    """Follows the thinking tokens of a sequence.

    Args:
        tags: None: the model has none, and everything is answer.
        prompt: token ids of the prompt, which may begin the thinking.
    """

    def __init__(self, tags: ThinkingEnd | None, prompt: Sequence[int]) -> None:
        self._tags = tags
        self._state = (-1, 0)
        self.num_thinking = 0
        """Number of thinking tokens so far, tags included."""
        if tags is not None:
            self._state = tags.progress_after(prompt, len(prompt), sys.maxsize)

    @property
    def phase(self) -> str:
        """The phase of the next token."""
        return THINKING if self._state[0] >= 0 else ANSWER

    @property
    def end_progress(self) -> int:
        """Number of the last tokens that may be the beginning of the end tag."""
        return self._state[1] if self._state[0] >= 0 else 0

    def push(self, token: int) -> bool:
        """Append an output token; True: the phase changes after it."""
        if self._tags is None:
            return False
        before = self.phase
        self._state = self._tags.progress_after([token], 0, sys.maxsize, *self._state)
        self.num_thinking += THINKING in (before, self.phase)
        return before != self.phase

    def push_all(self, tokens: Sequence[int]) -> None:
        """Append output tokens."""
        if self._tags is not None:
            for token in tokens:
                self.push(token)

    @property
    def end_len(self) -> int:
        """Number of tokens of the end tag that was just completed."""
        return 0 if self._tags is None else len(self._tags.end)

    def is_end_token(self, token: int) -> bool:
        """Whether a token alone ends the thinking."""
        return self._tags is not None and token == self._tags.end_token


class ReasoningSplit:
    """Splits the text of a sequence at its thinking tags, which are left out, as it arrives.

    Args:
        decode: token ids -> text, as the sequence is decoded.
    """

    def __init__(
        self,
        tags: ThinkingEnd | None,
        prompt: Sequence[int],
        decode: Callable[[list[int]], str],
    ) -> None:
        self._tracker = ThinkingTracker(tags, prompt)
        self._is_plain = tags is None
        self._decode = decode
        self._tokens: list[int] = []
        self._text = ""
        self._position = 0
        self._phase = self._tracker.phase
        self._cuts: list[tuple[int, int, str]] = []
        """Start and end of a tag in the text, and the phase after it."""

    def push(self, tokens: Sequence[int], text: str, *, is_last: bool) -> list[Piece]:
        """Append output tokens and text; return the text that is known to belong to a phase."""
        if self._is_plain:
            return [(ANSWER, text)] if text else []
        self._text += text
        for token in tokens:
            self._push_token(token)
        pieces = []
        while self._cuts and self._cuts[0][0] <= len(self._text):
            start, end, phase = self._cuts[0]
            pieces.append((self._phase, self._text[self._position : start]))
            if len(self._text) < end and not is_last:
                self._position = max(self._position, start)
                break
            self._position, self._phase = max(self._position, end), phase
            del self._cuts[0]
        limit = len(self._text)
        if self._cuts:  # a tag whose text has not arrived
            limit = min(limit, self._cuts[0][0])
        elif self._tracker.end_progress and not is_last:
            limit = min(limit, len(self._decode(self._tokens[: -self._tracker.end_progress])))
        pieces.append((self._phase, self._text[self._position : limit]))
        self._position = max(self._position, limit)
        return [piece for piece in pieces if piece[1]]

    def _push_token(self, token: int) -> None:
        was_thinking = self._tracker.phase == THINKING
        self._tokens.append(token)
        if not self._tracker.push(token):
            return
        tag = 1
        if was_thinking and not self._tracker.is_end_token(token):
            tag = self._tracker.end_len
        start = len(self._decode(self._tokens[:-tag]))
        self._cuts.append((start, len(self._decode(self._tokens)), self._tracker.phase))
