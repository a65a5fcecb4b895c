"""Which values an option takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from mtp_plugin.requests.options.limits import MAX_LOGPROBS


@dataclass(frozen=True)
class Values:
    """Which values an option takes."""

    words: str
    allows: Callable[[Any], bool]


def plain(value: Any) -> Any:
    """A number of any kind, those of arrays without a dimension too, as one of Python's own; all
    else as it is."""
    if value is None or type(value) in (int, float, bool, str, tuple):
        return value
    try:
        if getattr(value, "ndim", None) == 0:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, Real):
            return value
        return int(value) if isinstance(value, Integral) else float(value)
    except Exception:  # whatever the classes of others do
        return value


def unwrapped(value: Any) -> Any:
    """What a member of an enum stands for; all else as it is."""
    try:
        return getattr(value, "value", value)
    except Exception:  # whatever the classes of others do
        return value


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def integer(least: int) -> Values:
    return Values(f"an integer >= {least}", lambda value: is_int(value) and value >= least)


def number(least: float, most: float, words: str) -> Values:
    # NaN is in no range
    return Values(words, lambda value: is_number(value) and least <= value <= most)


def one_of(*names: str) -> Values:
    def allows(value: Any) -> bool:
        return value is None or (isinstance(value, str) and value in names)

    return Values(f"one of {', '.join(names)}", allows)


def unset_or(values: Values) -> Values:
    return Values(values.words, lambda value: value is None or values.allows(value))


def each(words: str, allows: Callable[[Any], bool]) -> Values:
    return Values(
        words, lambda value: isinstance(value, tuple) and all(allows(item) for item in value)
    )


FLAG = Values("True or False", lambda value: isinstance(value, bool))
ANYTHING = Values("anything", lambda value: True)  # noqa: ARG005
IDS = each("a sequence of token ids >= 0", lambda value: is_int(value) and value >= 0)
TEXTS = each(
    "a string or a sequence of strings, none empty",
    lambda text: isinstance(text, str) and text != "",
)
FINITE = number(-sys.float_info.max, sys.float_info.max, "a finite number")
LOGPROBS = Values(
    f"an integer from 0 to {MAX_LOGPROBS}",
    lambda value: value is None or (is_int(value) and 0 <= value <= MAX_LOGPROBS),
)


def is_word(word: Any) -> bool:
    """Whether a bad word is a text or some ids."""
    if isinstance(word, str):
        return word != ""
    return isinstance(word, tuple) and len(word) > 0 and IDS.allows(word)


def is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        is_int(token) and token >= 0 and FINITE.allows(bias) for token, bias in value.items()
    )
