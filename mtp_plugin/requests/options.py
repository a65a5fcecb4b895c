"""What a user may ask of one request."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from mtp_plugin.errors import RequestError
from mtp_plugin.requests.admission import is_greedy


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a user asks of one request. Decoding is greedy; options that would sample are refused.

    ``temperature`` None or 0, ``top_k`` 1 or ``top_p`` 0 mean greedy whatever stands beside them.
    """

    max_new_tokens: int = 128
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    speculate: bool = True  # False: every draft of this request is treated as absent
    relaxed_acceptance: bool = True  # False: strict, where the config allows relaxed acceptance
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_decoding: Any = None

    def __post_init__(self) -> None:
        for name in ("stop_token_ids", "stop", "bad_words"):
            value = getattr(self, name)
            if value is None or isinstance(value, list):
                object.__setattr__(self, name, tuple(value or ()))
        problems = self._problems()
        if problems:
            raise RequestError("sampling parameters: " + "; ".join(problems))

    @property
    def is_greedy(self) -> bool:
        """Whether the options describe greedy decoding."""
        return is_greedy(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
        )

    def unsupported(self) -> list[str]:
        """Every option that this executor does not run, as ``name=value``."""
        names = [
            "n",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "bad_words",
            "logprobs",
            "prompt_logprobs",
            "guided_decoding",
        ]
        if not self.is_greedy:
            names = ["temperature", "top_k", "top_p", "min_p", *names]
        defaults = {f.name: f.default for f in fields(self)}
        values = [(name, getattr(self, name)) for name in names]
        return [f"{name}={value!r}" for name, value in values if value != defaults[name]]

    def _problems(self) -> list[str]:
        problems = [
            f"{name} must be {words}, got {value!r}"
            for name, words, allows in _ALLOWED
            if not allows(value := getattr(self, name))
        ]
        counts = (self.min_tokens, self.max_new_tokens)
        if all(_is_int(count) for count in counts) and counts[0] > counts[1] >= 1:
            problems.append(f"min_tokens {counts[0]} is above max_new_tokens {counts[1]}")
        return problems


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(least: int, most: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: _is_int(value) and least <= value <= most


def _number(least: float, most: float = math.inf) -> Callable[[Any], bool]:
    # NaN is in no range
    return lambda value: (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    )


def _unset_or(allows: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or allows(value)


def _each(allows: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(allows(item) for item in value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _words(value: Any) -> bool:
    return isinstance(value, str) and value != ""


_ALLOWED: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("max_new_tokens", "an integer >= 1", _integer(1)),
    ("min_tokens", "an integer >= 0", _integer(0)),
    ("stop_token_ids", "a sequence of token ids >= 0", _each(_integer(0))),
    ("stop", "a sequence of strings that are not empty", _each(_words)),
    ("ignore_eos", "True or False", _flag),
    ("speculate", "True or False", _flag),
    ("relaxed_acceptance", "True or False", _flag),
    ("temperature", "a number >= 0", _unset_or(_number(0, sys.float_info.max))),
    ("top_k", "an integer >= 0", _unset_or(_integer(0))),
    ("top_p", "a number from 0 to 1", _unset_or(_number(0, 1))),
    ("min_p", "a number from 0 to 1", _unset_or(_number(0, 1))),
    ("seed", "an integer from 0 to 2**64 - 1", _unset_or(_integer(0, 2**64 - 1))),
    ("n", "an integer >= 1", _integer(1)),
)
