"""Maps option names and values of other engines to those of `SamplingParams`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mtp_plugin.errors import SHOWN, format_value
from mtp_plugin.requests.options.option import (
    ANYTHING,
    MAX_BAD_WORD_LEN,
    MAX_RANGE,
    Option,
    integral,
    is_int,
    is_number,
    plain,
    unwrapped,
)

IGNORED_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    # Python: transformers, vLLM, TensorRT-LLM
    "additional_model_outputs": (None, [], ()),
    "apply_batched_logits_processor": (False,),
    "beam_search_diversity_rate": (None, 0, 1),
    "beam_width": (None, 1),
    "beam_width_array": (None, [], ()),
    "early_stopping": (None, False, True),
    "end_id": (None,),
    "exclude_input_from_output": (True,),
    "extra_args": (None, {}),
    "flat_logprobs": (False,),
    "logprob_token_ids": (None,),
    "logprobs_simple_format": (False,),
    "lookahead_config": (None,),
    "num_beams": (None, 1),
    "output_kind": (None, 0, 2),
    "output_text_buffer_length": (0,),
    "pad_id": (None, int),
    "prompt_logprob_start": (None,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprobs_simple_format": (False,),
    "repetition_detection": (None,),
    "return_context_logits": (False,),
    "return_encoder_output": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "return_token_ids": (None, False, True),
    "routed_experts_prompt_start": (0,),
    "skip_clone": (False, True),
    "skip_reading_prefix_cache": (None, False),
    "spaces_between_special_tokens": (True, False),  # no effect with fast tokenizers
    "stream_interval": (None,),
    "trace_decode_token_ids": (None,),
    "truncate_prompt_tokens": (None, -1),  # a prompt that is too long is refused by name
    # OpenAI
    "metadata": (object,),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (object,),
    "prediction": (object,),  # a text that a drafter may propose
    "prompt_cache_key": (None, str),
    "prompt_cache_retention": (None, str),
    "safety_identifier": (None, str),
    "service_tier": (object,),
    "store": (object,),
    "top_logprobs": (None, 0),
    "user": (object,),
    "verbosity": (None, str),
    # servers of vLLM and SGLang
    "cache_salt": (None, str),
    "echo": (None, False),
    "extra_key": (None, str),
    "include_reasoning": (None, True),
    "no_stop_trim": (None, False),
    "priority": (None, 0),
    "request_id": (None, str),
    "return_cached_tokens_details": (None, False),
    "return_hidden_states": (None, False),
    "return_meta_info": (None, False),
    "return_prompt_token_ids": (None, False),
    "return_routed_experts": (None, False),
    "return_token_offsets": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "rid": (None, str),
    "routed_experts_start_len": (0,),
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
    "suffix": (None, ""),
    # Megatron
    "detokenize_stop_sequence": (None, False),
    "num_tokens_total": (None,),
    "return_log_probs": (None, False),
    "return_prompt_tokens": (None, False),
    "return_prompt_top_n_logprobs": (None, False),
    "return_segments": (None, False),
    "skip_prompt_log_probs": (None, False, True),
    "termination_id": (None,),
    "top_n_logprobs": (None, 0),
}
"""Options that only other engines have, with the accepted values, which have no effect. A type
means every value of it."""

NO_END_ID = -1
"""TensorRT-LLM's ``end_id`` for ``ignore_eos=True``."""

WORDS_OF_TYPES: Mapping[type, str] = {int: "any integer", str: "any text", object: "anything"}
"""What a type among the accepted values means."""

MORE_NEUTRAL_VALUES: Mapping[str, Callable[[Any], bool]] = {
    "best_of": lambda count: is_int(count) and count == 0,
    "length_penalty": lambda penalty: isinstance(penalty, (int, float)) and penalty == 0,
    "logprobs": lambda number: number is False,
    "stop": lambda stop: isinstance(stop, str) and stop == "",
    "no_repeat_ngram_size": lambda size: is_int(size) and (size < 0 or size >= 1 << 30),
    "prompt_logprobs": lambda number: number is False,
    "thinking_token_budget": lambda budget: is_int(budget) and budget == -1,
    "top_p_min": lambda share: is_number(share) and share == 0,
}
"""Neutral values of other engines, in addition to the neutral value of the option."""

