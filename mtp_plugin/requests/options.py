"""The table of what a request may ask for.

`SamplingParams` is the table: every field carries its range, what it stands for where it changes
nothing, its name in TensorRT-LLM's requests and, where kernels read it, its column in the slot
table. Admission, error texts, documentation and the slot table follow from it. An option is served
where a sampler, a verification mode or an op lists its name: see ``served_options``.
"""

from __future__ import annotations

import difflib
import functools
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mtp_plugin.errors import RequestError, told

MAX_BIAS_IDS = 1024
"""Ids that ``logit_bias`` of a request may name."""
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LEN = 16
"""Bad words of a request, and tokens of each."""
MAX_LOGPROBS = 20
"""Most likely tokens that may be told beside each."""


DRAFTS_OF_VERIFICATION: Mapping[str, tuple[str, ...]] = {
    "coupled": ("coupled", "greedy"),
    "rejection": ("plain", "greedy"),
    "block": ("plain", "greedy"),
}
"""How drafts may be drawn for what judges them; the first is presumed."""


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
    reads_logits: bool = False
    """Asks for more of the logits than a token."""
    column: type[int] | type[float] | None = None
    """Numbers of this kind stand in the slot table, under the option's name; None: no kernel reads
    it."""
    empty: float = 0
    """What stands there of a request that does not ask."""
    elsewhere: tuple[str, ...] = ()
    """Names that it has in other engines; `SamplingParams` takes them too."""
    differs: str = ""
    """For people: where another engine means or presumes something else."""

    @property
    def beyond_first_choice(self) -> bool:
        """Steps must be told: the first choice of the logits is not all that is asked for."""
        return self.edits_logits or self.reads_logits or self.draws

    def is_neutral(self, value: Any) -> bool:
        """Whether a value changes nothing."""
        if value is None:
            return True
        try:
            return bool(value == self.neutral)
        except Exception:  # as of arrays: what cannot be compared is something else
            return False


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


def _one_of(*names: str) -> Values:
    def allows(value: Any) -> bool:
        return value is None or (isinstance(value, str) and value in names)

    return Values(f"one of {', '.join(names)}", allows)


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
    "a string or a sequence of strings, none empty",
    lambda text: isinstance(text, str) and text != "",
)
_FINITE = _number(-sys.float_info.max, sys.float_info.max, "a finite number")
_LOGPROBS = Values(
    f"an integer from 0 to {MAX_LOGPROBS}",
    lambda value: value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS),
)


def _is_word(word: Any) -> bool:
    """Whether a bad word is a text or some ids."""
    if isinstance(word, str):
        return word != ""
    return isinstance(word, tuple) and len(word) > 0 and _IDS.allows(word)


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_int(token) and token >= 0 and _FINITE.allows(bias) for token, bias in value.items()
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


_Read = TypeVar("_Read", covariant=True)
_Given = TypeVar("_Given", contravariant=True)

if TYPE_CHECKING:

    class _As(Generic[_Read, _Given]):
        """To a checker: a field that takes more than it gives back."""

        def __get__(self, owner: object, kind: object) -> _Read: ...
        def __set__(self, owner: object, value: _Given) -> None: ...

    _Int = _As[int, int | None]
    _Float = _As[float, float | None]
    _Ids = _As[tuple[int, ...], Sequence[int] | None]
    _IdsOrNone = _As[tuple[int, ...] | None, Sequence[int] | None]
    _Texts = _As[tuple[str, ...], str | Sequence[str] | None]
    _Words = _As[tuple[str | tuple[int, ...], ...], str | Sequence[str | Sequence[int]] | None]
else:
    _Int, _Float = int, float
    _Ids = tuple[int, ...]
    _IdsOrNone = tuple[int, ...] | None
    _Texts = tuple[str, ...]
    _Words = tuple[str | tuple[int, ...], ...]

_NEUTRAL_ELSEWHERE: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "additional_model_outputs": (None, [], ()),
    "apply_batched_logits_processor": (False,),
    "beam_search_diversity_rate": (None, 0, 1),
    "beam_width_array": (None, [], ()),
    "detokenize": (True,),
    "early_stopping": (None, False, True),
    "end_id": (None,),
    "exclude_input_from_output": (True,),
    "extra_args": (None, {}),
    "flat_logprobs": (False,),
    "lookahead_config": (None,),
    "pad_id": (None,),
    "return_context_logits": (False,),
    "return_encoder_output": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (None,),
}
"""Options of other engines alone, with the values that ask for what is done here; those of beams do
where there are none."""

