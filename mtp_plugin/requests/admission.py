"""What a host's request asks for, and what of it its pieces do not give."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

from mtp_plugin.errors import RequestError
from mtp_plugin.requests.options import (
    HOST_OPTIONS,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    OPTIONS,
    Option,
    is_greedy,
)
from mtp_plugin.requests.stopping import stop_words

_CONFIG = "config."


class HostAsks(NamedTuple):
    """One option of a host's request that changes something."""

    option: Option
    field: str  # where the request has it, as `Option.host` says it
    value: Any

    def __str__(self) -> str:
        if isinstance(self.value, bool) or not isinstance(self.value, Real):
            return self.field.removeprefix(_CONFIG)
        return f"{self.option.host[0].removeprefix(_CONFIG)}={self.value}"


def _rows() -> Iterator[Option]:
    """Rows that hosts have: first those of fields, then those of the sampling config."""
    ours = [row for row in OPTIONS.values() if row.host]
    yield from (row for row in (*HOST_OPTIONS, *ours) if not row.host[0].startswith(_CONFIG))
    yield from (row for row in (*ours, *HOST_OPTIONS) if row.host[0].startswith(_CONFIG))


_ROWS = tuple(_rows())


def host_options(request: Any) -> list[HostAsks]:
    """What a request, as TensorRT-LLM holds it, asks for, in a fixed order.

    Args:
        request: with ``sampling_config``, whose fields are numbers, lists of one or None, and with
            fields of its own; one that is not there asks for nothing.
    """
    config = getattr(request, "sampling_config", None)
    asked = [_asked(request, config, row) for row in _ROWS]
    return [one for one in asked if one is not None]


def host_values(request: Any) -> dict[str, Any]:
    """What a request, as TensorRT-LLM holds it, asks for: by our names and in our form.

    Bad words are tuples of ids; a bias is a mapping, or the host's dense tensor as [V]. What cannot
    be read is left out: `unsupported_options` names it.
    """
    return {
        one.option.name: _read(one)
        for one in host_options(request)
        if one.option.name in OPTIONS and _problem(one) is None
    }


def unsupported_options(
    request: Any, *, always_greedy: bool = False, served: Collection[str] = ()
) -> list[str]:
    """Every option of a request, as TensorRT-LLM holds it, that would change its output, and every
    one with a value that cannot be.

    A temperature of 0, a top-k of 1, a top-p of 0, or none of these and no min-p: decoding is
    greedy, and how a token would be drawn does not matter.

    Args:
        request: as `host_options`.
        always_greedy: how a token would be drawn never matters.
        served: names of options that are given.

    Returns:
        ``name`` or ``name=value``, in a fixed order; of a value that cannot be what was expected
        too.
    """
    asked = host_options(request)
    ignores_draws = always_greedy or is_greedy({one.option.name: one.value for one in asked})
    told = []
    for one in asked:
        if one.option.draws and ignores_draws:
            continue
        if one.option.name not in served:
            told.append(str(one))
        elif (problem := _problem(one)) is not None:
            told.append(problem)
    return told


def _problem(one: HostAsks) -> str | None:
    """Why a value cannot be, if so."""
    try:
        _read(one)
    except RequestError as error:
        return f"{one.field.removeprefix(_CONFIG)}: {error}"
    return None


def _read(one: HostAsks) -> Any:
    """A host's value in our form.

    Raises:
        RequestError: one that cannot be; what was expected, and what came.
    """
    read = _READERS.get(one.option.name)
    if read is not None:
        return read(one.value)
    if isinstance(one.value, bool) or not isinstance(one.value, Real):
        return one.value
    value = int(one.value) if isinstance(one.value, Integral) else float(one.value)
    if not one.option.values.allows(value):
        raise RequestError(f"expected {one.option.values.words}, got {value!r}")
    return value


def _words(listed: Any) -> tuple[tuple[int, ...], ...]:
    try:
        words = tuple(tuple(int(token) for token in word) for word in stop_words(listed))
    except (TypeError, ValueError):
        words = ()
    if not OPTIONS["bad_words"].values.allows(words) or not words:
        raise RequestError(f"expected lists of token ids >= 0, none empty, got {listed!r}")
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"expected at most {MAX_BAD_WORDS} words, got {len(words)}")
    longest = max(map(len, words))
    if longest > MAX_BAD_WORD_LEN:
        raise RequestError(f"expected at most {MAX_BAD_WORD_LEN} tokens of a word, got {longest}")
    return words


def _bias(given: Any) -> Any:
    if isinstance(given, Mapping):
        biases = dict(given)
        if not OPTIONS["logit_bias"].values.allows(biases):
            raise RequestError(f"expected {OPTIONS['logit_bias'].values.words}, got {biases!r}")
        return biases
    shape = getattr(given, "shape", None)
    if shape is None or tuple(shape[:-1]) not in ((), (1,)) or len(shape) == 0:
        told = type(given).__name__ if shape is None else list(shape)
        raise RequestError(f"expected a tensor [V], got {told}")
    return given.reshape(-1)


def _top_k(count: Any) -> int:
    option = OPTIONS["top_k"]
    if not isinstance(count, Integral) or not option.values.allows(int(count)):
        raise RequestError(f"expected {option.values.words}, got {count!r}")
    return max(int(count), 0)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "bad_words": _words,
    "logit_bias": _bias,
    "top_k": _top_k,
}


def _asked(request: Any, config: Any, row: Option) -> HostAsks | None:
    """What the first field of a row that is there asks for, if anything."""
    for field in row.host:
        name = field.removeprefix(_CONFIG)
        value = getattr(request, field, None) if name == field else _first(config, name)
        if not _is_there(value):
            continue
        is_neutral = isinstance(value, Real) and row.is_neutral(value)
        if is_neutral or (row.host_neutral is not None and row.host_neutral(value)):
            return None
        return HostAsks(row, field, value)
    return None


def _first(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if isinstance(value, (list, tuple)):
        return value[0] if value else None
    return value


def _is_there(value: Any) -> bool:
    if getattr(value, "ndim", 1) == 0:  # a tensor of one number has no length
        return True
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)
