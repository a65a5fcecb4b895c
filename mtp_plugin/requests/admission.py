"""Read the options of a TensorRT-LLM request and find those that are not supported.

As in TensorRT-LLM, decoding is greedy with a temperature of 0, a top-k of 1 or a top-p of 0, and if
none of temperature, top-k, top-p and min-p is set. If one of them is set, the others have their
defaults: temperature 1, top-k 0 and top-p 1 (all tokens), min-p 0. Differences:

- MTP of API version 1.2 is always greedy there; here requests are sampled in every API version.
- One-model sampling of 1.3 reads an unset temperature with a top-k or a top-p as greedy; its
  documentation and this module read it as 1.
- Temperatures below 1e-4 are greedy there, sampled here. A min-p of 1 is greedy there; here tokens
  as likely as the argmax are sampled.
- An unset seed is 0 there for every request; here it is derived from the engine's seed.
- ``min_length`` masks EOS ids there; here also stop words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch

from mtp_plugin.errors import SHOWN, RequestError, format_value
from mtp_plugin.requests.options import (
    HOST_OPTIONS,
    LOGPROBS_MODE,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_BIAS_IDS,
    OPTIONS,
    Option,
    is_greedy,
)
from mtp_plugin.requests.stopping import stop_words

_CONFIG = "config."
_LOGPROBS = "py_return_log_probs"
_NUM_LOGPROBS = "py_num_logprobs"
_CONTEXT_LOGITS = "py_return_context_logits"
_PLAIN_WORDS = "py_bad_words"


class HostOption(NamedTuple):
    """An option of a host's request with a value that has an effect."""

    option: Option
    field: str  # name in the request, as in `Option.host`
    value: Any

    def __str__(self) -> str:
        name, value = self.field.removeprefix(_CONFIG), getattr(self.value, "value", self.value)
        if name == _CONTEXT_LOGITS:
            return f"{name} (of prompt_logprobs too)"
        if isinstance(value, str):
            return f"{name}={value if len(value) <= SHOWN else format_value(value)}"
        if isinstance(value, bool) or not isinstance(value, Real) or name == _LOGPROBS:
            return name
        return f"{self.option.host[0].removeprefix(_CONFIG)}={format_value(value)}"


def _rows() -> Iterator[Option]:
    """Yield the options of hosts: fields of the request, then of its sampling config."""
    ours = [row for row in OPTIONS.values() if row.host]
    yield from (row for row in (*HOST_OPTIONS, *ours) if not row.host[0].startswith(_CONFIG))
    yield from (row for row in (*ours, *HOST_OPTIONS) if row.host[0].startswith(_CONFIG))


_ROWS = tuple(_rows())


def host_options(request: Any) -> list[HostOption]:
    """Return the options of a TensorRT-LLM request that have an effect, in a fixed order.

    Args:
        request: has option fields and a ``sampling_config``, whose fields are numbers, lists of
            one number or None; missing fields are unset options.
    """
    config = getattr(request, "sampling_config", None)
    found = (_requested(request, config, row) for row in _ROWS)
    options = [one for one in found if one is not None]
    if all(one.field != _LOGPROBS for one in options):
        return [one for one in options if one.option.name != LOGPROBS_MODE]
    # the flag has a separate count; hosts without it return only the token itself
    number = getattr(request, _NUM_LOGPROBS, None)
    number = 0 if number is None else number
    return [one._replace(value=number) if one.field == _LOGPROBS else one for one in options]


def host_values(request: Any) -> dict[str, Any]:
    """Return the options of a TensorRT-LLM request under our names and in our form.

    Bad words are tuples of ids; a bias is a mapping, or the host's dense tensor as [V]. Sampling
    options of greedy requests are left out, and so are invalid values, which
    `unsupported_options` reports.
    """
    options = host_options(request)
    ignores_sampling = _is_greedy(options)
    return {
        one.option.name: _read(one)
        for one in options
        if one.option.name in OPTIONS
        and not (one.option.draws and ignores_sampling)
        and _problem(one) is None
    }


def unsupported_options(
    request: Any, *, always_greedy: bool = False, served: Collection[str] = ()
) -> list[str]:
    """Return the options of a TensorRT-LLM request that are not served or invalid.

    Sampling options of greedy requests are ignored.

    Args:
        request: see `host_options`.
        always_greedy: ignore sampling options of all requests.
        served: names of the options that are served.

    Returns:
        ``name`` or ``name=value``, in a fixed order; with what is expected for invalid values.
    """
    options = host_options(request)
    ignores_sampling = always_greedy or _is_greedy(options)
    problems = []
    for one in options:
        if one.option.draws and ignores_sampling:
            continue
        if one.option.name not in served:
            problems.append(str(one))
        elif (problem := _problem(one)) is not None:
            problems.append(problem)
    return problems