NONE_IS_DEFAULT = frozenset(
    {
        "min_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "prompt_ignore_length",
    }
)
"""Options for which None, as in TensorRT-LLM, means the default."""

RENAMED_OPTIONS: Mapping[str, str] = {
    "do_sample": "temperature, where 0 is greedy",
    "end_id": "stop_token_ids, or ignore_eos=True for none",
    "eos_token_id": "stop_token_ids",
    "max_completion_tokens": "max_new_tokens",
    "num_tokens_to_generate": "max_new_tokens",
    "num_tokens_total": "max_new_tokens, which counts the output alone",
    "max_length": "max_new_tokens, which counts the output alone",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "output_kind": "stream, whose events have the new tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "termination_id": "stop_token_ids, or ignore_eos=True for none",
    "top_logprobs": "logprobs",
    "top_n_logprobs": "logprobs",
    "return_log_probs": "logprobs",
}
"""Options of other engines -> the option to use instead."""


def _host_option(name: str, about: str, *host: str, **more: Any) -> Option:
    return Option(name, ANYTHING, about, host=host or (name,), **{"neutral": None, **more})


HOST_OPTIONS: tuple[Option, ...] = (
    _host_option(
        "py_return_context_logits", "logits of the prompt", host_neutral=lambda flag: not flag
    ),
    _host_option(
        "py_return_generation_logits", "logits of the output", host_neutral=lambda flag: not flag
    ),
    _host_option("py_additional_outputs", "additional outputs of the model"),
    _host_option("beam_width", "beam search", "config.beam_width", "py_beam_width", neutral=1),
    _host_option(
        "beam_width_array",
        "beam width per step",
        "config.beam_width_array",
        neutral=1,
        host_neutral=lambda widths: all(width == 1 for width in widths),
    ),
)
"""Options of TensorRT-LLM's requests that `SamplingParams` does not have."""


