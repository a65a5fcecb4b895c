"""The thinking phase of reasoning models: its begin and end tokens, and progress through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mtp_plugin.config.values import MAX_THINKING_END
from mtp_plugin.errors import ConfigError, expect, expect_int

DEFAULT_BEGIN = "<think>"
DEFAULT_END = "</think>"
NO_TOKEN = -1
Encode = Callable[[str], list[int]]
"""Text -> token ids, without added special tokens."""


@dataclass(frozen=True)
class ThinkingEnd:
    """The begin token and the end sequence that thinking budgets use.

    Raises:
        ConfigError: the end is empty or too long, an id is negative, or begin and end are equal.
    """

    begin: int
    end: tuple[int, ...]
    """Forced token by token when the budget is spent."""
    end_token: int = NO_TOKEN
    """A single token that also ends thinking, except inside a forced ``end``."""

    def __post_init__(self) -> None:
        for token in (self.begin, self.end_token, *self.end):
            expect_int("thinking_end", token, error=ConfigError)
        expect(
            1 <= len(self.end) <= MAX_THINKING_END and min(self.begin, *self.end) >= 0,
            ConfigError,
            f"thinking_end: expected 1 to {MAX_THINKING_END} ids >= 0 after a begin id >= 0, got "
            f"{list(self.end)} after {self.begin}",
        )
        _expect_distinct(self.begin, self.end_token)

    def next_progress(self) -> list[list[int]]:
        """Return the matching automaton of the end sequence of M ids, as a table [M, M].

        Entry [p][j]: the number of matched ids after p matched ids, followed by ``end[j]``.
        """
        return [[self._next_progress(p, token) for token in self.end] for p in range(len(self.end))]

    def progress_after(
        self,
        tokens: Sequence[int],
        prompt_len: int,
        budget: int,
        num_thinking: int = -1,
        progress: int = 0,
    ) -> tuple[int, int]:
        """Return the state after ``tokens``, of which the first ``prompt_len`` are the prompt.

        Args:
            num_thinking, progress: the state before the tokens.

        Returns:
            The number of thinking tokens (-1: not thinking), and how many ids of the end sequence
            are matched.
        """
        for index, token in enumerate(tokens):
            is_forced = num_thinking >= budget and index >= prompt_len
            if num_thinking < 0:
                num_thinking, progress = (0 if token == self.begin else -1), 0
                continue
            progress = self._next_progress(progress, token)
            if progress == len(self.end) or (token == self.end_token != NO_TOKEN and not is_forced):
                num_thinking, progress = -1, 0
            else:
                num_thinking += index >= prompt_len
        return num_thinking, progress

    def _next_progress(self, progress: int, token: int) -> int:
        """Return the length of the longest prefix of the end that the tokens so far end with."""
        seen = (*self.end[:progress], token)
        return next(n for n in range(len(seen), -1, -1) if seen[len(seen) - n :] == self.end[:n])


def read_thinking_token(config: Any, edge: str) -> int:
    """The ``begin`` or ``end`` thinking token id of a config, in lower or upper case; -1 if
    unset."""
    name = f"{edge}_thinking_phase_token"
    for spelling in (name, name.upper()):
        value = getattr(config, spelling, None)
        if value is not None:
            return expect_int(spelling, value, NO_TOKEN, error=ConfigError)
    return NO_TOKEN


def expect_thinking_tokens(begin: int, end: int) -> None:
    """Check the thinking tokens that relaxed acceptance requires.

    Raises:
        ConfigError: one of them is missing, or both are the same.
    """
    missing = [
        f"{edge}_thinking_phase_token"
        for edge, token in (("begin", begin), ("end", end))
        if token < 0
    ]
    if missing:
        raise ConfigError(
            f"use_relaxed_acceptance_for_thinking: there is no "
            f"{' and no '.join(missing)}, so nothing would be relaxed; expected the ids of the "
            f"model's thinking tokens (DeepSeek-R1: 128798 and 128799)"
        )
    _expect_distinct(begin, end)


def resolve_thinking_tokens(config: Any, encode: Encode | None) -> tuple[int, int]:
    """Return the (begin, end) ids of the config: its ids, else its tags, else the default tags.

    Args:
        config: an ``MTPDecodingConfig`` or a host's object with such fields.
        encode: text -> token ids without added special tokens; None if no tokenizer is loaded.

    Raises:
        ConfigError: a tag that is several tokens, no tokenizer to encode it, or begin equal to end.
    """
    options = getattr(config, "mtp", None)
    resolved = []
    for edge, default in (("begin", DEFAULT_BEGIN), ("end", DEFAULT_END)):
        token = read_thinking_token(config, edge)
        if token == NO_TOKEN:
            tag = getattr(options, f"{edge}_thinking_phase", None) or default
            token = _single_token(edge, tag, encode)
        resolved.append(token)
    begin, end = resolved
    _expect_distinct(begin, end)
    return begin, end


def names_thinking_tokens(config: Any) -> bool:
    """Whether a config sets any thinking token or tag."""
    options = getattr(config, "mtp", None)
    names = ("begin_thinking_phase", "end_thinking_phase", "thinking_end")
    return any(getattr(options, name, None) is not None for name in names) or any(
        read_thinking_token(config, edge) != NO_TOKEN for edge in ("begin", "end")
    )


def resolve_thinking_end(config: Any, encode: Encode | None) -> ThinkingEnd | None:
    """Return the thinking end for budgets: ids of the config, else its tags, else the default tags.

    Args:
        config: as :func:`resolve_thinking_tokens`; ``mtp.thinking_end`` has the ids of the end.
        encode: None if no tokenizer is loaded.

    Returns:
        None if the begin is not one token, or the end is unknown or too long.

    Raises:
        ConfigError: a ``thinking_end`` without a begin, or begin equal to the end token.
    """
    options = getattr(config, "mtp", None)
    edges = []
    for edge, default in (("begin", DEFAULT_BEGIN), ("end", DEFAULT_END)):
        token = read_thinking_token(config, edge)
        ids = [token] if token != NO_TOKEN else []
        if not ids and encode is not None:
            ids = list(encode(getattr(options, f"{edge}_thinking_phase", None) or default))
        edges.append(ids)
    begin, end = edges
    given = getattr(options, "thinking_end", None)
    if len(begin) != 1 or not (given or 1 <= len(end) <= MAX_THINKING_END):
        expect(
            given is None,
            ConfigError,
            f"thinking_end: {given} is forced after the token that begins thinking, and the "
            f"config and the tokenizer give {begin} for it; expected one id",
        )
        return None
    end_token = end[0] if len(end) == 1 else NO_TOKEN
    return ThinkingEnd(begin[0], tuple(given or end), end_token)


def _expect_distinct(begin: int, end: int) -> None:
    expect(
        begin != end,
        ConfigError,
        f"thinking tokens: begin and end must differ, both are {begin}",
    )


def _single_token(edge: str, tag: str, encode: Encode | None) -> int:
    if encode is None:
        raise ConfigError(
            f"{edge}_thinking_phase_token: no id is set and no tokenizer is loaded to look "
            f"{tag!r} up"
        )
    ids = encode(tag)
    if len(ids) != 1:
        raise ConfigError(
            f"{edge}_thinking_phase: {tag!r} must be one token of the tokenizer, it is "
            f"{len(ids)}: {ids}"
        )
    return ids[0]


def thinking_after(tokens: Sequence[int], begin: int, end: int) -> bool:
    """Whether a request is thinking after ``tokens``: the last thinking token decides."""
    for token in reversed(tokens):
        if token == begin:
            return True
        if token == end:
            return False
    return False
