"""The table itself: `SamplingParams`, of which every field is a row."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from mtp_plugin.errors import RequestError, told
from mtp_plugin.requests.options.option import (
    Float,
    Ids,
    IdsOrNone,
    Int,
    Option,
    Texts,
    Words,
    row,
)
from mtp_plugin.requests.options.spellings import (
    NEUTRAL_TOO,
    UNSET_ELSEWHERE,
    by_id,
    in_order,
    named_here,
    says_nothing,
)
from mtp_plugin.requests.options.together import (
    DRAFTS_OF_VERIFICATION,
    is_greedy,
    not_together,
    too_many,
)
from mtp_plugin.requests.options.values import (
    ANYTHING,
    FINITE,
    FLAG,
    IDS,
    LOGPROBS,
    TEXTS,
    Values,
    each,
    integer,
    is_bias,
    is_int,
    is_word,
    number,
    one_of,
    plain,
    unset_or,
    unwrapped,
)

# ruff: noqa: RUF009 (a function of ours gives a field, as ``dataclasses.field`` does)

LOGPROBS_MODE = "logprobs_mode"
"""Served where the config's is ``processed``, and then no other is."""
_SPELLED = "_spelled"
"""Beside the fields: names that options were given under, by ours."""

_ENABLE_RELAXED = "set speculative_config.use_relaxed_acceptance_for_thinking: true"
_WHERE = "sampling parameters: "
_Made = TypeVar("_Made")


def _checks_names(made: type[_Made]) -> type[_Made]:
    """Let a dataclass look over the names that it is made with; its signature stays."""
    make: Callable[..., None] = made.__init__

    @functools.wraps(make)
    def checked(self: _Made, /, *arguments: Any, **given: Any) -> None:
        named, problems = named_here(given, OPTIONS, _DEFAULTS)
        try:
            make(self, *arguments, **named)
        except RequestError as error:
            problems.append(str(error).removeprefix(_WHERE))
        if problems:
            raise RequestError(_WHERE + "; ".join(problems))

    made.__init__ = checked  # type: ignore[assignment]
    return made