_NEUTRAL_TOO: Mapping[str, Callable[[Any], bool]] = {
    "length_penalty": lambda penalty: isinstance(penalty, (int, float)) and penalty == 0,
    "no_repeat_ngram_size": lambda size: _is_int(size) and size >= 1 << 30,
}
"""Values by which other engines mean that nothing is asked, beside those of the table."""

_UNSET_ELSEWHERE = frozenset(
    {
        "min_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "prompt_ignore_length",
    }
)
"""Options that TensorRT-LLM's parameters leave at None, and mean what is presumed here."""

_WRITTEN_HERE: Mapping[str, str] = {
    "do_sample": "temperature, where 0 is greedy",
    "eos_token_id": "stop_token_ids",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens, which counts the output alone",
    "num_beams": "use_beam_search",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "top_logprobs": "logprobs",
}
"""Options of other engines and what stands for them here."""

_Made = TypeVar("_Made")


def _checks_names(made: type[_Made]) -> type[_Made]:
    """Let a dataclass look over the names that it is made with; its signature stays."""
    make: Callable[..., None] = made.__init__

    @functools.wraps(make)
    def checked(self: _Made, /, *arguments: Any, **given: Any) -> None:
        make(self, *arguments, **_named_here(given))

    made.__init__ = checked  # type: ignore[assignment]
    return made


def _named_here(given: dict[str, Any]) -> dict[str, Any]:
    """The options of the table among those given, where the others change nothing.

    Raises:
        RequestError: naming every option that there is not, or that is given under two names with
            different values.
    """
    problems = []
    for name in [name for name in given if name not in _DEFAULTS]:
        value, neutral = given[name], _NEUTRAL_ELSEWHERE.get(name)
        if neutral is None:
            problems.append(f"{name}: unknown option; {_advice(name)}")
        elif value not in neutral:
            expected = " or ".join(map(repr, neutral))
            problems.append(
                f"{name}: expected {expected}, as nothing else is served, got {value!r}"
            )
    for name, option in OPTIONS.items():
        for other in option.elsewhere:
            ours, theirs = given.get(name), given.get(other)
            if not (theirs is None or option.is_neutral(ours) or ours == theirs):
                problems.append(
                    f"{other}={theirs!r} is {name} under another name, and {name}={ours!r} stands "
                    f"beside it"
                )
    if problems:
        raise RequestError("sampling parameters: " + "; ".join(problems))
    return {name: value for name, value in given.items() if name in _DEFAULTS}


def _advice(name: str) -> str:
    """What to write instead of an unknown option."""
    if name in _WRITTEN_HERE:
        return f"write {_WRITTEN_HERE[name]}"
    close = difflib.get_close_matches(name, [*_DEFAULTS, *_NEUTRAL_ELSEWHERE], n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(OPTIONS)}"


