"""A row of the table of request options: its range, its neutral value, and where it is read."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mtp_plugin.errors import INT32_MAX as INT32_MAX
from mtp_plugin.errors import format_value

GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy."""
MAX_BIAS_IDS = 1024
"""Ids of a ``logit_bias``."""
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LEN = 16
"""Bad words of a request, and tokens of each."""
MAX_LOGPROBS = 20
"""Top-k log-probabilities per token."""
MAX_RANGE = 2**20
"""Ids of a ``range``: more than any vocabulary has."""


@dataclass(frozen=True)
class Values:
    """The values that an option accepts, and how messages describe them."""

    words: str
    allows: Callable[[Any], bool]
    are_integers: bool = False
    """Whether a float without a fraction is read as an integer."""

    def read(self, value: Any) -> Any:
        """Convert a number to Python's own, and a float to the integer that it equals where
        integers are expected; return everything else unchanged."""
        return integral(plain(value)) if self.are_integers else plain(value)


def plain(value: Any) -> Any:
    """Convert a number of any kind, zero-dimensional arrays included, to Python's own; return
    everything else unchanged."""
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


def integral(value: Any) -> Any:
    """Return the integer that a float equals; everything else unchanged."""
    return int(value) if type(value) is float and value.is_integer() else value


def unwrapped(value: Any) -> Any:
    """Return the value of an enum member; everything else unchanged."""
    try:
        return getattr(value, "value", value)
    except Exception:  # whatever the classes of others do
        return value


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def integer(least: int, most: int | None = None) -> Values:
    words = f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
    return Values(
        words,
        lambda value: is_int(value) and least <= value and (most is None or value <= most),
        are_integers=True,
    )


def number(least: float, most: float, words: str) -> Values:
    # NaN is in no range
    return Values(words, lambda value: is_number(value) and least <= value <= most)


def one_of(*names: str) -> Values:
    def allows(value: Any) -> bool:
        return value is None or (isinstance(value, str) and value in names)

    return Values(f"one of {', '.join(names)}", allows)


def unset_or(values: Values) -> Values:
    return replace(values, allows=lambda value: value is None or values.allows(value))


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
NON_NEGATIVE = number(0, sys.float_info.max, "a number >= 0")
POSITIVE = Values("a finite number > 0", lambda value: FINITE.allows(value) and value > 0)
SHARE = number(0, 1, "a number from 0 to 1")
SEED = Values(
    "an integer from -2**63 to 2**64 - 1",
    lambda value: is_int(value) and -(2**63) <= value < 2**64,
    are_integers=True,
)
LOGPROBS = Values(
    f"an integer from 0 to {MAX_LOGPROBS}",
    lambda value: value is None or (is_int(value) and 0 <= value <= MAX_LOGPROBS),
    are_integers=True,
)


def is_bad_word(word: Any) -> bool:
    """Whether a bad word is a non-empty string or tuple of ids."""
    if isinstance(word, str):
        return word != ""
    return isinstance(word, tuple) and len(word) > 0 and IDS.allows(word)


def is_bias(value: Any) -> bool:
    """Whether a value is a mapping of token ids to finite numbers."""
    return isinstance(value, dict) and all(
        is_int(token) and token >= 0 and FINITE.allows(bias) for token, bias in value.items()
    )


BAD_WORDS = each("a sequence of strings, or of sequences of token ids, none empty", is_bad_word)
BIAS = Values("a mapping of token ids >= 0 to finite numbers", is_bias)


@dataclass(frozen=True)
class Option:
    """A row of the table: one option of a request."""

    name: str
    values: Values
    about: str
    """What it does, for documentation."""
    neutral: Any
    """The value that changes nothing."""
    host: tuple[str, ...] = ()
    """Where TensorRT-LLM's request has it: ``config.NAME`` (of its ``sampling_config``) or a field.
    The first that is present counts."""
    host_neutral: Callable[[Any], bool] | None = None
    """Accepts further values of the host's field that change nothing."""
    host_reads: tuple[str, ...] = ()
    """Fields of TensorRT-LLM's request that the stop rule and the drafter read, not admission."""
    draws: bool = False
    """Changes sampling: without effect when decoding is greedy."""
    of_drafts: bool = False
    """Changes drafting or verification: without effect without speculative decoding."""
    edits_logits: bool = False
    """Needs logits processing."""
    own_kernel: bool = False
    """With ``edits_logits``: a kernel of its own applies the option, logits processing skips it."""
    reads_logits: bool = False
    """Returns more of the logits than a token."""
    column: type[int] | type[float] | None = None
    """Type of its column in the slot table, which has the option's name; None: it has none."""
    empty: float = 0
    """Value of the column for a request without the option."""
    elsewhere: tuple[str, ...] = ()
    """Its names in other engines, which `SamplingParams` accepts too."""
    enabled_by: str = ""
    """What to do where the config does not enable the option; empty: nothing enables it."""
    differs: str = ""
    """How other engines differ, for documentation."""

    @property
    def beyond_first_choice(self) -> bool:
        """Whether the option needs more than the argmax of the logits."""
        return self.edits_logits or self.reads_logits or self.draws

    def is_neutral(self, value: Any) -> bool:
        """Whether a value changes nothing, also when a host holds it in float32."""
        if value is None:
            return True
        try:
            is_held = isinstance(self.neutral, float) and value == _single(self.neutral)
            return bool(is_held or value == self.neutral)
        except Exception:  # as of arrays: what cannot be compared is something else
            return False

    def problem(self, name: str, value: Any, *, is_required: bool = False) -> str | None:
        """Return why a value is refused, in one line, or None.

        Args:
            name: the option's name in the host engine.
            is_required: None is refused too.
        """
        if self.values.allows(value) and not (is_required and value is None):
            return None
        return f"{name}: expected {self.values.words}, got {format_value(value)}"


def _single(number: float) -> float:
    (held,) = struct.unpack("f", struct.pack("f", number))
    return float(held)


def row(default: Any, values: Values, about: str, *host: str, **more: Any) -> Any:
    """Return a dataclass field with a row of the table; ``more``: fields of `Option`."""
    more.setdefault("neutral", default)
    return field(
        default=default,
        metadata={"option": {"values": values, "about": about, "host": host, **more}},
    )


_Read = TypeVar("_Read", covariant=True)
_Given = TypeVar("_Given", contravariant=True)

if TYPE_CHECKING:

    class _As(Generic[_Read, _Given]):
        """For type checkers: a field that accepts more types than it returns."""

        def __get__(self, owner: object, kind: object) -> _Read: ...
        def __set__(self, owner: object, value: _Given) -> None: ...

    Int = _As[int, int | None]
    Float = _As[float, float | None]
    Ids = _As[tuple[int, ...], Sequence[int] | None]
    IdsOrNone = _As[tuple[int, ...] | None, Sequence[int] | None]
    Texts = _As[tuple[str, ...], str | Sequence[str] | None]
    Words = _As[tuple[str | tuple[int, ...], ...], str | Sequence[str | Sequence[int]] | None]
else:
    Int, Float = int, float
    Ids = tuple[int, ...]
    IdsOrNone = tuple[int, ...] | None
    Texts = tuple[str, ...]
    Words = tuple[str | tuple[int, ...], ...]