def named_here(
    given: dict[str, Any], options: Mapping[str, Option], names: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that are fields, and the problems of all names.

    A name of another engine is a problem unless its value changes nothing, and so is an option that
    is given under two names with different values. A None under another name counts as ours.
    """
    problems = []
    end_id = plain(given.get("end_id"))
    if is_int(end_id) and end_id == NO_END_ID:
        given = {**given, "end_id": None, "ignore_eos": True}
    for name in [name for name in given if name not in names]:
        if name not in IGNORED_OPTIONS:
            shown = name if len(name) <= SHOWN else format_value(name)
            problems.append(f"{shown}: unknown option; {_advice(name, options, names)}")
        elif (problem := ignored_problem(name, given[name])) is not None:
            problems.append(problem)
    named = {name: value for name, value in given.items() if name in names}
    for name, option in options.items():
        for other in option.elsewhere:
            ours, theirs = given.get(name), given.get(other)
            if other in given and theirs is None:
                named.setdefault(name, None)
            if not (is_unset(option, ours) or is_unset(option, theirs)) and not _is_same(
                ours, theirs
            ):
                problems.append(
                    f"{other}={format_value(theirs)} is {name} under another name, "
                    f"and {name}={format_value(ours)} is given as well"
                )
    return named, problems


def ignored_problem(name: str, value: Any) -> str | None:
    """Return why the value of one of `IGNORED_OPTIONS` is refused; None: it changes nothing."""
    value, neutral = plain(value), IGNORED_OPTIONS[name]
    if _is_one_of(value, neutral):
        return None
    expected = " or ".join(
        WORDS_OF_TYPES[each] if isinstance(each, type) else repr(each) for each in neutral
    )
    instead = f"; write {RENAMED_OPTIONS[name]}" if name in RENAMED_OPTIONS else ""
    return (
        f"{name}: expected {expected}, as nothing else is served, got {format_value(value)}"
        f"{instead}"
    )


def is_unset(option: Option, value: Any) -> bool:
    """Whether a value is unset, so that a value given under another name replaces it."""
    if value is None or option.is_neutral(value):
        return True
    is_empty = isinstance(value, (list, tuple, dict, str)) and not value
    return is_empty and option.values.allows(tuple(value) if isinstance(value, list) else value)


def to_tuples(value: Any) -> Any:
    """Convert nested lists to tuples of plain numbers, and a string to a tuple with one item.

    Anything else is returned unchanged.
    """
    if isinstance(value, str):
        return (value,)
    if isinstance(value, range):
        return value if value[MAX_RANGE:] else tuple(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_token_ids, value))
    return value


def _token_ids(value: Any) -> Any:
    if isinstance(value, range):
        return value if value[MAX_BAD_WORD_LEN:] else tuple(value)
    if isinstance(value, (list, tuple)):
        return tuple(integral(plain(each)) for each in value)
    return integral(plain(value))


def _is_same(ours: Any, theirs: Any) -> bool:
    try:
        return ours is theirs or bool(
            to_tuples(sparse_bias(ours)) == to_tuples(sparse_bias(theirs))
        )
    except Exception:  # for example arrays: values that cannot be compared are different
        return False


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    try:
        return type(value) in neutral or object in neutral or unwrapped(value) in neutral
    except Exception:  # for example arrays: values that cannot be compared are different
        return False


def sparse_bias(bias: Any) -> Any:
    """Convert a dense bias, a list or a tensor [V], to a mapping from ids to nonzero values; return
    everything else unchanged."""
    try:
        values = bias.tolist() if getattr(bias, "ndim", None) == 1 else bias
        if isinstance(values, list):
            values = [plain(value) for value in values]
            if all(map(is_number, values)):
                return {token: value for token, value in enumerate(values) if value != 0}
    except Exception:  # classes of other libraries may raise anything
        pass
    return bias


def _advice(name: str, options: Mapping[str, Option], names: Collection[str]) -> str:
    if name in RENAMED_OPTIONS:
        return f"write {RENAMED_OPTIONS[name]}"
    close = difflib.get_close_matches(name, [*names, *IGNORED_OPTIONS], n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(options)}"


_SEQUENCES = ("stop_token_ids", "stop", "allowed_token_ids", "bad_words", "bad_token_ids")


def normalize_values(
    given: Mapping[str, Any], options: Mapping[str, Option], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of `SamplingParams` with normalized names and types.

    Numbers become Python numbers and lists tuples; options under other engines' names are renamed,
    and their "not set" values become the default. Nothing is validated.

    Returns:
        The values, and the names of other engines under which options were given, by option.
    """
    values = {name: plain(value) for name, value in given.items()}
    spelled = _rename_options(values, options)
    for name, option in options.items():
        value, is_neutral = option.values.read(values[name]), MORE_NEUTRAL_VALUES.get(name)
        is_none = value is None and name in NONE_IS_DEFAULT
        is_default = is_none or (is_neutral is not None and is_neutral(value))
        values[name] = defaults[name] if is_default else value
    for name in _SEQUENCES:
        value = to_tuples(values[name])
        values[name] = () if value is None and options[name].neutral is not None else value
    values["logprobs_mode"] = unwrapped(values["logprobs_mode"])
    for name in ("logprobs", "prompt_logprobs"):
        if values[name] is True:
            values[name] = 1
    if is_int(values["top_k"]) and values["top_k"] == -1:
        values["top_k"] = 0
    bias = sparse_bias(values["logit_bias"])
    if isinstance(bias, dict):
        bias = {integral(plain(token)): plain(value) for token, value in bias.items()} or None
    values["logit_bias"] = bias
    for name, option in options.items():
        value = values[name]
        is_empty = isinstance(value, (list, tuple, dict, str)) and not value
        if option.values is ANYTHING and is_empty:
            values[name] = defaults[name]
    return values, spelled


def _rename_options(values: dict[str, Any], options: Mapping[str, Option]) -> dict[str, str]:
    spelled = {}
    for name, option in options.items():
        for other in option.elsewhere:
            ours, theirs = values[name], values[other]
            values[other] = None
            if theirs is not None and (is_unset(option, ours) or not is_unset(option, theirs)):
                values[name] = theirs
                spelled[name] = other
    return spelled