def _is_greedy(options: Sequence[HostOption]) -> bool:
    """Whether decoding is greedy; invalid values do not make it greedy."""
    return is_greedy(
        {one.option.name: one.value if _problem(one) is None else math.nan for one in options}
    )


def _problem(one: HostOption) -> str | None:
    """Return why a value is invalid, or None."""
    try:
        _read(one)
    except RequestError as error:
        return f"{one.field.removeprefix(_CONFIG)}: {error}"
    return None


def _read(one: HostOption) -> Any:
    """A host's value in our form.

    Raises:
        RequestError: one that cannot be; what was expected, and what came.
    """
    read = _plain_words if one.field == _PLAIN_WORDS else _READERS.get(one.option.name)
    if read is not None:
        return read(one.value)
    values = one.option.values
    value = values.read(one.value)
    if not values.allows(value):
        raise RequestError(f"expected {values.words}, got {format_value(value)}")
    return value


def _plain_words(listed: Any) -> tuple[tuple[int, ...], ...]:
    return _words(listed, are_plain=True)


def _words(listed: Any, *, are_plain: bool = False) -> tuple[tuple[int, ...], ...]:
    try:
        given = stop_words(listed, are_plain=are_plain)
        words = tuple(tuple(int(token) for token in word) for word in given)
    except Exception:  # whatever the values of a host do
        words = ()
    if not OPTIONS["bad_words"].values.allows(words) or not words:
        raise RequestError(
            f"expected lists of token ids >= 0, none empty, got {format_value(listed)}"
        )
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
            raise RequestError(
                f"expected {OPTIONS['logit_bias'].values.words}, got {format_value(biases)}"
            )
        if len(biases) > MAX_BIAS_IDS:
            raise RequestError(f"expected at most {MAX_BIAS_IDS} ids, got {len(biases)}")
        return biases
    if not isinstance(given, torch.Tensor):
        raise RequestError(f"expected a tensor [V], got {type(given).__name__}")
    if given.ndim == 0 or tuple(given.shape[:-1]) not in ((), (1,)):
        raise RequestError(f"expected a tensor [V], got {list(given.shape)}")
    return given.reshape(-1)


def _top_k(count: Any) -> int:
    option = OPTIONS["top_k"]
    value = option.values.read(count)
    if not option.values.allows(value):
        raise RequestError(f"expected {option.values.words}, got {format_value(value)}")
    return max(int(value), 0)


def _num_logprobs(number: Any) -> int:
    option = OPTIONS["logprobs"]
    if not isinstance(number, Integral) or not option.values.allows(int(number)):
        raise RequestError(
            f"expected {_NUM_LOGPROBS} to be {option.values.words}, got {format_value(number)}"
        )
    return int(number)


def _logprobs_mode(mode: Any) -> str:
    value = getattr(mode, "value", mode)
    name = value.lower() if isinstance(value, str) else None
    if name != "processed":
        raise RequestError(
            f"expected raw or processed, got {format_value(value if name is None else name)}"
        )
    return name


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "bad_words": _words,
    "logit_bias": _bias,
    "logprobs": _num_logprobs,
    LOGPROBS_MODE: _logprobs_mode,
    "top_k": _top_k,
}


def _requested(request: Any, config: Any, row: Option) -> HostOption | None:
    """Return the first set field of an option, or None if it has no effect."""
    for field in row.host:
        name = field.removeprefix(_CONFIG)
        value = getattr(request, field, None) if name == field else _alone(config, name)
        if not _is_there(value):
            continue
        return None if _is_neutral(row, value) else HostOption(row, field, value)
    return None


def _is_neutral(row: Option, value: Any) -> bool:
    if isinstance(value, Real) and row.is_neutral(value):
        return True
    try:
        return row.host_neutral is not None and bool(row.host_neutral(value))
    except Exception:  # not comparable, so it is not the neutral value
        return False


def _alone(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _is_there(value: Any) -> bool:
    if value is None:
        return False
    if getattr(value, "ndim", 1) == 0:  # a tensor of one number has no length
        return True
    try:
        return not hasattr(value, "__len__") or len(value) > 0
    except Exception:  # of classes, which have the method and no length
        return True
