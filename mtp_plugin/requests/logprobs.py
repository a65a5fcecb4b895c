"""Log-probabilities of tokens, as kernels write them and as users read them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar, overload

import torch

from mtp_plugin.requests.options import MAX_LOGPROBS

TOKEN_INDEX, RANK_INDEX, VALUE_INDEX, TOP_IDS_INDEX = 0, 1, 2, 3
TOP_VALUES_INDEX = TOP_IDS_INDEX + MAX_LOGPROBS
ENTRY_WIDTH = TOP_VALUES_INDEX + MAX_LOGPROBS
"""Number of int32 of an entry: token id (-1: none), rank, log-probability, top-k ids (-1: none) and
their log-probabilities; floats are stored bit for bit."""


class Logprob(NamedTuple):
    """Log-probability of a token."""

    logprob: float
    rank: int  # 1: the most likely; ties are ranked by ascending id
    decoded_token: str | None = None  # its text; None: there is no tokenizer


TokenLogprobs = dict[int, Logprob]
"""Log-probabilities at one position: of the token itself, then of the top-k tokens."""

_Item_co = TypeVar("_Item_co", covariant=True)


class Ready(Protocol):
    """Event of a copy to the host."""

    def synchronize(self) -> None: ...


class HostLogprobs:
    """Log-probabilities of consecutive tokens.

    Args:
        entries: [N, ENTRY_WIDTH] int32 on the host.
        num_top: number of top-k tokens per position.
        ready: event of the copy to the host; None: it is complete.
    """

    def __init__(self, entries: torch.Tensor, num_top: int, ready: Ready | None = None) -> None:
        self._entries = entries
        self._num_top = num_top
        self._ready = ready

    def __len__(self) -> int:
        return int(self._entries.shape[0])

    def first(self, count: int) -> HostLogprobs:
        """Return those of the first ``count`` tokens."""
        return HostLogprobs(self._entries[:count], self._num_top, self._ready)

    @cached_property
    def mappings(self) -> list[TokenLogprobs]:
        """One mapping per token."""
        if self._ready is not None:
            self._ready.synchronize()
        numbers = self._entries.tolist()
        values = self._entries.contiguous().view(torch.float32).tolist()
        return [self._mapping(whole, real) for whole, real in zip(numbers, values, strict=True)]

    def _mapping(self, numbers: list[int], values: list[float]) -> TokenLogprobs:
        logprobs = {numbers[TOKEN_INDEX]: Logprob(values[VALUE_INDEX], numbers[RANK_INDEX])}
        for index in range(self._num_top):
            token = numbers[TOP_IDS_INDEX + index]
            if token >= 0:
                logprobs.setdefault(token, Logprob(values[TOP_VALUES_INDEX + index], index + 1))
        return logprobs


class _ReadAsList(Sequence[_Item_co]):
    """A sequence that is indexed, compared and shown like the list of its items."""

    @abstractmethod
    def __iter__(self) -> Iterator[_Item_co]: ...

    @overload
    def __getitem__(self, index: int) -> _Item_co: ...

    @overload
    def __getitem__(self, index: slice) -> list[_Item_co]: ...

    def __getitem__(self, index: int | slice) -> _Item_co | list[_Item_co]:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type[list[_Item_co]], tuple[list[_Item_co]]]:
        """Pickle a list: the decoder of a tokenizer and the event of a copy cannot be pickled."""
        return list, (list(self),)


class Logprobs(_ReadAsList[TokenLogprobs]):
    """Log-probabilities of all output tokens; the mappings are created when they are read.

    Args:
        decode: returns the text of a token; None: ``decoded_token`` is None.
    """

    def __init__(
        self,
        parts: Sequence[HostLogprobs] = (),
        decode: Callable[[int], str | None] | None = None,
    ) -> None:
        self._parts = list(parts)
        self.decode = decode

    @classmethod
    def joined(cls, parts: Iterable[Logprobs | None]) -> Logprobs | None:
        """Return several parts as one; None: all of them are None."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        return cls([each for part in found for each in part._parts], found[-1].decode)

    def append(self, part: HostLogprobs) -> None:
        """Append those of the next tokens."""
        self._parts.append(part)

    def extend(self, others: Logprobs) -> None:
        """Append the log-probabilities of ``others``."""
        self._parts += others._parts

    def first(self, count: int) -> Logprobs:
        """Return those of the first ``count`` tokens."""
        parts = []
        for part in self._parts:
            parts.append(part.first(count))
            count = max(count - len(part), 0)
        return Logprobs(parts, self.decode)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for part in self._parts:
            if self.decode is None:
                yield from part.mappings
            else:
                yield from map(self._with_texts, part.mappings)

    def _with_texts(self, logprobs: TokenLogprobs) -> TokenLogprobs:
        decode = self.decode or (lambda _: None)
        return {
            token: each._replace(decoded_token=decode(token)) for token, each in logprobs.items()
        }


class PromptLogprobs(_ReadAsList["TokenLogprobs | None"]):
    """Log-probabilities of the prompt tokens scored so far; None for the first token."""

    def __init__(self, decode: Callable[[int], str | None] | None = None) -> None:
        self._scored = Logprobs(decode=decode)

    def append(self, part: HostLogprobs) -> None:
        """Append those of the next tokens."""
        self._scored.append(part)

    def __len__(self) -> int:
        return 1 + len(self._scored)

    def __iter__(self) -> Iterator[TokenLogprobs | None]:
        yield None
        yield from self._scored
