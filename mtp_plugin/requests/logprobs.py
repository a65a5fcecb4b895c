"""Log-probabilities of tokens, as kernels write them and as users read them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar, overload

import torch

from mtp_plugin.requests.options import MAX_LOGPROBS

TOKEN_PLACE, RANK_PLACE, VALUE_PLACE, TOP_IDS_PLACE = 0, 1, 2, 3
TOP_VALUES_PLACE = TOP_IDS_PLACE + MAX_LOGPROBS
ENTRY_WIDTH = TOP_VALUES_PLACE + MAX_LOGPROBS
"""int32 of an entry: a token (-1: there is none), its rank, its log-probability, the most likely
ids (-1: none), their log-probabilities; floats stand in it bit for bit."""


class Logprob(NamedTuple):
    """How likely a token was."""

    logprob: float
    rank: int  # 1: the most likely; of equals the lowest id comes first
    decoded_token: str | None = None  # its text, where somebody put it there


TokenLogprobs = dict[int, Logprob]
"""What is told of one token of a text: of itself, then of the most likely ones beside it."""

_Told_co = TypeVar("_Told_co", covariant=True)


class Ready(Protocol):
    """Tells when a copy to the host is over."""

    def synchronize(self) -> None: ...


class LogprobEntries:
    """What is told of some tokens in a row.

    Args:
        entries: [N, ENTRY_WIDTH] int32 on the host.
        num_top: most likely tokens to tell of each.
        ready: of the copy to the host; None: it is over.
    """

    def __init__(self, entries: torch.Tensor, num_top: int, ready: Ready | None = None) -> None:
        self._entries = entries
        self._num_top = num_top
        self._ready = ready

    def __len__(self) -> int:
        return int(self._entries.shape[0])

    def first(self, count: int) -> LogprobEntries:
        """What is told of the first ``count`` tokens."""
        return LogprobEntries(self._entries[:count], self._num_top, self._ready)

    @cached_property
    def told(self) -> list[TokenLogprobs]:
        """A mapping per token."""
        if self._ready is not None:
            self._ready.synchronize()
        numbers = self._entries.tolist()
        values = self._entries.contiguous().view(torch.float32).tolist()
        return [self._mapping(whole, real) for whole, real in zip(numbers, values, strict=True)]

    def _mapping(self, numbers: list[int], values: list[float]) -> TokenLogprobs:
        told = {numbers[TOKEN_PLACE]: Logprob(values[VALUE_PLACE], numbers[RANK_PLACE])}
        for place in range(self._num_top):
            token = numbers[TOP_IDS_PLACE + place]
            if token >= 0:
                # of the token itself the same stands there already
                told.setdefault(token, Logprob(values[TOP_VALUES_PLACE + place], place + 1))
        return told


class _ReadAsList(Sequence[_Told_co]):
    """A sequence that is indexed, compared and shown as the list of what it iterates over."""

    @abstractmethod
    def __iter__(self) -> Iterator[_Told_co]: ...

    @overload
    def __getitem__(self, place: int) -> _Told_co: ...

    @overload
    def __getitem__(self, place: slice) -> list[_Told_co]: ...

    def __getitem__(self, place: int | slice) -> _Told_co | list[_Told_co]:
        return list(self)[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class Logprobs(_ReadAsList[TokenLogprobs]):
    """What is told of every token of a text; mappings are made when they are read."""

    def __init__(self, parts: Sequence[LogprobEntries] = ()) -> None:
        self._parts = list(parts)

    def append(self, part: LogprobEntries) -> None:
        """Tell of the tokens that follow."""
        self._parts.append(part)

    def extend(self, others: Logprobs) -> None:
        """Tell of the tokens of another text, which follow."""
        self._parts += others._parts

    def first(self, count: int) -> Logprobs:
        """What is told of the first ``count`` tokens."""
        parts = []
        for part in self._parts:
            parts.append(part.first(count))
            count = max(count - len(part), 0)
        return Logprobs(parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for part in self._parts:
            yield from part.told


class PromptLogprobs(_ReadAsList["TokenLogprobs | None"]):
    """What is told of a prompt's tokens as far as they were scored: of the first, None."""

    def __init__(self) -> None:
        self._scored = Logprobs()

    def append(self, part: LogprobEntries) -> None:
        """Tell of the tokens that follow."""
        self._scored.append(part)

    def __len__(self) -> int:
        return 1 + len(self._scored)

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        yield None
        yield from self._scored