@_checks_names
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a user asks of one request.

    A ``temperature`` below 1e-5, ``top_k`` 1 or ``top_p`` 0 mean greedy whatever stands beside
    them, and so does none of these and no ``min_p``; an unset temperature beside one of the others
    is 1.

    Raises:
        RequestError: naming every value that cannot be, and every name that there is not.
    """

    # ---- when it ends
    max_new_tokens: int | None = row(
        32,
        unset_or(integer(1)),
        "tokens emitted at most; 32 where nobody says, None: as many as max_seq_len has room for",
        neutral=None,
        host_reads=("py_max_new_tokens",),
        elsewhere=("max_tokens",),
        differs="vLLM presumes 16 as max_tokens",
    )
    min_tokens: Int = row(
        0,
        integer(0),
        "tokens before which no end id, stop id or stop string ends the text, but where "
        "allowed_token_ids leave nothing else",
        "config.min_length",
        differs="TensorRT-LLM holds back end ids alone",
        host_neutral=lambda length: length <= 1,
        edits_logits=True,
        column=int,
    )
    stop_token_ids: Ids = row(
        (),
        IDS,
        "ids that end the text and stand in it",
        host_reads=("py_stop_words_list", "py_stop_ids"),
    )
    stop: Texts = row(
        (),
        TEXTS,
        "strings that end the text and are cut off it",
        host_reads=("py_stop_words_list",),
        differs="TensorRT-LLM compares ids",
    )
    include_stop_str_in_output: bool = row(
        False, FLAG, "leave the stop string that ended the text in it"
    )
    ignore_eos: bool = row(
        False, FLAG, "go on behind the model's end ids", host_reads=("py_end_id",)
    )
    # ---- how drafts are made and judged
    speculate: bool = row(
        True,
        FLAG,
        "False: every draft of this request counts as absent",
        host_reads=("py_disable_speculative_decoding",),
        of_drafts=True,
    )
    max_draft_len: int | None = row(
        None,
        unset_or(integer(0)),
        "drafts of this request in a step at most; 0: none",
        of_drafts=True,
    )
    verification: str | None = row(
        None,
        one_of(*DRAFTS_OF_VERIFICATION),
        "how drafts of this request are judged; unset: as the config says first",
        differs="inside TensorRT-LLM coupled alone",
        of_drafts=True,
    )
    draft_sampling: str | None = row(
        None,
        one_of("coupled", "plain", "greedy"),
        "how drafts of this request are drawn; unset: as its verification wants them",
        of_drafts=True,
    )
    relaxed_acceptance: bool = row(
        True,
        FLAG,
        "False: strict, where the config allows relaxed acceptance",
        "py_relaxed_acceptance",
        of_drafts=True,
    )
    relaxed_topk: int | None = row(
        None,
        unset_or(integer(1)),
        "relaxed acceptance: a draft among so many stands",
        of_drafts=True,
        enabled_by=_ENABLE_RELAXED,
    )
    relaxed_delta: float | None = row(
        None,
        unset_or(number(0, sys.float_info.max, "a number >= 0")),
        "relaxed acceptance: so much less likely than the first choice stands",
        of_drafts=True,
        enabled_by=_ENABLE_RELAXED,
    )
    thinking_token_budget: int | None = row(
        None,
        unset_or(integer(0)),
        "tokens of thinking behind which its end is forced; -1 or unset: it is not",
        edits_logits=True,
        column=int,
        empty=-1,
        enabled_by="set begin_thinking_phase_token and end_thinking_phase_token of "
        "speculative_config, or use a tokenizer with <think> and </think>",
    )
    # ---- how a token is drawn
    temperature: float | None = row(
        None,
        unset_or(number(0, sys.float_info.max, "a number >= 0")),
        "of the distribution; below 1e-5 or unset: greedy",
        "config.temperature",
        draws=True,
        column=float,
        differs="vLLM presumes 1, and takes 0.01 for all between 0 and that; TensorRT-LLM applies "
        "it before the additive penalties, and is greedy below 1e-4",
    )
    top_k: int | None = row(
        None,
        unset_or(integer(-1)),
        "draw among so many ids; 0, -1 or unset: all",
        "config.top_k",
        draws=True,
        column=int,
    )
    top_p: float | None = row(
        None,
        unset_or(number(0, 1, "a number from 0 to 1")),
        "draw among the ids of this share; 1 or unset: all",
        "config.top_p",
        draws=True,
        column=float,
        empty=1.0,
    )
    min_p: float | None = row(
        None,
        unset_or(number(0, 1, "a number from 0 to 1")),
        "draw among ids at least this likely beside the first; 0 or unset: all",
        "config.min_p",
        draws=True,
        column=float,
        host_neutral=lambda share: share == 0,
        differs="vLLM and newer TensorRT-LLM cut by it before top-k and top-p; 1 is greedy in the "
        "latter",
    )
    seed: int | None = row(
        None,
        unset_or(
            Values(
                "an integer from -2**63 to 2**64 - 1",
                lambda value: is_int(value) and -(2**63) <= value < 2**64,
            )
        ),
        "of the draws; modulo 2**64",
        "config.random_seed",
        differs="unset it is 0 for every request in TensorRT-LLM; -1 is unset in vLLM",
        draws=True,
        elsewhere=("random_seed",),
    )
    # ---- what is done to the logits
    repetition_penalty: Float = row(
        1.0,
        Values("a finite number > 0", lambda value: FINITE.allows(value) and value > 0),
        "divides logits above 0 of ids in prompt and text, multiplies those below",
        "config.repetition_penalty",
        edits_logits=True,
        column=float,
        empty=1.0,
    )
    presence_penalty: Float = row(
        0.0,
        FINITE,
        "taken off the logits of ids that were counted",
        "config.presence_penalty",
        edits_logits=True,
        column=float,
        differs="vLLM counts the text alone",
    )
    frequency_penalty: Float = row(
        0.0,
        FINITE,
        "taken off for every time that an id was counted",
        "config.frequency_penalty",
        edits_logits=True,
        column=float,
        differs="vLLM counts the text alone",
    )
    prompt_ignore_length: Int = row(
        0,
        integer(0),
        "tokens of the prompt that presence and frequency do not count",
        "config.prompt_ignore_length",
        edits_logits=True,
    )
    logit_bias: dict[int, float] | None = row(
        None,
        unset_or(Values("a mapping of token ids >= 0 to finite numbers", is_bias)),
        "added to the logits of ids; a list or tensor has one of each id",
        "embedding_bias",
        "py_embedding_bias",
        edits_logits=True,
        elsewhere=("embedding_bias",),
    )
    allowed_token_ids: IdsOrNone = row(
        None, unset_or(IDS), "no other ids are written", edits_logits=True
    )
    bad_words: Words = row(
        (),
        each("a sequence of strings, or of sequences of token ids, none empty", is_word),
        "words that are never written",
        "py_bad_words",
        "bad_words_list",
        "py_bad_words_list",
        edits_logits=True,
        elsewhere=("bad",),
    )
    bad_token_ids: Ids = row(
        (),
        IDS,
        "ids that are never written",
        edits_logits=True,
        differs="words of one id in TensorRT-LLM's request",
    )
    # ---- what is told beside the text
    logprobs: int | None = row(
        None,
        LOGPROBS,
        "log-probabilities of emitted tokens, and of so many most likely ones; True: 1",
        "py_return_log_probs",
        differs="0 is none in older releases of TensorRT-LLM; in newer ones, as here, the emitted "
        "token's",
        host_neutral=lambda flag: not flag,
        reads_logits=True,
        column=int,
        empty=-1,
    )
    prompt_logprobs: int | None = row(
        None,
        LOGPROBS,
        "log-probabilities of the prompt, and of so many most likely tokens; True: 1",
        differs="TensorRT-LLM asks for py_return_context_logits",
    )
    logprobs_mode: str | None = row(
        None,
        one_of("raw", "processed"),
        "what log-probabilities of emitted tokens are of; unset: as mtp.logprobs_mode says",
        "py_logprobs_mode",
        enabled_by="set speculative_config.mtp.logprobs_mode: processed",
        host_neutral=lambda mode: str(getattr(mode, "value", mode)).lower() == "raw",
    )
    # ---- what stays refused
    n: int = row(
        1,
        integer(1),
        "samples of the prompt",
        "config.num_return_sequences",
        host_neutral=lambda count: count >= 1,
        differs="TensorRT-LLM makes a request of each sample, and these are served",
    )
    best_of: int | None = row(None, ANYTHING, "samples of which the best are told", neutral=1)
    use_beam_search: bool = row(False, ANYTHING, "beams")
    length_penalty: float | None = row(
        1.0,
        ANYTHING,
        "of beams",
        "config.length_penalty",
        host_neutral=lambda penalty: penalty == 0,
    )
    no_repeat_ngram_size: int | None = row(
        None,
        ANYTHING,
        "no so many tokens stand twice",
        "config.no_repeat_ngram_size",
        neutral=0,
        host_neutral=lambda size: size <= 0 or size >= 1 << 30,
    )
    top_p_decay: float | None = row(
        None, ANYTHING, "top_p falls by it", "config.top_p_decay", neutral=1
    )
    top_p_min: float | None = row(
        None, ANYTHING, "top_p falls no further", "config.top_p_min", neutral=1e-6
    )
    top_p_reset_ids: int | None = row(
        None, ANYTHING, "top_p begins anew", "config.top_p_reset_ids", neutral=-1
    )
    logits_processor: Any = row(
        None,
        ANYTHING,
        "functions that change the logits",
        "py_logits_post_processors",
        elsewhere=("logits_processors",),
    )
    guided_decoding: Any = row(
        None,
        ANYTHING,
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
        for name, value in vars(self).items():
            self._set(name, plain(value))
        spelled = self._take_over_other_names()
        for name in _SEQUENCES:
            value = in_order(vars(self)[name])
            self._set(name, () if value is None and OPTIONS[name].neutral is not None else value)
        for name, default in _DEFAULTS.items():
            value, is_neutral = vars(self)[name], NEUTRAL_TOO.get(name)
            is_unset = value is None and name in UNSET_ELSEWHERE
            if is_unset or (is_neutral is not None and is_neutral(value)):
                self._set(name, default)
        self._set(LOGPROBS_MODE, unwrapped(self.logprobs_mode))
        for name in ("logprobs", "prompt_logprobs"):
            if vars(self)[name] is True:
                self._set(name, 1)
        if is_int(self.top_k) and self.top_k == -1:
            self._set("top_k", 0)
        bias = by_id(self.logit_bias)
        if isinstance(bias, dict):
            bias = {plain(token): plain(value) for token, value in bias.items()} or None
        self._set("logit_bias", bias)
        for name in _UNRANGED:
            if isinstance(vars(self)[name], (list, tuple, dict, str)) and not vars(self)[name]:
                self._set(name, _DEFAULTS[name])
        problems = self._problems(spelled)
        if problems:
            raise RequestError(_WHERE + "; ".join(problems))
        self._set(_SPELLED, spelled)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _take_over_other_names(self) -> dict[str, str]:
        """Move what was given under another engine's name to ours.

        Returns:
            Those names, by ours.
        """
        spelled = {}
        for name, option in OPTIONS.items():
            for other in option.elsewhere:
                ours, theirs = vars(self)[name], vars(self)[other]
                self._set(other, None)
                # beside what says nothing the other counts, whichever it is
                if theirs is not None and (
                    says_nothing(option, ours) or not says_nothing(option, theirs)
                ):
                    self._set(name, theirs)
                    spelled[name] = other
        return spelled

    @property
    def is_greedy(self) -> bool:
        """Whether the options describe greedy decoding."""
        return is_greedy(vars(self))

    def spelled(self, name: str) -> str:
        """The name under which an option was given: ours, or another engine's."""
        given: str = vars(self).get(_SPELLED, {}).get(name, name)
        return given

    def asked(self) -> dict[str, Any]:
        """The options that change something, by name; a mode of log-probabilities that are told
        among them, whichever it is."""
        values, ignores_draws = vars(self), self.is_greedy
        asked = {
            name: values[name]
            for name, option in OPTIONS.items()
            if not (option.is_neutral(values[name]) or (option.draws and ignores_draws))
        }
        if self.logprobs is None:
            asked.pop(LOGPROBS_MODE, None)
        return asked

    def without_drafts(self) -> SamplingParams:
        """The same, asked of who makes no drafts."""
        unset = {name: option.neutral for name, option in OPTIONS.items() if option.of_drafts}
        return replace(self, **unset)

    def unsupported(self, served: Collection[str]) -> list[str]:
        """As :func:`unserved`, of what this asks for, in the user's spelling."""
        return unserved(self.asked(), served, self.spelled)

    def _problems(self, spelled: Mapping[str, str]) -> list[str]:
        values = vars(self)
        wrong = [name for name, row in OPTIONS.items() if not row.values.allows(values[name])]
        sound = {**values, **{name: OPTIONS[name].neutral for name in wrong}}
        return [
            *(
                f"{spelled.get(name, name)} must be {OPTIONS[name].values.words}, got "
                f"{told(values[name])}"
                for name in wrong
            ),
            *too_many(sound, spelled),
            *not_together(sound, spelled),
        ]


def unserved(
    asked: Mapping[str, Any], served: Collection[str], spelled: Callable[[str], str] = str
) -> list[str]:
    """Every option, of those asked for by name, that is not ``served``, as ``name=value``."""
    told_of = []
    for name, value in asked.items():
        if name == LOGPROBS_MODE and value == "raw":
            if name in served:
                told_of.append(
                    f"{name}={value!r} is not enabled; set speculative_config.mtp.{name}: raw"
                )
        elif name not in served:
            hint = OPTIONS[name].enabled_by
            why = f" is not enabled; {hint}" if hint else ""
            told_of.append(f"{spelled(name)}={told(value)}{why}")
    return told_of


OPTIONS: Mapping[str, Option] = {
    field.name: Option(field.name, **field.metadata["option"])
    for field in fields(SamplingParams)
    if field.metadata
}
"""The table, by name, in the order of its fields."""

_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_UNRANGED = tuple(name for name, option in OPTIONS.items() if option.values is ANYTHING)
_SEQUENCES = ("stop_token_ids", "stop", "allowed_token_ids", "bad_words", "bad_token_ids")
