"""The table of what a request may ask for.

`SamplingParams` is the table: every field carries its range, what it stands for where it changes
nothing, its name in TensorRT-LLM's requests and, where kernels read it, its column in the slot
table. Admission, error texts, documentation and the slot table follow from it. An option is served
where a sampler, a verification mode or an op lists its name: see ``served_options``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mtp_plugin.errors import RequestError


@dataclass(frozen=True)
class Values:
    """Which values an option takes."""

    words: str
    allows: Callable[[Any], bool]


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
    draws: bool = False
    """Says how a token is drawn: changes nothing where decoding is greedy."""
    edits_logits: bool = False
    """Asks for logits to be changed before tokens are taken from them."""
    column: type[int] | type[float] | None = None
    """Numbers of this kind stand in the slot table, under the option's name; None: no kernel reads
    it."""
    empty: float = 0
    """What stands there of a request that does not ask."""

    @property
    def changes_choice(self) -> bool:
        """A token may be another than the first choice of the logits: steps must be told."""
        return self.edits_logits or self.draws

    def is_neutral(self, value: Any) -> bool:
        """Whether a value changes nothing."""
        return value is None or value == self.neutral


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _integer(least: int, most: float = math.inf, words: str = "") -> Values:
    return Values(
        words or f"an integer >= {least}", lambda value: _is_int(value) and least <= value <= most
    )


def _number(least: float, most: float, words: str) -> Values:
    # NaN is in no range
    return Values(words, lambda value: _is_number(value) and least <= value <= most)


def _unset_or(values: Values) -> Values:
    return Values(values.words, lambda value: value is None or values.allows(value))


def _each(words: str, allows: Callable[[Any], bool]) -> Values:
    return Values(
        words, lambda value: isinstance(value, tuple) and all(allows(item) for item in value)
    )


_FLAG = Values("True or False", lambda value: isinstance(value, bool))
_ANYTHING = Values("anything", lambda value: True)  # noqa: ARG005
_IDS = _each("a sequence of token ids >= 0", lambda value: _is_int(value) and value >= 0)
_TEXTS = _each(
    "a sequence of strings that are not empty", lambda text: isinstance(text, str) and text != ""
)


# a function of ours that gives a field, as ``dataclasses.field`` does
# ruff: noqa: RUF009
def _option(default: Any, values: Values, about: str, *host: str, **more: Any) -> Any:
    """A field of the table; ``more``: as the fields of `Option`."""
    more.setdefault("neutral", default)
    return field(
        default=default,
        metadata={"option": {"values": values, "about": about, "host": host, **more}},
    )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a user asks of one request.

    ``temperature`` 0, ``top_k`` 1 or ``top_p`` 0 mean greedy whatever stands beside them, and so
    does none of these and no ``min_p``; an unset temperature beside one of the others is 1.

    Raises:
        RequestError: naming every value that cannot be.
    """

    # ---- when it ends
    max_new_tokens: int = _option(128, _integer(1), "tokens emitted at most", neutral=None)
    min_tokens: int = _option(
        0,
        _integer(0),
        "tokens before which no end id, stop id or stop string ends the text",
        "config.min_length",
        host_neutral=lambda length: length <= 1,
        edits_logits=True,
        column=int,
    )
    stop_token_ids: tuple[int, ...] = _option((), _IDS, "ids that end the text and stand in it")
    stop: tuple[str, ...] = _option((), _TEXTS, "strings that end the text and are cut off it")
    ignore_eos: bool = _option(False, _FLAG, "go on behind the model's end ids")
    # ---- how drafts are made and judged
    speculate: bool = _option(True, _FLAG, "False: every draft of this request counts as absent")
    relaxed_acceptance: bool = _option(
        True,
        _FLAG,
        "False: strict, where the config allows relaxed acceptance",
        "py_relaxed_acceptance",
    )
    # ---- how a token is drawn
    temperature: float | None = _option(
        None,
        _unset_or(_number(0, sys.float_info.max, "a number >= 0")),
        "of the distribution; 0 or unset: greedy",
        "config.temperature",
        draws=True,
        column=float,
    )
    top_k: int | None = _option(
        None,
        _unset_or(_integer(0)),
        "draw among so many ids; 0 or unset: all",
        "config.top_k",
        draws=True,
        column=int,
    )
    top_p: float | None = _option(
        None,
        _unset_or(_number(0, 1, "a number from 0 to 1")),
        "draw among the ids of this share; 1 or unset: all",
        "config.top_p",
        draws=True,
        column=float,
        empty=1.0,
    )
    min_p: float | None = _option(
        None,
        _unset_or(_number(0, 1, "a number from 0 to 1")),
        "draw among ids at least this likely beside the first; 0 or unset: all",
        "config.min_p",
        draws=True,
        column=float,
        host_neutral=lambda share: share == 0,
    )
    seed: int | None = _option(
        None,
        _unset_or(_integer(0, 2**64 - 1, "an integer from 0 to 2**64 - 1")),
        "of the draws",
        "config.random_seed",
        draws=True,
    )
    n: int = _option(1, _integer(1), "samples of the prompt", "config.num_return_sequences")
    # ---- what is done to the logits
    repetition_penalty: float = _option(
        1.0, _ANYTHING, "divides the logits of ids in text and prompt", "config.repetition_penalty"
    )
    presence_penalty: float = _option(
        0.0, _ANYTHING, "taken off the logits of ids in the text", "config.presence_penalty"
    )
    frequency_penalty: float = _option(
        0.0, _ANYTHING, "taken off per occurrence in the text", "config.frequency_penalty"
    )
    logit_bias: dict[int, float] | None = _option(
        None, _ANYTHING, "added to the logits of ids", "embedding_bias", "py_embedding_bias"
    )
    bad_words: tuple[str, ...] = _option(
        (), _ANYTHING, "words that are never written", "bad_words_list", "py_bad_words_list"
    )
    # ---- what is told beside the text
    logprobs: int | None = _option(
        None,
        _ANYTHING,
        "log-probabilities of emitted tokens",
        "py_return_log_probs",
        host_neutral=lambda flag: not flag,
    )
    prompt_logprobs: int | None = _option(None, _ANYTHING, "log-probabilities of the prompt")
    guided_decoding: Any = _option(
        None,
        _ANYTHING,
        "a grammar that the text follows",
        "guided_decoding_params",
        "py_guided_decoding_params",
    )

    def __post_init__(self) -> None:
        for name in ("stop_token_ids", "stop", "bad_words"):
            value = vars(self)[name]
            if value is None or isinstance(value, list):
                object.__setattr__(self, name, tuple(value or ()))
        problems = self._problems()
        if problems:
            raise RequestError("sampling parameters: " + "; ".join(problems))

    @property
    def is_greedy(self) -> bool:
        """Whether the options describe greedy decoding."""
        return is_greedy(vars(self))

    def asked(self) -> dict[str, Any]:
        """The options that change something, by name."""
        values, ignores_draws = vars(self), self.is_greedy
        return {
            name: values[name]
            for name, option in OPTIONS.items()
            if not (option.is_neutral(values[name]) or (option.draws and ignores_draws))
        }

    def unsupported(self, served: Collection[str]) -> list[str]:
        """Every option that changes something and is not ``served``, as ``name=value``."""
        return [f"{name}={value!r}" for name, value in self.asked().items() if name not in served]

    def _problems(self) -> list[str]:
        values = vars(self)
        problems = [
            f"{name} must be {option.values.words}, got {values[name]!r}"
            for name, option in OPTIONS.items()
            if not option.values.allows(values[name])
        ]
        counts = (self.min_tokens, self.max_new_tokens)
        if all(_is_int(count) for count in counts) and counts[0] > counts[1] >= 1:
            problems.append(f"min_tokens {counts[0]} is above max_new_tokens {counts[1]}")
        return problems


