"""A row of the table, and the field of a dataclass that makes one."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mtp_plugin.requests.options.values import Values


@dataclass(frozen=True)
class Option:
    """A row of the table."""

    name: str
    values: Values
    about: str
    """For people: what it does, in a few words."""
    neutral: Any
    """The value that changes nothing."""
    host: tuple[str, ...] = ()
    """Where TensorRT-LLM's request has it, the first that is there counts: ``config.NAME``, of its
    ``sampling_config``, or the name of a field of its own."""
    host_neutral: Callable[[Any], bool] | None = None
    """Further values under the host's name that change nothing there; None: no others."""
    host_reads: tuple[str, ...] = ()
    """Fields of TensorRT-LLM's request that say it, of which admission need not know: its rule of
    stopping and its drafts go by them."""
    draws: bool = False
    """Says how a token is drawn: changes nothing where decoding is greedy."""
    of_drafts: bool = False
    """Says how drafts are made or judged: who decodes without any does not read it."""
    edits_logits: bool = False
    """Asks for logits to be changed before tokens are taken from them."""
    reads_logits: bool = False
    """Asks for more of the logits than a token."""
    column: type[int] | type[float] | None = None
    """Numbers of this kind stand in the slot table, under the option's name; None: no kernel reads
    it."""
    empty: float = 0
    """What stands there of a request that does not ask."""
    elsewhere: tuple[str, ...] = ()
    """Names that it has in other engines; `SamplingParams` takes them too."""
    enabled_by: str = ""
    """What to do where the config does not enable the option; empty: nothing enables it."""
    differs: str = ""
    """For people: where another engine means or presumes something else."""

    @property
    def beyond_first_choice(self) -> bool:
        """Steps must be told: the first choice of the logits is not all that is asked for."""
        return self.edits_logits or self.reads_logits or self.draws

    def is_neutral(self, value: Any) -> bool:
        """Whether a value changes nothing, also as hosts hold it in float32."""
        if value is None:
            return True
        try:
            is_held = isinstance(self.neutral, float) and value == _single(self.neutral)
            return bool(is_held or value == self.neutral)
        except Exception:  # as of arrays: what cannot be compared is something else
            return False


def _single(number: float) -> float:
    (held,) = struct.unpack("f", struct.pack("f", number))
    return float(held)


def row(default: Any, values: Values, about: str, *host: str, **more: Any) -> Any:
    """A field of the table; ``more``: as the fields of `Option`."""
    more.setdefault("neutral", default)
    return field(
        default=default,
        metadata={"option": {"values": values, "about": about, "host": host, **more}},
    )


_Read = TypeVar("_Read", covariant=True)
_Given = TypeVar("_Given", contravariant=True)

if TYPE_CHECKING:

    class _As(Generic[_Read, _Given]):
        """To a checker: a field that takes more than it gives back."""

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
