"""The table of request options: every field of `SamplingParams` is a row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from mtp_plugin.errors import RequestError, format_value
from mtp_plugin.requests.options.option import (
    ANYTHING,
    BAD_WORDS,
    BIAS,
    FINITE,
    FLAG,
    IDS,
    INT32_MAX,
    LOGPROBS,
    NON_NEGATIVE,
    POSITIVE,
    SEED,
    SHARE,
    TEXTS,
    Float,
    Ids,
    IdsOrNone,
    Int,
    Option,
    Texts,
    Words,
    integer,
    one_of,
    row,
    unset_or,
)
from mtp_plugin.requests.options.rules import VERIFICATION, is_greedy, problems_of
from mtp_plugin.requests.options.spellings import named_here, normalize_values

# ruff: noqa: RUF009 (a function of ours gives a field, as ``dataclasses.field`` does)

LOGPROBS_MODE = "logprobs_mode"
"""Served if the config's is ``processed``, and then ``raw`` is not."""
_SPELLED = "_spelled"
"""Attribute with the names of other engines under which options were given, by our name."""

_ENABLE_RELAXED = "set speculative_config.use_relaxed_acceptance_for_thinking: true"
_WHERE = "sampling parameters: "
_Made = TypeVar("_Made")


def _checks_names(made: type[_Made]) -> type[_Made]:
    """Let a dataclass accept and check other engines' names too; its signature stays."""
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
    """The options of one request.

    Decoding is greedy with a ``temperature`` below 1e-5, ``top_k`` 1 or ``top_p`` 0, and when
    neither these nor ``min_p`` are set. With one of the others, an unset temperature is 1.

    Raises:
        RequestError: lists every wrong value and every unknown name.
    """

    # ---- stop conditions
    max_new_tokens: int | None = row(
        32,
        unset_or(integer(1)),
        "maximum number of generated tokens (default 32); None: up to max_seq_len",
        neutral=None,
        host_reads=("py_max_new_tokens",),
        elsewhere=("max_tokens",),
        differs="the default of max_tokens is 16 in vLLM",
    )
    min_tokens: Int = row(
        0,
        integer(0),
        "minimum number of generated tokens before an EOS id, stop id or stop string ends the "
        "output; ignored if allowed_token_ids leave nothing else",
        "config.min_length",
        differs="TensorRT-LLM masks EOS ids only",
        host_neutral=lambda length: length <= 1,
        edits_logits=True,
        own_kernel=True,
        column=int,
    )
    stop_token_ids: Ids = row(
        (),
        IDS,
        "token ids that end the output and are part of it",
        host_reads=("py_stop_words_list", "py_stop_ids"),
    )
    stop: Texts = row(
        (),
        TEXTS,
        "strings that end the output and are removed from it; one special token acts as a stop id "
        "unless skip_special_tokens is False",
        host_reads=("py_stop_words_list",),
        differs="TensorRT-LLM compares ids",
    )
    include_stop_str_in_output: bool = row(False, FLAG, "keep the stop string in the output")
    ignore_eos: bool = row(
        False,
        FLAG,
        "continue after the model's EOS ids",
        host_reads=("py_end_id",),
        differs="end_id=-1 in TensorRT-LLM, which is read too",
    )
    # ---- text
    skip_special_tokens: bool = row(
        True, FLAG, "leave special tokens out of the text of the output"
    )
    add_special_tokens: bool = row(
        True, FLAG, "add the tokenizer's special tokens (BOS) to a text prompt"
    )
    detokenize: bool = row(True, FLAG, "False: the output has token ids and no text")
    # ---- speculative decoding
    speculate: bool = row(
        True,
        FLAG,
        "False: no draft tokens for this request",
        host_reads=("py_disable_speculative_decoding",),
        elsewhere=("speculative",),
        of_drafts=True,
    )
    max_draft_len: int | None = row(
        None,
        unset_or(integer(0)),
        "maximum number of draft tokens per step; 0: none",
        of_drafts=True,
    )
    verification: str | None = row(
        None,
        VERIFICATION,
        "verification method; unset: the first one of the config",
        differs="only coupled inside TensorRT-LLM",
        of_drafts=True,
    )
    draft_sampling: str | None = row(
        None,
        one_of("coupled", "plain", "greedy"),
        "how draft tokens are sampled; unset: the default of the verification method",
        of_drafts=True,
    )
    relaxed_acceptance: bool = row(
        True,
        FLAG,
        "False: strict acceptance even if the config enables relaxed acceptance",
        "py_relaxed_acceptance",
        of_drafts=True,
    )
    relaxed_topk: int | None = row(
        None,
        unset_or(integer(1, INT32_MAX)),
        "relaxed acceptance: a draft is among this many most probable tokens",
        of_drafts=True,
        enabled_by=_ENABLE_RELAXED,
    )
    relaxed_delta: float | None = row(
        None,
        unset_or(NON_NEGATIVE),
        "relaxed acceptance: maximum difference to the highest probability",
        of_drafts=True,
        enabled_by=_ENABLE_RELAXED,
    )
    thinking_token_budget: int | None = row(
        None,
        unset_or(integer(0)),
        "maximum number of thinking tokens; the end-of-thinking sequence is forced after that; "
        "-1 or unset: no limit",
        edits_logits=True,
        own_kernel=True,
        column=int,
        empty=-1,
        elsewhere=("thinking_budget",),
        enabled_by="set begin_thinking_phase_token and end_thinking_phase_token of "
        "speculative_config, or use a tokenizer with <think> and </think>",
    )
    # ---- sampling
    temperature: float | None = row(
        None,
        unset_or(NON_NEGATIVE),
        "sampling temperature; below 1e-5 or unset: greedy",
        "config.temperature",
        draws=True,
        column=float,
        differs="the default is 1 in vLLM, which raises values below 0.01 to 0.01; TensorRT-LLM "
        "applies it before the additive penalties, and is greedy below 1e-4",
    )
    top_k: int | None = row(
        None,
        unset_or(integer(-1)),
        "sample from this many most probable tokens; 0, -1 or unset: all",
        "config.top_k",
        draws=True,
        column=int,
    )
    top_p: float | None = row(
        None,
        unset_or(SHARE),
        "nucleus sampling: keep the smallest set of tokens whose cumulative probability reaches "
        "top_p; 1 or unset: all",
        "config.top_p",
        draws=True,
        column=float,
        empty=1.0,
    )
    min_p: float | None = row(
        None,
        unset_or(SHARE),
        "keep tokens with at least this share of the highest probability; 0 or unset: all",
        "config.min_p",
        draws=True,
        column=float,
        host_neutral=lambda share: share == 0,
        differs="vLLM and newer TensorRT-LLM apply it before top-k and top-p, and so does the "
        "plugin inside them; 1 is greedy in the latter",
    )
    seed: int | None = row(
        None,
        unset_or(SEED),
        "seed of the random numbers, modulo 2**64",
        "config.random_seed",
        differs="if unset, 0 for every request in TensorRT-LLM; -1 is unset in vLLM",
        draws=True,
        elsewhere=("random_seed",),
    )
    # ---- logits processing
    repetition_penalty: Float = row(
        1.0,
        POSITIVE,
        "divides positive logits of tokens in prompt and output, multiplies negative ones",
        "config.repetition_penalty",
        edits_logits=True,
        column=float,
        empty=1.0,
    )
    presence_penalty: Float = row(
        0.0,
        FINITE,
        "subtracted from the logits of tokens that already appeared",
        "config.presence_penalty",
        edits_logits=True,
        column=float,
        differs="vLLM counts the output only",
    )
    frequency_penalty: Float = row(
        0.0,
        FINITE,
        "subtracted once per occurrence of the token",
        "config.frequency_penalty",
        edits_logits=True,
        column=float,
        differs="vLLM counts the output only",
    )
    prompt_ignore_length: Int = row(
        0,
        integer(0),
        "leading prompt tokens that presence and frequency penalty do not count",
        "config.prompt_ignore_length",
        edits_logits=True,
    )
    logit_bias: dict[int, float] | None = row(
        None,
        unset_or(BIAS),
        "added to the logits, by token id; or a dense list or tensor [V]",
        "embedding_bias",
        "py_embedding_bias",
        edits_logits=True,
        elsewhere=("embedding_bias",),
    )
    allowed_token_ids: IdsOrNone = row(
        None, unset_or(IDS), "the only token ids that are generated", edits_logits=True
    )
    bad_words: Words = row(
        (),
        BAD_WORDS,
        "words that are never generated",
        "py_bad_words",
        "bad_words_list",
        "py_bad_words_list",
        edits_logits=True,
        elsewhere=("bad",),
    )
    bad_token_ids: Ids = row(
        (),
        IDS,
        "token ids that are never generated",
        edits_logits=True,
        differs="words of one id in TensorRT-LLM's request",
    )
    # ---- log-probabilities
    logprobs: int | None = row(
        None,
        LOGPROBS,
        "log-probabilities of generated tokens and of the top k; True: 1",
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
        "log-probabilities of prompt tokens and of the top k; True: 1",
        differs="TensorRT-LLM sets py_return_context_logits for it",
    )
    logprobs_mode: str | None = row(
        None,
        one_of("raw", "processed"),
        "logits that log-probabilities of generated tokens are of; unset: mtp.logprobs_mode",
        "py_logprobs_mode",
        enabled_by="set speculative_config.mtp.logprobs_mode: processed",
        host_neutral=lambda mode: str(getattr(mode, "value", mode)).lower() == "raw",
    )
    # ---- split into requests by `LLM`
    n: int = row(
        1,
        integer(1),
        "number of sequences per prompt; `LLM` serves it, and the first is the output of n=1",
        "config.num_return_sequences",
        host_neutral=lambda count: count >= 1,
        differs="TensorRT-LLM splits it into requests, which are served; vLLM adds the index to "
        "the seed",
    )
    # ---- always refused
    best_of: int | None = row(
        None,
        ANYTHING,
        "number of sequences of which the best are returned",
        neutral=1,
        enabled_by="write n, and choose among outputs by their cumulative_logprob",
    )
    use_beam_search: bool = row(False, ANYTHING, "beam search")
    length_penalty: float | None = row(
        1.0,
        ANYTHING,
        "length penalty of beam search",
        "config.length_penalty",
        host_neutral=lambda penalty: penalty == 0,
    )
    no_repeat_ngram_size: int | None = row(
        None,
        ANYTHING,
        "size of n-grams that occur at most once",
        "config.no_repeat_ngram_size",
        neutral=0,
        host_neutral=lambda size: size <= 0 or size >= 1 << 30,
    )
    top_p_decay: float | None = row(
        None, ANYTHING, "decay of top_p", "config.top_p_decay", neutral=1
    )
    top_p_min: float | None = row(
        None,
        ANYTHING,
        "lower limit of the decay of top_p",
        "config.top_p_min",
        neutral=1e-6,
        host_neutral=lambda share: share == 0,
    )
    top_p_reset_ids: int | None = row(
        None, ANYTHING, "token ids that reset top_p", "config.top_p_reset_ids", neutral=-1
    )
    logits_processor: Any = row(
        None,
        ANYTHING,
        "logits processors",
        "py_logits_post_processors",
        elsewhere=("logits_processors",),
    )
    guided_decoding: Any = row(
        None,
        ANYTHING,
        "grammar or schema of the output",
        "guided_decoding_params",
        "py_guided_decoding_params",
        elsewhere=("structured_outputs",),
    )
    # ---- names in other engines, moved to the fields above
    max_tokens: int | None = None
    speculative: bool | None = None
    thinking_budget: int | None = None
    random_seed: int | None = None
    embedding_bias: Any = None
    bad: Any = None
    logits_processors: Any = None
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        values, spelled = normalize_values(vars(self), OPTIONS, _DEFAULTS)
        vars(self).update(values)  # the dataclass is frozen against its users
        problems = problems_of(values, OPTIONS, spelled)
        if problems:
            raise RequestError(_WHERE + "; ".join(problems))
        vars(self)[_SPELLED] = spelled

    @property
    def is_greedy(self) -> bool:
        """Whether the options describe greedy decoding."""
        return is_greedy(vars(self))

    def spelled(self, name: str) -> str:
        """Return the name under which an option was given: ours, or another engine's."""
        given: str = vars(self).get(_SPELLED, {}).get(name, name)
        return given

    def requested_options(self) -> dict[str, Any]:
        """Return the options that change something, by name.

        With log-probabilities their mode is included even if it is neutral.
        """
        values, ignores_sampling = vars(self), self.is_greedy
        requested = {
            name: values[name]
            for name, option in OPTIONS.items()
            if not (option.is_neutral(values[name]) or (option.draws and ignores_sampling))
        }
        if self.logprobs is None:
            requested.pop(LOGPROBS_MODE, None)
        return requested

    def without_drafts(self) -> SamplingParams:
        """Return the same options without those of speculative decoding."""
        unset = {name: option.neutral for name, option in OPTIONS.items() if option.of_drafts}
        return replace(self, **unset)

    def unsupported(self, served: Collection[str]) -> list[str]:
        """Return `unserved` of these options, in the user's spelling."""
        return unserved(self.requested_options(), served, self.spelled)


def unserved(
    requested: Mapping[str, Any], served: Collection[str], spelled: Callable[[str], str] = str
) -> list[str]:
    """Return ``name=value``, and what enables it, for every option that is not ``served``."""
    problems = []
    for name, value in requested.items():
        if name == LOGPROBS_MODE and value == "raw":
            if name in served:
                problems.append(
                    f"{name}={value!r} is not enabled; set speculative_config.mtp.{name}: raw"
                )
        elif name not in served:
            hint = OPTIONS[name].enabled_by
            why = f" is not enabled; {hint}" if hint else ""
            problems.append(f"{spelled(name)}={format_value(value)}{why}")
    return problems


OPTIONS: Mapping[str, Option] = {
    field.name: Option(field.name, **field.metadata["option"])
    for field in fields(SamplingParams)
    if field.metadata
}
"""The rows by name, in the order of the fields."""

_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
