"""The names and values by which other engines mean what stands in the table."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mtp_plugin.errors import SHOWN, told
from mtp_plugin.requests.options.limits import MAX_BAD_WORD_LEN, MAX_RANGE
from mtp_plugin.requests.options.option import Option
from mtp_plugin.requests.options.values import is_int, is_number, plain, unwrapped

NEUTRAL_ELSEWHERE: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "additional_model_outputs": (None, [], ()),
    "apply_batched_logits_processor": (False,),
    "beam_search_diversity_rate": (None, 0, 1),
    "beam_width": (None, 1),
    "beam_width_array": (None, [], ()),
    "detokenize": (True,),
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
    "pad_id": (None,),
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
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (None,),
    "trace_decode_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
}
"""Options of other engines alone, with the values that ask for what is done here; those of beams do
where there are none. Outputs come whole and have their ids, asked or not."""

READ_BY_NOBODY = frozenset({"pad_id"})
"""Ids of other engines that nothing here writes, whichever they are."""

NEUTRAL_TOO: Mapping[str, Callable[[Any], bool]] = {
    "best_of": lambda count: is_int(count) and count == 0,
    "length_penalty": lambda penalty: isinstance(penalty, (int, float)) and penalty == 0,
    "logprobs": lambda number: number is False,
    "no_repeat_ngram_size": lambda size: is_int(size) and (size < 0 or size >= 1 << 30),
    "prompt_logprobs": lambda number: number is False,
    "thinking_token_budget": lambda budget: is_int(budget) and budget == -1,
}
"""Values by which other engines mean that nothing is asked, beside those of the table."""

UNSET_ELSEWHERE = frozenset(
    {
        "min_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "prompt_ignore_length",
    }
)
"""Options that TensorRT-LLM's parameters leave at None, and mean what is presumed here."""

WRITTEN_HERE: Mapping[str, str] = {
    "do_sample": "temperature, where 0 is greedy",
    "end_id": "stop_token_ids, or ignore_eos=True for none",
    "eos_token_id": "stop_token_ids",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens, which counts the output alone",
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "output_kind": "stream, whose events tell what is new",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "top_logprobs": "logprobs",
}
"""Options of other engines and what stands for them here."""


def named_here(
    given: dict[str, Any], options: Mapping[str, Option], names: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """What is given under ``names``, a None under another name alone as one under ours; and what is
    wrong with names: those that there are not, all but such as change nothing, and options that are
    given under two with different values.
    """
    problems = []
    for name in [name for name in given if name not in names]:
        value, neutral = plain(given[name]), NEUTRAL_ELSEWHERE.get(name)
        if neutral is None:
            shown = name if len(name) <= SHOWN else told(name)
            problems.append(f"{shown}: unknown option; {_advice(name, options, names)}")
        elif not (_is_one_of(value, neutral) or (name in READ_BY_NOBODY and is_int(value))):
            expected = " or ".join(map(repr, neutral))
            instead = f"; write {WRITTEN_HERE[name]}" if name in WRITTEN_HERE else ""
            problems.append(
                f"{name}: expected {expected}, as nothing else is served, got {told(value)}"
                f"{instead}"
            )
    named = {name: value for name, value in given.items() if name in names}
    for name, option in options.items():
        for other in option.elsewhere:
            ours, theirs = given.get(name), given.get(other)
            if other in given and theirs is None:
                named.setdefault(name, None)
            if not (says_nothing(option, ours) or says_nothing(option, theirs)) and not _is_same(
                ours, theirs
            ):
                problems.append(
                    f"{other}={told(theirs)} is {name} under another name, and {name}={told(ours)} "
                    f"stands beside it"
                )
    return named, problems


def says_nothing(option: Option, value: Any) -> bool:
    """Whether an option that is given so is as good as left out, where another name has a value."""
    if value is None or option.is_neutral(value):
        return True
    is_empty = isinstance(value, (list, tuple, dict, str)) and not value
    return is_empty and option.values.allows(tuple(value) if isinstance(value, list) else value)


def in_order(value: Any) -> Any:
    """Lists, and those in them, as tuples of plain numbers; a text as the only one of a tuple; else
    the value."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, range):
        return value if value[MAX_RANGE:] else tuple(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_word, value))
    return value


def _word(value: Any) -> Any:
    """One of a list, which may be a list or a short range itself."""
    if isinstance(value, range):
        return value if value[MAX_BAD_WORD_LEN:] else tuple(value)
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else plain(value)


def _is_same(ours: Any, theirs: Any) -> bool:
    try:
        return ours is theirs or bool(in_order(by_id(ours)) == in_order(by_id(theirs)))
    except Exception:  # as of arrays: what cannot be compared is something else
        return False


def _is_one_of(value: Any, neutral: tuple[Any, ...]) -> bool:
    try:
        return unwrapped(value) in neutral
    except Exception:  # as of arrays: what cannot be compared is something else
        return False


def by_id(bias: Any) -> Any:
    """A bias that has one of each id, a list or a tensor, as the mapping of those that change
    something; all else as it is."""
    try:
        values = bias.tolist() if getattr(bias, "ndim", None) == 1 else bias
        if isinstance(values, list):
            values = [plain(value) for value in values]
            if all(map(is_number, values)):
                return {token: value for token, value in enumerate(values) if value != 0}
    except Exception:  # whatever the classes of others do
        pass
    return bias


def _advice(name: str, options: Mapping[str, Option], names: Collection[str]) -> str:
    """What to write instead of an unknown option."""
    if name in WRITTEN_HERE:
        return f"write {WRITTEN_HERE[name]}"
    close = difflib.get_close_matches(name, [*names, *NEUTRAL_ELSEWHERE], n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(options)}"
