"""Logits processing of one row, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tests.ops.sampling.example import rounded

UNKNOWN = -5
"""An unknown token, which no word contains."""
MOST = 65535


@dataclass(frozen=True)
class LogitsOptions:
    """The logits-processing options of a request; None: it has no row of that pool."""

    bias: Mapping[int, float] | None = None
    allowed: Collection[int] | None = None
    words: Sequence[tuple[int, ...]] | None = None
    counts: Mapping[int, int] | None = None
    seen: Collection[int] = ()
    """In addition to those that are counted."""
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    recent: Sequence[int] = ()
    """The last tokens of prompt and output."""
    stops: Sequence[int] = ()
    prompt_len: int = 0
    min_tokens: int = 0


@dataclass(frozen=True)
class Place:
    """The token that a row of logits samples."""

    options: LogitsOptions
    index: int
    """Index of the token."""
    before: Sequence[int] = field(default=())
    """The drafts before it."""


def banned(place: Place) -> set[int]:
    """Ids that must not come next: the ends of bad words, and stop ids that come too early, unless
    nothing else is allowed."""
    options = place.options
    text = (*options.recent, *place.before)
    ends = {
        word[-1]
        for word in options.words or ()
        if len(word) == 1 or text[-(len(word) - 1) :] == word[:-1]
    }
    early = set()
    if place.index < options.prompt_len + options.min_tokens:
        early = set(options.stops)
    if options.allowed is not None and not set(options.allowed) - ends - early:
        early = set()
    return ends | early


def without_banned(row: Sequence[float], place: Place) -> list[float]:
    """A row of logits while it is masked."""
    hidden = banned(place)
    return [-math.inf if token in hidden else value for token, value in enumerate(row)]


def edited(row: Sequence[float], place: Place, ids: Sequence[int] | None = None) -> list[float]:
    """A row of logits as tokens are sampled from it; every step is rounded to float32."""
    ids = range(len(row)) if ids is None else ids
    return [_edited(value, token, place) for value, token in zip(row, ids, strict=True)]


def _edited(value: float, token: int, place: Place) -> float:
    options, x = place.options, _usable(value)
    if options.bias is not None:
        x = _usable(rounded(x + rounded(options.bias.get(token, 0.0))))
    if options.allowed is not None and token not in options.allowed:
        x = -math.inf
    if options.counts is None:
        return x
    drafted = list(place.before).count(token)
    number = min(options.counts.get(token, 0) + drafted, MOST)
    repetition = rounded(options.repetition)
    if token in options.seen or number > 0:
        x = rounded(x / repetition) if x > 0 else rounded(x * repetition)
    if number > 0:
        x = rounded(x - rounded(options.presence))
        x = rounded(x - rounded(rounded(options.frequency) * number))
    return _usable(x)


def penalized(row: Sequence[float], place: Place) -> list[float]:
    """A row of logits after penalties in the order of SGLang, without early stop ids."""
    options = place.options
    early = 0 < options.min_tokens > place.index - options.prompt_len
    return [
        -math.inf if early and token in options.stops else _penalized(value, token, place)
        for token, value in enumerate(row)
    ]


def _penalized(value: float, token: int, place: Place) -> float:
    options = place.options
    if options.counts is None:
        return value
    number = min(options.counts.get(token, 0) + list(place.before).count(token), MOST)
    x = value
    if number > 0:
        x = rounded(x - rounded(options.presence))
        x = rounded(x - rounded(rounded(options.frequency) * number))
    if token in options.seen or number > 0:
        repetition = rounded(options.repetition)
        x = rounded(x / repetition) if x > 0 else rounded(x * repetition)
    return _usable(x)


def _usable(value: float) -> float:
    return -math.inf if math.isnan(value) else value