@_checks_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a user asks of one request.

    ``temperature`` 0, ``top_k`` 1 or ``top_p`` 0 mean greedy whatever stands beside them, and so
    does none of these and no ``min_p``; an unset temperature beside one of the others is 1.

    Raises:
        RequestError: naming every value that cannot be, and every name that there is not.
    """

    # ---- when it ends
    max_new_tokens: int = _option(
        32,
        _integer(1),
        "tokens emitted at most; 32 where nobody says",
        neutral=None,
        elsewhere=("max_tokens",),
        differs="vLLM presumes 16 as max_tokens",
    )
    min_tokens: _Int = _option(
        0,
        _integer(0),
        "tokens before which no end id, stop id or stop string ends the text",
        "config.min_length",
        host_neutral=lambda length: length <= 1,
        edits_logits=True,
        column=int,
    )
    stop_token_ids: _Ids = _option((), _IDS, "ids that end the text and stand in it")
    stop: _Texts = _option((), _TEXTS, "strings that end the text and are cut off it")
    include_stop_str_in_output: bool = _option(
        False, _FLAG, "leave the stop string that ended the text in it"
    )
    ignore_eos: bool = _option(False, _FLAG, "go on behind the model's end ids")
    # ---- how drafts are made and judged
    speculate: bool = _option(True, _FLAG, "False: every draft of this request counts as absent")
    max_draft_len: int | None = _option(
        None, _unset_or(_integer(0)), "drafts of this request in a step at most; 0: none"
    )
    verification: str | None = _option(
        None,
        _one_of("coupled", "rejection", "block"),
        "how drafts of this request are judged; unset: as the config says first",
        draws=True,
    )
    draft_sampling: str | None = _option(
        None,
        _one_of("coupled", "plain", "greedy"),
        "how drafts of this request are drawn; unset: as its verification wants them",
        draws=True,
    )
    relaxed_acceptance: bool = _option(
        True,
        _FLAG,
        "False: strict, where the config allows relaxed acceptance",
        "py_relaxed_acceptance",
    )
    relaxed_topk: int | None = _option(
        None, _unset_or(_integer(1)), "relaxed acceptance: a draft among so many stands"
    )
    relaxed_delta: float | None = _option(
        None,
        _unset_or(_number(0, sys.float_info.max, "a number >= 0")),
        "relaxed acceptance: so much less likely than the first choice stands",
    )
    thinking_token_budget: int | None = _option(
        None,
        _unset_or(_integer(0)),
        "tokens of thinking behind which its end is forced",
        edits_logits=True,
        column=int,
        empty=-1,
    )
    # ---- how a token is drawn
    temperature: float | None = _option(
        None,
        _unset_or(_number(0, sys.float_info.max, "a number >= 0")),
        "of the distribution; 0 or unset: greedy",
        "config.temperature",
        draws=True,
        column=float,
        differs="vLLM presumes 1; TensorRT-LLM applies it before the additive penalties",
    )
    top_k: int | None = _option(
        None,
        _unset_or(_integer(-1)),
        "draw among so many ids; 0, -1 or unset: all",
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
        differs="vLLM cuts by it before top-k and top-p",
    )
    seed: int | None = _option(
        None,
        _unset_or(
            Values(
                "an integer from -2**63 to 2**64 - 1",
                lambda value: _is_int(value) and -(2**63) <= value < 2**64,
            )
        ),
        "of the draws; modulo 2**64",
        "config.random_seed",
        draws=True,
        elsewhere=("random_seed",),
    )
    # ---- what is done to the logits
    repetition_penalty: _Float = _option(
        1.0,
        Values("a finite number > 0", lambda value: _FINITE.allows(value) and value > 0),
        "divides logits above 0 of ids in prompt and text, multiplies those below",
        "config.repetition_penalty",
        edits_logits=True,
        column=float,
        empty=1.0,
    )
    presence_penalty: _Float = _option(
        0.0,
        _FINITE,
        "taken off the logits of ids that were counted",
        "config.presence_penalty",
        edits_logits=True,
        column=float,
        differs="vLLM counts the text alone",
    )
    frequency_penalty: _Float = _option(
        0.0,
        _FINITE,
        "taken off for every time that an id was counted",
        "config.frequency_penalty",
        edits_logits=True,
        column=float,
        differs="vLLM counts the text alone",
    )
    prompt_ignore_length: _Int = _option(
        0,
        _integer(0),
        "tokens of the prompt that presence and frequency do not count",
        "config.prompt_ignore_length",
        edits_logits=True,
    )
    logit_bias: dict[int, float] | None = _option(
        None,
        _unset_or(Values("a mapping of token ids >= 0 to finite numbers", _is_bias)),
        "added to the logits of ids",
        "embedding_bias",
        "py_embedding_bias",
        edits_logits=True,
        elsewhere=("embedding_bias",),
    )
    allowed_token_ids: _IdsOrNone = _option(
        None, _unset_or(_IDS), "no other ids are written", edits_logits=True
    )
    bad_words: _Words = _option(
        (),
        _each("a sequence of strings, or of sequences of token ids, none empty", _is_word),
        "words that are never written",
        "py_bad_words",
        "bad_words_list",
        "py_bad_words_list",
        edits_logits=True,
        elsewhere=("bad",),
    )
    bad_token_ids: _Ids = _option((), _IDS, "ids that are never written", edits_logits=True)
    # ---- what is told beside the text
    logprobs: int | None = _option(
        None,
        _LOGPROBS,
        "log-probabilities of emitted tokens, and of so many most likely ones",
        "py_return_log_probs",
        host_neutral=lambda flag: not flag,
        reads_logits=True,
        column=int,
        empty=-1,
    )
    prompt_logprobs: int | None = _option(
        None, _LOGPROBS, "log-probabilities of the prompt, and of so many most likely tokens"
    )
    # ---- what stays refused
    n: int = _option(
        1,
        _integer(1),
        "samples of the prompt",
        "config.num_return_sequences",
        host_neutral=lambda count: count >= 1,
        differs="TensorRT-LLM makes a request of each sample, and these are served",
    )
    best_of: int | None = _option(None, _ANYTHING, "samples of which the best are told", neutral=1)
    use_beam_search: bool = _option(False, _ANYTHING, "beams")
    length_penalty: float | None = _option(
        1.0,
        _ANYTHING,
        "of beams",
        "config.length_penalty",
        host_neutral=lambda penalty: penalty == 0,
    )
    no_repeat_ngram_size: int | None = _option(
        None,
        _ANYTHING,
        "no so many tokens stand twice",
        "config.no_repeat_ngram_size",
        neutral=0,
        host_neutral=lambda size: size <= 0 or size >= 1 << 30,
    )
    top_p_decay: float | None = _option(
        None, _ANYTHING, "top_p falls by it", "config.top_p_decay", draws=True, neutral=1
    )
    top_p_min: float | None = _option(
        None, _ANYTHING, "top_p falls no further", "config.top_p_min", draws=True, neutral=1e-6
    )
    top_p_reset_ids: int | None = _option(
        None, _ANYTHING, "top_p begins anew", "config.top_p_reset_ids", draws=True, neutral=-1
    )
    logits_processor: Any = _option(
        None,
        _ANYTHING,
        "functions that change the logits",
        "py_logits_post_processors",
        elsewhere=("logits_processors",),
    )
    guided_decoding: Any = _option(
        None,
        _ANYTHING,
        "a grammar that the text follows",
        "guided_decoding_params",
        "py_guided_decoding_params",
        elsewhere=("structured_outputs",),
    )
    # ---- the names of other engines, which the fields above take over
    max_tokens: int | None = None
    random_seed: int | None = None
    embedding_bias: Any = None
    bad: Any = None
    logits_processors: Any = None
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        self._take_over_other_names()
        for name in _SEQUENCES:
            value = vars(self)[name]
            if isinstance(value, str):
                value = (value,)
            if isinstance(value, (list, tuple)):
                value = tuple(tuple(one) if isinstance(one, list) else one for one in value)
            elif value is None and OPTIONS[name].neutral is not None:
                value = ()
            self._set(name, value)
        for name, default in _DEFAULTS.items():
            value, is_neutral = vars(self)[name], _NEUTRAL_TOO.get(name)
            is_unset = value is None and name in _UNSET_ELSEWHERE
            if is_unset or (is_neutral is not None and is_neutral(value)):
                self._set(name, default)
        if _is_int(self.top_k) and self.top_k == -1:
            self._set("top_k", 0)
        if isinstance(self.logit_bias, dict):
            self._set("logit_bias", dict(self.logit_bias) or None)
        for name in _UNRANGED:
            if isinstance(vars(self)[name], (list, tuple, dict, str)) and not vars(self)[name]:
                self._set(name, _DEFAULTS[name])
        problems = self._problems()
        if problems:
            raise RequestError("sampling parameters: " + "; ".join(problems))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _take_over_other_names(self) -> None:
        """Move what was given under another engine's name to ours."""
        for name, option in OPTIONS.items():
            for other in option.elsewhere:
                value = vars(self)[other]
                if value is not None:
                    self._set(name, value)
                    self._set(other, None)

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
        return [
            f"{name}={told(value)}" for name, value in self.asked().items() if name not in served
        ]

    def _problems(self) -> list[str]:
        values = vars(self)
        problems = [
            f"{name} must be {option.values.words}, got {told(values[name])}"
            for name, option in OPTIONS.items()
            if not option.values.allows(values[name])
        ]
        counts = (self.min_tokens, self.max_new_tokens)
        if all(_is_int(count) for count in counts) and counts[0] > counts[1] >= 1:
            problems.append(f"min_tokens {told(counts[0])} is above max_new_tokens {counts[1]}")
        return problems or [*self._too_many(), *self._not_together()]

    def _too_many(self) -> Iterator[str]:
        """Lists that are longer than there is room for."""
        words = len(self.bad_words) + len(self.bad_token_ids)
        for name, count, most in (
            ("logit_bias", len(self.logit_bias or ()), MAX_BIAS_IDS),
            ("bad_words and bad_token_ids", words, MAX_BAD_WORDS),
        ):
            if count > most:
                yield f"{name}: at most {most} are served, got {count}"
        for word in self.bad_words:
            if isinstance(word, tuple) and len(word) > MAX_BAD_WORD_LEN:
                yield (
                    f"bad_words: at most {MAX_BAD_WORD_LEN} tokens of a word are served, got "
                    f"{len(word)}"
                )

    def _not_together(self) -> Iterator[str]:
        """Values that cannot stand beside each other."""
        if not self.is_greedy:
            for name in ("relaxed_topk", "relaxed_delta"):
                if vars(self)[name] is not None:
                    yield f"{name}={vars(self)[name]!r} needs greedy decoding, and this draws"
        if self.verification is not None and self.draft_sampling is not None:
            allowed = DRAFTS_OF_VERIFICATION[self.verification]
            if self.draft_sampling not in allowed:
                yield (
                    f"draft_sampling={self.draft_sampling!r} cannot be verified by "
                    f"{self.verification!r}, expected one of {', '.join(allowed)}"
                )
        if self.allowed_token_ids is not None:
            banned = {*self.bad_token_ids}
            banned.update(
                word[0] for word in self.bad_words if isinstance(word, tuple) and len(word) == 1
            )
            if banned.issuperset(self.allowed_token_ids):
                yield "allowed_token_ids: none is left beside bad_words and bad_token_ids"


