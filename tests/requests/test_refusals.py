"""Values of request options, of a host's requests and of their parts that are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mtp_plugin.config import MTPDecodingConfig
from mtp_plugin.errors import MTPPluginError, RequestError
from mtp_plugin.requests.admission import host_values, unsupported_options
from mtp_plugin.requests.columns import (
    REQUEST_COLUMNS,
    SlotColumn,
    TableColumns,
    request_column,
)
from mtp_plugin.requests.options import OPTIONS, SamplingParams
from mtp_plugin.requests.slots import SlotManager
from mtp_plugin.requests.stopping import StopRule
from mtp_plugin.requests.thinking import (
    ThinkingEnd,
    read_thinking_token,
    resolve_thinking_end,
    resolve_thinking_tokens,
)

INF, NAN = math.inf, math.nan
MANY = dict.fromkeys(range(1025), 1.0)
IDS = "a sequence of token ids >= 0"
STRINGS = "a string or a sequence of strings, none empty"
WORDS = "a sequence of strings, or of sequences of token ids, none empty"
BIAS = "a mapping of token ids >= 0 to finite numbers"
SEEDS = "an integer from -2**63 to 2**64 - 1"
METHODS = "one of coupled, rejection, block, or the name of a registered method"

# fmt: off
RANGES: list[tuple[str, Any, str]] = [
    # option, value, what it must be; the message ends with the value
    ("max_new_tokens", 0, "an integer >= 1"),
    ("max_new_tokens", True, "an integer >= 1"),
    ("min_tokens", -1, "an integer >= 0"),
    ("stop", ("",), STRINGS),
    ("stop", (3,), STRINGS),
    ("stop_token_ids", (-1,), IDS),
    ("stop_token_ids", (True,), IDS),
    ("include_stop_str_in_output", 1, "True or False"),
    ("ignore_eos", "yes", "True or False"),
    ("skip_special_tokens", 0, "True or False"),
    ("add_special_tokens", "no", "True or False"),
    ("detokenize", 1, "True or False"),
    ("speculate", 1, "True or False"),
    ("max_draft_len", -1, "an integer >= 0"),
    ("verification", "strict", METHODS),
    ("draft_sampling", "beam", "one of coupled, plain, greedy"),
    ("relaxed_acceptance", None, "True or False"),
    ("relaxed_topk", 0, "an integer from 1 to 2147483647"),
    ("relaxed_topk", 2**31, "an integer from 1 to 2147483647"),
    ("relaxed_delta", -0.1, "a number >= 0"),
    ("thinking_token_budget", -2, "an integer >= 0"),
    ("temperature", -0.1, "a number >= 0"),
    ("temperature", NAN, "a number >= 0"),
    ("temperature", INF, "a number >= 0"),
    ("temperature", "hot", "a number >= 0"),
    ("top_k", -2, "an integer >= -1"),
    ("top_k", 1.5, "an integer >= -1"),
    ("top_k", np.array([3]), "an integer >= -1"),
    ("top_p", 1.1, "a number from 0 to 1"),
    ("top_p", -0.5, "a number from 0 to 1"),
    ("min_p", 2, "a number from 0 to 1"),
    ("seed", -(2**63) - 1, SEEDS),
    ("seed", 2**64, SEEDS),
    ("random_seed", 0.5, SEEDS),
    ("repetition_penalty", 0, "a finite number > 0"),
    ("presence_penalty", NAN, "a finite number"),
    ("frequency_penalty", "much", "a finite number"),
    ("prompt_ignore_length", -1, "an integer >= 0"),
    ("logit_bias", {-1: 2.0}, BIAS),
    ("logit_bias", {3: INF}, BIAS),
    ("logit_bias", {"3": 1.0}, BIAS),
    ("logit_bias", torch.ones(1, 2), BIAS),
    ("allowed_token_ids", (-1,), IDS),
    ("allowed_token_ids", range(10**30), IDS),
    ("bad_words", ("",), WORDS),
    ("bad_words", ((),), WORDS),
    ("bad_words", (range(2**24), range(2**24)), WORDS),
    ("bad", ((-3,),), WORDS),
    ("bad_token_ids", (0.5,), IDS),
    ("logprobs", -1, "an integer from 0 to 20"),
    ("logprobs", 21, "an integer from 0 to 20"),
    ("prompt_logprobs", 21, "an integer from 0 to 20"),
    ("logprobs_mode", "raw_logits", "one of raw, processed"),
    ("n", 0, "an integer >= 1"),
]
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens 9 is above max_new_tokens 8"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens 4 is above max_tokens 3"),
    ({"min_tokens": 10**5000}, "min_tokens an integer of 16610 bits is above max_new_tokens 32"),
    ({"seed": 10**5000}, f"seed must be {SEEDS}, got an integer of 16610 bits"),
    ({"temperature": 1, "verification": "block", "draft_sampling": "coupled"},
     "draft_sampling='coupled' cannot be verified by 'block', expected one of plain, greedy"),
    ({"temperature": 1, "verification": "coupled", "draft_sampling": "plain"},
     "draft_sampling='plain' cannot be verified by 'coupled', expected one of coupled, greedy"),
    ({"relaxed_topk": 3, "temperature": 0.5},
     "relaxed_topk=3 needs greedy decoding, and this request samples"),
    ({"relaxed_delta": 0.1, "top_p": 0.5},
     "relaxed_delta=0.1 needs greedy decoding, and this request samples"),
    ({"relaxed_delta": 0.0, "relaxed_topk": 3, "relaxed_acceptance": False},
     "relaxed_topk=3 contradicts relaxed_acceptance=False; relaxed_delta=0.0 contradicts "
     "relaxed_acceptance=False"),
    ({"max_tokens": np.bool_(True)}, "max_tokens must be an integer >= 1, got True"),
    ({"embedding_bias": [0, -INF]}, f"embedding_bias must be {BIAS}, got {{1: -inf}}"),
    ({"embedding_bias": torch.ones(1025)}, "embedding_bias: at most 1024 are served, got 1025"),
    ({"logit_bias": MANY}, "logit_bias: at most 1024 are served, got 1025"),
    ({"allowed_token_ids": [3, 4], "bad_token_ids": [3], "bad_words": [[4]]},
     "allowed_token_ids: none is left without bad_words and bad_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids: names no id"),
    ({"bad": [[1]] * 65}, "bad and bad_token_ids: at most 64 are served, got 65"),
    ({"bad_words": [[1]] * 60, "bad_token_ids": [2] * 5},
     "bad_words and bad_token_ids: at most 64 are served, got 65"),
    ({"bad_words": [[1] * 17]}, "bad_words: at most 16 tokens of a word are served, got 17"),
    ({"stop": "12", "stop_token_ids": "12"}, f"stop_token_ids must be {IDS}, got ('12',)"),
    # one option under two names
    ({"seed": 3, "random_seed": 4},
     "random_seed=4 is seed under another name, and seed=3 is given as well"),
    ({"max_new_tokens": 32, "max_tokens": 9},
     "max_tokens=9 is max_new_tokens under another name, and max_new_tokens=32 is given as well"),
    ({"seed": 3, "random_seed": []},
     "random_seed=[] is seed under another name, and seed=3 is given as well..."),
    ({"seed": 3, "random_seed": 10**5000},
     "random_seed=an integer of 16610 bits is seed under another name, and seed=3 is given as well"
     f"; random_seed must be {SEEDS}, got an integer of 16610 bits"),
    ({"bad": ["a"], "bad_words": ["x" * 10**5]},
     f"bad=['a'] is bad_words under another name, and bad_words=['{'x' * 200}'...] is given as "
     "well"),
    ({"logit_bias": np.ones(2), "embedding_bias": 2 * np.ones(2)},
     "embedding_bias=array([2., 2.]) is logit_bias under another name, and "
     "logit_bias=array([1., 1.]) is given as well"),
    # names that there are not: those that end with ... only begin so
    ({"max_token": 3}, "max_token: unknown option; did you mean max_tokens?"),
    ({"Temperature": 1}, "Temperature: unknown option; did you mean temperature?"),
    ({"max_length": 9}, "max_length: unknown option; write max_new_tokens, which counts..."),
    ({"stop_sequences": "x"}, "stop_sequences: unknown option; write stop"),
    ({"min_length": 3}, "min_length: unknown option; write min_tokens"),
    ({"zzz": 1}, "zzz: unknown option; expected one of max_new_tokens, min_tokens, ..."),
    ({"x" * 10**5: 1}, f"'{'x' * 200}'...: unknown option; expected one of ..."),
    ({"topp": 0.9, "topk": 3}, "topp: unknown option; did you mean top_p?; topk: unknown..."),
    # every reason at once, and no guesses about conflicts of an invalid value
    ({"max_token": 3, "temperature": -1, "stop": ("x", 3)},
     "max_token: unknown option; did you mean max_tokens?; "
     f"stop must be {STRINGS}, got ('x', 3); temperature must be a number >= 0, got -1"),
    ({"beam_width": 4, "seed": 3, "random_seed": 4, "top_k": -2, "allowed_token_ids": []},
     "beam_width: expected None or 1, as nothing else is served, got 4; random_seed=4 is seed "
     "under another name, and seed=3 is given as well; top_k must be an integer >= -1, got -2; "
     "allowed_token_ids: names no id"),
    ({"temperature": "hot", "relaxed_topk": 3, "relaxed_acceptance": False, "min_tokens": 50,
      "max_tokens": 40, "logit_bias": MANY},
     "temperature must be a number >= 0, got 'hot'; logit_bias: at most 1024 are served, got 1025; "
     "min_tokens 50 is above max_tokens 40; relaxed_topk=3 contradicts relaxed_acceptance=False"),
    ({"max_tokens": 0, "min_tokens": 50, "verification": "x", "draft_sampling": "plain"},
     f"max_tokens must be an integer >= 1, got 0; verification must be {METHODS}, got 'x'"),
]
HOST: list[tuple[dict[str, Any], str]] = [
    # fields of a host's request, those of its sampling config by "config.NAME"
    ({"config.repetition_penalty": [0.0]}, "repetition_penalty: expected a finite number > 0"),
    ({"config.repetition_penalty": Fraction(10**400)}, "repetition_penalty: expected a finite n"),
    ({"config.presence_penalty": [INF]}, "presence_penalty: expected a finite number"),
    ({"config.presence_penalty": [[1.0]]}, "presence_penalty: expected a finite number, got [1.0]"),
    ({"config.frequency_penalty": NAN}, "frequency_penalty: expected a finite number"),
    ({"config.prompt_ignore_length": [-2]}, "prompt_ignore_length: expected an integer >= 0"),
    ({"config.min_length": [8.5]}, "min_length: expected an integer >= 0"),
    ({"config.min_length": ["5"]}, "min_length: expected an integer >= 0, got '5'"),
    ({"config.temperature": [-1.0]}, "temperature: expected a number >= 0"),
    ({"config.temperature": "hot"}, "temperature: expected a number >= 0, got 'hot'"),
    ({"config.temperature": [True]}, "temperature: expected a number >= 0, got True"),
    ({"config.temperature": torch.ones(2)}, "temperature: expected a number >= 0, got tensor("),
    ({"config.top_k": [2.5]}, "top_k: expected an integer >= -1"),
    ({"config.top_p": [1.5]}, "top_p: expected a number from 0 to 1"),
    ({"config.min_p": ["0"]}, "min_p: expected a number from 0 to 1, got '0'"),
    ({"config.temperature": 1.0, "config.random_seed": 2**64}, "random_seed: expected an integer "),
    ({"config.temperature": 1.0, "config.random_seed": ["7"]}, "random_seed: expected an integer "),
    ({"py_relaxed_acceptance": "no"}, "py_relaxed_acceptance: expected True or False, got"),
    ({"embedding_bias": np.ones(3)}, "embedding_bias: expected a tensor [V], got ndarray"),
    ({"embedding_bias": torch.zeros(2, 3)}, "embedding_bias: expected a tensor [V], got [2, 3]"),
    ({"embedding_bias": torch.tensor(1.0)}, "embedding_bias: expected a tensor [V], got []"),
    ({"py_embedding_bias": "x"}, "py_embedding_bias: expected a tensor [V], got str"),
    ({"embedding_bias": {3: INF}},
     "embedding_bias: expected a mapping of token ids >= 0 to finite numbers"),
    ({"embedding_bias": MANY}, "embedding_bias: expected at most 1024 ids, got 1025"),
    ({"bad_words_list": [[5, -1]]}, "bad_words_list: expected lists of token ids >= 0"),
    ({"bad_words_list": 7}, "bad_words_list: expected lists of token ids >= 0"),
    ({"py_bad_words": [[5], []]}, "py_bad_words: expected lists of token ids >= 0"),
    ({"py_bad_words_list": [[n] for n in range(65)]},
     "py_bad_words_list: expected at most 64 words, got 65"),
    ({"py_bad_words_list": [[1] * 17]},
     "py_bad_words_list: expected at most 16 tokens of a word, got 17"),
    ({"py_return_log_probs": True, "py_num_logprobs": 21},
     "py_return_log_probs: expected py_num_logprobs to be an integer from 0 to 20, got 21"),
]
CONFIG = MTPDecodingConfig(max_draft_len=2)
INTEGERS: dict[str, Callable[[Any], object]] = {
    "ConfigError: batch_size": CONFIG.draft_len_for,
    "ConfigError: begin_thinking_phase_token": lambda value: read_thinking_token(
        SimpleNamespace(begin_thinking_phase_token=value), "begin"
    ),
    "ConfigError: draft_len": CONFIG.mtp.acceptance_shares,
    "ConfigError: num_mtp_layers": CONFIG.resolve,
    "ConfigError: thinking_end": lambda value: ThinkingEnd(1, (value,)),
    "MetadataError: num_slots": SlotManager,
    "MetadataError: request_id": SlotManager(2).add_slot,
    "RequestError: end_ids": lambda value: StopRule(max_length=9, end_ids=(value,)),
    "RequestError: ignored_ids": lambda value: StopRule(max_length=9, ignored_ids=(value,)),
    "RequestError: max_length": lambda value: StopRule(max_length=value),
    "RequestError: min_tokens": lambda value: StopRule(max_length=9, min_tokens=value),
    "RequestError: prompt_len": lambda value: StopRule(max_length=9, prompt_len=value),
}


def thinking(resolve: Callable[..., object], encode: Any = None, **mtp: Any) -> object:
    ids = {"begin_thinking_phase_token": mtp.pop("begin", None)}
    relaxed = {"use_relaxed_acceptance_for_thinking": True}
    return resolve(MTPDecodingConfig(max_draft_len=1, mtp=mtp, **relaxed, **ids), encode)


TAGS = {"<think>": [7], "</think>": [8], "<two>": [1, 2], "<none>": []}.__getitem__
NAMES = [column.name for column in REQUEST_COLUMNS]
COLUMNS = TableColumns(REQUEST_COLUMNS)
MINE = SlotColumn("mine", int)
PARTS: list[tuple[Callable[[], object], str]] = [
    (lambda: thinking(resolve_thinking_tokens, TAGS, begin_thinking_phase="<two>"),
     "ConfigError: begin_thinking_phase: '<two>' must be one token of the tokenizer, it is 2"),
    (lambda: thinking(resolve_thinking_tokens, TAGS, end_thinking_phase="<none>"), "it is 0"),
    (lambda: thinking(resolve_thinking_tokens, TAGS, begin=8),
     "begin and end must differ, both are 8"),
    (lambda: thinking(resolve_thinking_tokens), "begin_thinking_phase_token: no id is set"),
    (lambda: thinking(resolve_thinking_end, thinking_end=[9]),
     "thinking_end: (9,) is forced after the token that"),
    (lambda: ThinkingEnd(7, ()), "ConfigError: thinking_end: expected 1 to 16 ids >= 0"),
    (lambda: ThinkingEnd(7, (1,) * 17), "thinking_end: expected 1 to 16 ids >= 0"),
    (lambda: ThinkingEnd(7, (1, -1)), "thinking_end: expected 1 to 16 ids >= 0"),
    (lambda: COLUMNS.row({"logit_change": 1}),
     "MetadataError: slot table: logit_change follows from the other columns; leave"),
    (lambda: COLUMNS.row({"thinking": 1, "number": 3, "topk": 2}),
     "MetadataError: slot table: there is no column thinking, topk"),
    (lambda: TableColumns((*REQUEST_COLUMNS, MINE, MINE)),
     "columns of different names, got mine twice"),
    (lambda: TableColumns(()), f"slot table: expected {', '.join(NAMES)} first, got no columns"),
    (lambda: TableColumns((MINE, *REQUEST_COLUMNS)), f"first, got mine, {NAMES[0]}, "),
    (lambda: TableColumns((SlotColumn("number", float), *REQUEST_COLUMNS[1:])), "first, got numb"),
]
# fmt: on


@pytest.mark.parametrize(("name", "value", "words"), RANGES)
def test_value_out_of_range(name: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: value})
    assert str(refused.value) == f"sampling parameters: {name} must be {words}, got {value!r}"
    assert isinstance(refused.value, (MTPPluginError, ValueError))


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row[1][:60])
def test_options_are_refused(row: tuple[dict[str, Any], str]) -> None:
    options, message = row
    with pytest.raises(RequestError) as refused:
        SamplingParams(**options)
    text = str(refused.value).removeprefix("sampling parameters: ")
    begins = message.endswith("...")
    assert text.startswith(message.removesuffix("...")) if begins else text == message


@pytest.mark.parametrize(("fields", "message"), HOST, ids=lambda value: str(value)[:40])
def test_values_of_a_host_are_refused(fields: dict[str, Any], message: str) -> None:
    """Each is reported together with other refusals, and never read."""
    config = {n.removeprefix("config."): v for n, v in fields.items() if "." in n}
    plain = {name: value for name, value in fields.items() if "." not in name}
    request = SimpleNamespace(
        **plain, sampling_config=SimpleNamespace(**config, no_repeat_ngram_size=[3])
    )
    served = set(OPTIONS) - {"no_repeat_ngram_size"}
    (problem, other) = unsupported_options(request, served=served)
    assert problem.startswith(message)
    assert other == "no_repeat_ngram_size=3"
    sound = {"temperature"} if "random_seed" in config else set()
    assert host_values(request).keys() == {"no_repeat_ngram_size", *sound}


@pytest.mark.parametrize("name", INTEGERS)
def test_other_types_than_integers_are_refused(name: str) -> None:
    for value in ("3", 1.0, [], True, object):
        with pytest.raises(MTPPluginError) as refused:
            INTEGERS[name](value)
        text = f"{type(refused.value).__name__}: {refused.value}"
        assert text.startswith(f"{name}: expected an integer")


@pytest.mark.parametrize(("call", "message"), PARTS)
def test_part_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(MTPPluginError) as refused:
        call()
    assert message in f"{type(refused.value).__name__}: {refused.value}"


def test_more_numbers_than_a_column_has_room_for() -> None:
    """They would shift the columns after them."""
    for kind, width, value in ((int, 1, [1, 2]), (float, 3, range(4))):
        column = SlotColumn("many", kind, 0, width)
        message = f"slot column many: expected at most {width} numbers, got {width + 1}"
        for call in (
            column.bits,
            lambda v, c=column: TableColumns((*REQUEST_COLUMNS, c)).row({"many": v}),
        ):
            with pytest.raises(MTPPluginError, match=message):
                call(value)


def test_unknown_column_is_named() -> None:
    for call in (COLUMNS.offset, COLUMNS.__getitem__, request_column):
        with pytest.raises(KeyError, match="thinking"):
            call("thinking")