def is_greedy(values: Mapping[str, Any]) -> bool:
    """Whether options, by name, describe greedy decoding; None or left out: not given."""
    given = {name: values.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    if given["temperature"] == 0 or given["top_k"] == 1 or given["top_p"] == 0:
        return True
    return all(value is None for value in given.values())


OPTIONS: Mapping[str, Option] = {
    row.name: Option(row.name, **row.metadata["option"]) for row in fields(SamplingParams)
}
"""The table, by name, in the order of its fields."""


def _of_the_host(name: str, about: str, *host: str, **more: Any) -> Option:
    return Option(name, _ANYTHING, about, host=host or (name,), **{"neutral": None, **more})


HOST_OPTIONS: tuple[Option, ...] = (
    _of_the_host(
        "py_return_context_logits", "the prompt's logits", host_neutral=lambda flag: not flag
    ),
    _of_the_host(
        "py_return_generation_logits", "the logits of the text", host_neutral=lambda flag: not flag
    ),
    _of_the_host("py_logits_post_processors", "functions that change the logits"),
    _of_the_host("py_additional_outputs", "further outputs of the model"),
    _of_the_host("beam_width", "beams", "config.beam_width", "py_beam_width", neutral=1),
    _of_the_host("beam_width_array", "beams per step", "config.beam_width_array", neutral=1),
    _of_the_host("top_p_decay", "top_p falls by it", "config.top_p_decay", draws=True),
    _of_the_host(
        "no_repeat_ngram_size",
        "no so many tokens stand twice",
        "config.no_repeat_ngram_size",
        host_neutral=lambda size: size <= 0 or size >= 1 << 30,
    ),
)
"""What TensorRT-LLM's requests may ask for and `SamplingParams` does not have."""