def is_greedy(values: Mapping[str, Any]) -> bool:
    """Whether options, by name, describe greedy decoding; None or left out: not given."""
    given = {name: values.get(name) for name in ("temperature", "top_k", "top_p", "min_p")}
    if given["temperature"] == 0 or given["top_k"] == 1 or given["top_p"] == 0:
        return True
    return all(value is None for value in given.values())


OPTIONS: Mapping[str, Option] = {
    row.name: Option(row.name, **row.metadata["option"])
    for row in fields(SamplingParams)
    if row.metadata
}
"""The table, by name, in the order of its fields."""

_DEFAULTS = {row.name: row.default for row in fields(SamplingParams)}
_UNRANGED = tuple(name for name, option in OPTIONS.items() if option.values is _ANYTHING)
_SEQUENCES = ("stop_token_ids", "stop", "allowed_token_ids", "bad_words", "bad_token_ids")


def _of_the_host(name: str, about: str, *host: str, **more: Any) -> Option:
    return Option(name, _ANYTHING, about, host=host or (name,), **{"neutral": None, **more})


LOGPROBS_MODE = "py_logprobs_mode"

HOST_OPTIONS: tuple[Option, ...] = (
    _of_the_host(
        "py_return_context_logits", "the prompt's logits", host_neutral=lambda flag: not flag
    ),
    _of_the_host(
        "py_return_generation_logits", "the logits of the text", host_neutral=lambda flag: not flag
    ),
    _of_the_host(
        LOGPROBS_MODE,
        "which distribution log-probabilities are of; given as mtp.logprobs_mode says",
        host_neutral=lambda mode: str(getattr(mode, "value", mode)).lower() == "raw",
    ),
    _of_the_host("py_additional_outputs", "further outputs of the model"),
    _of_the_host("beam_width", "beams", "config.beam_width", "py_beam_width", neutral=1),
    _of_the_host("beam_width_array", "beams per step", "config.beam_width_array", neutral=1),
)
"""What TensorRT-LLM's requests may ask for and `SamplingParams` does not have."""
