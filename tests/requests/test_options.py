"""Request options: the table, the ranges, and which options count as requested."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import typing
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import RequestError, format_value
from mtp_plugin.ops.logit_rows import LOGITS_PROCESSING_OPTIONS
from mtp_plugin.ops.sampling import SAMPLING_OPTIONS
from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.requests.columns import REQUEST_COLUMNS
from mtp_plugin.requests.options import (
    DRAFTS_OF_VERIFICATION,
    HOST_OPTIONS,
    IGNORED_OPTIONS,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_BIAS_IDS,
    MAX_LOGPROBS,
    OPTIONS,
    Option,
    SamplingParams,
    is_greedy,
)
from mtp_plugin.speculative.host import RequestFacts
from mtp_plugin.speculative.sampler import OWN_OPTIONS
from tests.hostile import HOSTILE, LONGEST_LINE, suppress_short

SERVED = frozenset(
    {"max_new_tokens", "min_tokens", "stop_token_ids", "stop", "ignore_eos", "speculate"}
    | {"relaxed_acceptance", "include_stop_str_in_output", "max_draft_len"}
)
"""Some that may be given."""

# --- the table ---


def test_every_field_is_a_row_of_the_table() -> None:
    fields = [field.name for field in dataclasses.fields(SamplingParams)]
    others = [other for option in OPTIONS.values() for other in option.elsewhere]
    assert len({*OPTIONS, *others}) == len(OPTIONS) + len(others)
    assert {*fields} == {*OPTIONS, *others}
    assert list(OPTIONS) == fields[: len(OPTIONS)]
    for name, option in OPTIONS.items():
        assert option.name == name
        assert option.values.words
        assert option.about


def test_no_two_rows_read_the_same_field_of_a_host() -> None:
    fields = [field for row in (*OPTIONS.values(), *HOST_OPTIONS) for field in row.host]
    assert len(fields) == len(set(fields))
    assert not {row.name for row in HOST_OPTIONS} & set(OPTIONS)


@pytest.mark.parametrize("option", [*OPTIONS.values(), *HOST_OPTIONS], ids=lambda row: row.name)
def test_the_neutral_value_and_none_change_nothing(option: Option) -> None:
    assert option.is_neutral(option.neutral)
    assert option.is_neutral(None)
    if isinstance(option.neutral, (int, float)):
        assert option.is_neutral(float(np.float32(option.neutral)))  # as hosts in C++ have it


@pytest.mark.parametrize("name", OPTIONS)
def test_a_neutral_value_is_never_requested(name: str) -> None:
    params = SamplingParams(**{name: OPTIONS[name].neutral})
    assert name not in params.requested_options()
    most = [] if name == "max_new_tokens" else ["max_new_tokens=32"]
    assert params.unsupported(()) == most


def test_columns_hold_numbers() -> None:
    """What a slot holds of a request that does not ask changes nothing."""
    held = {column.name: column for column in REQUEST_COLUMNS}
    requested = {name: option for name, option in OPTIONS.items() if option.column is not None}
    penalties = {"repetition_penalty", "presence_penalty", "frequency_penalty"}
    draws = {"temperature", "top_k", "top_p", "min_p"}
    assert set(requested) == draws | penalties | {"min_tokens", "logprobs", "thinking_token_budget"}
    for name, option in requested.items():
        assert option.column in (int, float)
        assert not isinstance(option.empty, bool)
        assert option.neutral in (None, option.empty)
        assert held[name].empty == option.empty
        assert held[name].kind is option.column


def test_every_option_is_served_or_refused() -> None:
    """No component serves a name that is no option, and none of those that stay refused."""
    own = SERVED - {"min_tokens"}
    assert own <= OWN_OPTIONS
    assert set(OPTIONS) >= (OWN_OPTIONS | LOGITS_PROCESSING_OPTIONS | SAMPLING_OPTIONS)
    assert {
        name for name, option in OPTIONS.items() if option.edits_logits
    } >= LOGITS_PROCESSING_OPTIONS
    assert {name for name, option in OPTIONS.items() if option.draws} >= SAMPLING_OPTIONS
    last = list(OPTIONS).index("n")
    assert not (OWN_OPTIONS | LOGITS_PROCESSING_OPTIONS | SAMPLING_OPTIONS) & {
        *list(OPTIONS)[last:]
    }


# --- ranges ---


def test_problem_has_the_name_of_the_host_engine_and_the_words_of_the_table() -> None:
    option = OPTIONS["max_draft_len"]
    assert option.problem("mtp_max_draft_len", 0) is None
    assert option.problem("mtp_max_draft_len", None) is None
    for value, is_required in ((-1, False), (None, True)):
        found = option.problem("mtp_max_draft_len", value, is_required=is_required)
        assert found == f"mtp_max_draft_len: expected an integer >= 0, got {value}"


def test_the_signature_is_that_of_the_table() -> None:
    names = list(inspect.signature(SamplingParams).parameters)
    assert names == [field.name for field in dataclasses.fields(SamplingParams)]


class OutputKind(Enum):
    """How an engine reports outputs, as vLLM numbers it."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


UNSET = (
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "prompt_ignore_length",
)
"""Numbers that other engines leave at None."""


@pytest.mark.parametrize(
    "options",
    [
        {"skip_special_tokens": True, "detokenize": True, "spaces_between_special_tokens": True},
        {"end_id": None, "pad_id": None, "early_stopping": False, "extra_args": None},
        {"beam_search_diversity_rate": 0.0, "return_context_logits": False},
        {"beam_search_diversity_rate": 1.0, "early_stopping": 1, "beam_width_array": []},
        {"extra_args": {}, "additional_model_outputs": [], "lookahead_config": None},
        {"flat_logprobs": False, "repetition_detection": None, "skip_reading_prefix_cache": None},
        {"output_kind": OutputKind.CUMULATIVE, "skip_clone": False, "return_token_ids": False},
        {"output_kind": OutputKind.FINAL_ONLY, "skip_clone": True, "return_token_ids": True},
        {"beam_width": 1, "num_beams": 1, "pad_id": 0, "best_of": 0},
        {"thinking_token_budget": -1, "logprobs": False, "prompt_logprobs": False},
        {"no_repeat_ngram_size": -1, "stop": ""},
        {"logprobs_simple_format": False, "prompt_logprobs_simple_format": False},
        {"logprob_token_ids": None, "output_text_buffer_length": 0, "stream_interval": None},
        {"prompt_logprob_start": None, "prompt_logprob_token_ids": None},
        {"routed_experts_prompt_start": 0, "trace_decode_token_ids": None},
        dict.fromkeys(UNSET),
        {"length_penalty": 0.0, "no_repeat_ngram_size": 1 << 30},
    ],
    ids=str,
)
def test_what_other_engines_presume_changes_nothing(options: dict[str, Any]) -> None:
    assert SamplingParams(**options, max_tokens=3) == SamplingParams(max_new_tokens=3)


NONE, TRUE, FALSE = ("None", (None,)), ("True", (True,)), ("False", (False,))
NONE_OR_FALSE = ("None or False", (None, False))
ANY_FLAG = ("None or False or True", (None, False, True))
EMPTY = ("None or [] or ()", (None, [], ()))
# fmt: off
ELSEWHERE: dict[str, tuple[str, tuple[Any, ...], tuple[Any, ...]]] = {
    # names of options of other engines alone: as they are reported, what is taken, what is refused
    "additional_model_outputs": (*EMPTY, (["x"],)),
    "beam_width_array": (*EMPTY, ([2],)),
    "beam_search_diversity_rate": ("None or 0 or 1", (None, 0.0, 1.0), (0.5,)),
    "beam_width num_beams": ("None or 1", (None, 1), (4,)),
    "early_stopping": (ANY_FLAG[0], (*ANY_FLAG[1], 0, 1), ("never", 2, np.array([1, 2]))),
    "end_id prompt_logprob_start": (*NONE, (3, 0)),
    "logprob_token_ids trace_decode_token_ids prompt_logprob_token_ids": (*NONE, ([3], [])),
    "lookahead_config repetition_detection": (*NONE, (object(),)),
    "num_tokens_total stream_interval termination_id": (*NONE, (3,)),
    "exclude_input_from_output": (*TRUE, (False,)),
    "extra_args": ("None or {}", (None, {}), ({"a": 1},)),
    "apply_batched_logits_processor flat_logprobs logprobs_simple_format return_encoder_output "
    "prompt_logprobs_simple_format return_context_logits return_generation_logits "
    "return_perf_metrics": (*FALSE, (True,)),
    "output_kind": (
        "None or 0 or 2",
        (None, OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY),
        (1, OutputKind.DELTA),
    ),
    "output_text_buffer_length routed_experts_prompt_start routed_experts_start_len": (
        "0", (0,), (1,)
    ),
    "pad_id": ("None or any integer", (None, 3), ("0", [0], 0.5)),
    "return_token_ids skip_prompt_log_probs": (*ANY_FLAG, ("yes",)),
    "skip_clone": ("False or True", (False, True), (None, 2)),
    "spaces_between_special_tokens": ("True or False", (True, False), (None, 2)),
    "truncate_prompt_tokens": ("None or -1", (None, -1), (5, 0)),
    "metadata parallel_tool_calls prediction service_tier store user": (
        "anything", (None, {}, "a"), ()
    ),
    "modalities": ("None or ['text']", (None, ["text"]), (["text", "audio"], "text")),
    "prompt_cache_key prompt_cache_retention safety_identifier verbosity cache_salt request_id "
    "rid extra_key": ("None or any text", (None, "", "a"), (3,)),
    "suffix": ("None or ''", (None, ""), ("a",)),
    "priority top_logprobs top_n_logprobs": ("None or 0", (None, 0, 0.0), (1, "0")),
    "include_reasoning separate_reasoning stream_reasoning": (
        "None or True", (None, True), (False,)
    ),
    "detokenize_stop_sequence echo no_stop_trim return_hidden_states return_log_probs "
    "return_prompt_tokens return_prompt_top_n_logprobs return_segments "
    "return_tokens_as_token_ids skip_reading_prefix_cache return_cached_tokens_details "
    "return_meta_info return_prompt_token_ids return_routed_experts "
    "return_token_offsets": (*NONE_OR_FALSE, (True,)),
}
# fmt: on
INSTEAD = {
    "end_id": "; write stop_token_ids, or ignore_eos=True for none",
    "output_kind": "; write stream, whose events have the new tokens",
    "num_tokens_total": "; write max_new_tokens, which counts the output alone",
    "termination_id": "; write stop_token_ids, or ignore_eos=True for none",
    **dict.fromkeys(("return_log_probs", "top_logprobs", "top_n_logprobs"), "; write logprobs"),
}


def test_every_option_of_other_engines_alone_is_tried() -> None:
    assert {name for names in ELSEWHERE for name in names.split()} == set(IGNORED_OPTIONS)


@pytest.mark.parametrize("names", ELSEWHERE)
def test_what_other_engines_alone_have(names: str) -> None:
    """Taken where it changes nothing, else refused by name."""
    words, neutral, others = ELSEWHERE[names]
    for name in names.split():
        for value in neutral:
            assert SamplingParams(**{name: value}) == SamplingParams()
        for value in others:
            with pytest.raises(RequestError) as refused:
                SamplingParams(**{name: value})
            assert str(refused.value) == (
                f"sampling parameters: {name}: expected {words}, as nothing else is "
                f"served, got {format_value(value)}{INSTEAD.get(name, '')}"
            )


def test_lists_and_none_are_as_good_as_tuples() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[3], bad_words=[])
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("a",), (3,), ())
    assert params.unsupported(SERVED) == []
    assert SamplingParams(no_repeat_ngram_size=3, length_penalty=0.5).unsupported(SERVED) == [
        "length_penalty=0.5",
        "no_repeat_ngram_size=3",
    ]
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()
    assert SamplingParams(stop="ab").stop == ("ab",)
    words = SamplingParams(bad_words=["a b", [3, 4]]).bad_words
    assert words == ("a b", (3, 4))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"max_tokens": np.int64(5)}, {"max_new_tokens": 5}),
        ({"max_tokens": np.float32(2), "top_k": 4.0}, {"max_new_tokens": 2, "top_k": 4}),
        ({"stop_token_ids": [5.0], "seed": -0.0}, {"stop_token_ids": (5,), "seed": 0}),
        ({"temperature": np.float32(0.5), "top_k": np.uint8(4)}, {"temperature": 0.5, "top_k": 4}),
        ({"temperature": np.array(0.5), "seed": np.array(3)}, {"temperature": 0.5, "seed": 3}),
        ({"top_p": torch.tensor(0.5), "logprobs": torch.tensor(2)}, {"top_p": 0.5, "logprobs": 2}),
        ({"temperature": Fraction(1, 2)}, {"temperature": 0.5}),
        ({"ignore_eos": np.bool_(True), "pad_id": np.int32(0)}, {"ignore_eos": True}),
        ({"top_p_decay": np.float32(1), "beam_width": np.int64(1)}, {"top_p_decay": 1.0}),
        ({"stop_token_ids": [np.int64(5)]}, {"stop_token_ids": (5,)}),
        ({"stop_token_ids": tuple(np.arange(2))}, {"stop_token_ids": (0, 1)}),
        ({"bad_words": [[np.int64(3), 4], "a"]}, {"bad_words": ((3, 4), "a")}),
        ({"logit_bias": {np.int64(3): np.float32(0.5)}}, {"logit_bias": {3: 0.5}}),
        ({"allowed_token_ids": range(3)}, {"allowed_token_ids": (0, 1, 2)}),
        ({"bad_words": [range(3, 5)]}, {"bad_words": ((3, 4),)}),
        ({"end_id": np.int64(-1), "ignore_eos": False}, {"ignore_eos": True}),
        ({"thinking_budget": 5}, {"thinking_token_budget": 5}),
    ],
    ids=str,
)
def test_numbers_and_sequences_of_other_kinds(
    options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """They are those of Python's own kinds, and are kept as such."""
    params = SamplingParams(**options)
    assert params == SamplingParams(**wanted)
    assert repr(params) == repr(SamplingParams(**wanted))


class Odd:
    """A member of nothing."""

    @property
    def value(self) -> str:
        raise ValueError

    def __repr__(self) -> str:
        return "an Odd"


def test_one_bias_under_two_names() -> None:
    bias = np.array([0, 1.0])
    params = SamplingParams(logit_bias=bias, embedding_bias=bias.copy())
    assert params.logit_bias == {1: 1.0}


def test_a_field_has_one_type_at_run_time() -> None:
    hints = typing.get_type_hints(SamplingParams)
    assert hints["stop"] == tuple[str, ...]
    assert hints["allowed_token_ids"] == tuple[int, ...] | None


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_new_tokens = 3  # type: ignore[misc]


def test_what_counts_as_greedy() -> None:
    """R27: an unset temperature with a set option samples; 0, top_k 1 and top_p 0 do not."""
    table = itertools.product(
        (None, 0, 9e-6, 1e-5, 0.7, 1), (None, 0, 1, 50), (None, 0, 0.9, 1), (None, 0, 0.1)
    )
    for values in table:
        options = dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
        params = SamplingParams(**options)
        temperature, top_k, top_p, _ = values
        unset = values == (None, None, None, None)
        greedy = unset or temperature in (0, 9e-6) or top_k == 1 or top_p == 0
        assert params.is_greedy is greedy, values
        named = {option.split("=")[0] for option in params.unsupported(SERVED)}
        given = {name for name, value in options.items() if value is not None}
        assert named == (set() if greedy else given), values


UNSUPPORTED = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "prompt_ignore_length": 4,
    "logit_bias": {3: -1.0},
    "allowed_token_ids": (5, 6),
    "bad_words": ("a",),
    "bad_token_ids": (7,),
    "logprobs": 0,
    "prompt_logprobs": 1,
    "n": 2,
    "best_of": 2,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "no_repeat_ngram_size": 2,
    "top_p_decay": 0.9,
    "top_p_min": 0.1,
    "top_p_reset_ids": 5,
    "logits_processor": ["f"],
    "guided_decoding": {"json": {}},
}
"""With what is `SERVED`; some of it others serve."""


def test_everything_that_stays_refused_is_among_those() -> None:
    assert {*list(OPTIONS)[list(OPTIONS).index("n") :]} <= set(UNSUPPORTED)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_option_is_named_with_its_value(name: str) -> None:
    value = UNSUPPORTED[name]
    for others_value in ({}, {"temperature": 0}, {"top_k": 1, "temperature": 0.7}):
        params = SamplingParams(**others_value, **{name: value})
        hint = OPTIONS[name].enabled_by if name == "best_of" else ""
        why = f" is not enabled; {hint}" if hint else ""
        assert params.unsupported(SERVED) == [f"{name}={value!r}{why}"]


def test_every_unsupported_option_is_named() -> None:
    options = SamplingParams(temperature=0.7, top_p=0.9, **UNSUPPORTED).unsupported(SERVED)
    assert [option.split("=")[0] for option in options] == ["temperature", "top_p", *UNSUPPORTED]


IDS = st.lists(st.integers(0), min_size=1, max_size=3).map(tuple)
FINITE = st.floats(allow_nan=False, allow_infinity=False)

ALLOWED: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.integers(1),
    "min_tokens": st.integers(0, SamplingParams().max_new_tokens),
    "stop_token_ids": IDS,
    "stop": st.tuples(st.text(min_size=1)),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "add_special_tokens": st.booleans(),
    "detokenize": st.booleans(),
    "speculate": st.booleans(),
    "max_draft_len": st.integers(0),
    "verification": st.sampled_from(sorted(DRAFTS_OF_VERIFICATION)),
    "draft_sampling": st.sampled_from(["coupled", "plain", "greedy"]),
    "relaxed_acceptance": st.booleans(),
    "relaxed_topk": st.integers(1, 2**31 - 1),
    "relaxed_delta": st.floats(0, allow_infinity=False),
    "thinking_token_budget": st.integers(0),
    "temperature": st.floats(0, allow_infinity=False),
    "top_k": st.integers(0),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "repetition_penalty": st.floats(0, exclude_min=True, allow_infinity=False),
    "presence_penalty": FINITE,
    "frequency_penalty": FINITE,
    "prompt_ignore_length": st.integers(0),
    "logit_bias": st.dictionaries(st.integers(0), FINITE, min_size=1, max_size=3),
    "allowed_token_ids": IDS,
    "bad_words": st.lists(st.one_of(st.text(min_size=1), IDS), max_size=3).map(tuple),
    "bad_token_ids": IDS,
    "logprobs": st.integers(0, MAX_LOGPROBS),
    "prompt_logprobs": st.integers(0, MAX_LOGPROBS),
    "logprobs_mode": st.sampled_from(["raw", "processed"]),
    "n": st.integers(1),
}
"""Values in the range of every option that has one; None too where None is the default."""


class Mode(Enum):
    """What log-probabilities are of, as a host names it."""

    RAW = "raw"
    PROCESSED = "processed"


def test_unserved_options_are_called_as_the_user_did() -> None:
    params = SamplingParams(logits_processors=[3], bad=[[4]], structured_outputs="a", max_tokens=5)
    expected = ["bad=((4,),)", "logits_processors=[3]", "structured_outputs='a'"]
    assert params.unsupported({"max_new_tokens"}) == expected
    # of a copy only what it is here is known
    copied = ["bad_words=((4,),)", "logits_processor=[3]", "guided_decoding='a'"]
    assert dataclasses.replace(params, seed=3).unsupported({"max_new_tokens"}) == copied


@pytest.mark.parametrize("mode", [None, "raw", "processed", *Mode])
@pytest.mark.parametrize("expected", ["raw", "processed"])
def test_what_log_probabilities_are_of(mode: Any, expected: str) -> None:
    """What the config says changes nothing, and all else is refused by name."""
    served = {*OPTIONS} - ({"logprobs_mode"} if expected == "raw" else set())
    params = SamplingParams(logprobs=0, logprobs_mode=mode)
    name = getattr(mode, "value", mode)
    refused = {
        pair: [
            f"logprobs_mode={pair[0]!r} is not enabled; set "
            f"speculative_config.mtp.logprobs_mode: {pair[0]}"
        ]
        for pair in (("processed", "raw"), ("raw", "processed"))
    }
    assert params.unsupported(served) == refused.get((name, expected), [])
    # without log-probabilities the mode has no effect
    assert SamplingParams(logprobs_mode=mode).unsupported(served) == []


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_as_a_flag(name: str) -> None:
    """As in other engines, with those of the most likely token."""
    for flag in (True, np.bool_(True)):
        assert SamplingParams(**{name: flag}).requested_options() == {"max_new_tokens": 32, name: 1}
    for flag in (False, np.bool_(False)):
        assert SamplingParams(**{name: flag}).requested_options() == {"max_new_tokens": 32}


def test_every_option_with_a_range_is_sampled() -> None:
    unranged = {name for name, option in OPTIONS.items() if option.values.words == "anything"}
    assert unranged == {*list(OPTIONS)[list(OPTIONS).index("n") + 1 :]}
    assert set(ALLOWED) == set(OPTIONS) - unranged


@pytest.mark.parametrize("name", ALLOWED)
@given(data=st.data())
def test_a_range_takes_what_is_in_it(name: str, data: Any) -> None:
    value = data.draw(ALLOWED[name])
    assert vars(SamplingParams(**{name: value}))[name] == value
    if OPTIONS[name].neutral is None:
        assert vars(SamplingParams(**{name: None}))[name] is None


@given(words=st.lists(IDS, max_size=MAX_BAD_WORDS + 2), ids=st.lists(st.integers(0), max_size=4))
def test_as_many_words_as_there_is_room_for(words: list[Any], ids: list[int]) -> None:
    count = len(words) + len(ids)
    if count <= MAX_BAD_WORDS:
        params = SamplingParams(bad_words=tuple(words), bad_token_ids=tuple(ids))
        assert (params.bad_words, params.bad_token_ids) == (tuple(words), tuple(ids))
        return
    with pytest.raises(RequestError, match=f"at most {MAX_BAD_WORDS} are served, got {count}$"):
        SamplingParams(bad_words=tuple(words), bad_token_ids=tuple(ids))


def test_the_most_that_there_is_room_for() -> None:
    word, bias = (1,) * MAX_BAD_WORD_LEN, dict.fromkeys(range(MAX_BIAS_IDS), 1.0)
    params = SamplingParams(bad_words=(word,) * MAX_BAD_WORDS, logit_bias=bias)
    assert (params.bad_words, params.logit_bias) == ((word,) * MAX_BAD_WORDS, bias)


# --- other names ---

OTHERS = [(name, other) for name, option in OPTIONS.items() for other in option.elsewhere]


@pytest.mark.parametrize(("name", "other"), OTHERS)
def test_the_names_of_other_engines(name: str, other: str) -> None:
    """They are the same option: given twice with the same value, it counts once."""
    value = {"logit_bias": {3: 1.0}, "bad_words": ["a"], "speculate": False}.get(name, 7)
    as_ours = SamplingParams(**{name: value})
    assert SamplingParams(**{other: value}) == as_ours
    assert vars(SamplingParams(**{other: value}))[other] is None
    assert dataclasses.replace(SamplingParams(**{other: value}), top_p=0.5).requested_options() == {
        **as_ours.requested_options(),
        **SamplingParams(top_p=0.5, **{name: value}).requested_options(),
    }


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"bad": [], "bad_words": ["a"]}, {"bad_words": ("a",)}),
        ({"bad": ["a"], "bad_words": []}, {"bad_words": ("a",)}),
        ({"bad": ["a"], "bad_words": ("a",)}, {"bad_words": ("a",)}),
        ({"bad": "a", "bad_words": ["a"]}, {"bad_words": ("a",)}),
        ({"bad": [(3, 4)], "bad_words": ([3, 4],)}, {"bad_words": ((3, 4),)}),
        ({"logit_bias": {}, "embedding_bias": {3: 1.0}}, {"logit_bias": {3: 1.0}}),
        ({"logit_bias": {3: 1.0}, "embedding_bias": {}}, {"logit_bias": {3: 1.0}}),
        ({"logits_processors": [], "logits_processor": [len]}, {"logits_processor": [len]}),
        ({"guided_decoding": {"a": 1}, "structured_outputs": {}}, {"guided_decoding": {"a": 1}}),
        ({"guided_decoding": {}, "structured_outputs": {"a": 1}}, {"guided_decoding": {"a": 1}}),
        ({"seed": 3, "random_seed": None}, {"seed": 3}),
        ({"max_new_tokens": 9, "max_tokens": None}, {"max_new_tokens": 9}),
        ({"max_new_tokens": None, "max_tokens": 9}, {"max_new_tokens": 9}),
        ({"max_new_tokens": 9, "max_tokens": 9}, {"max_new_tokens": 9}),
    ],
    ids=str,
)
def test_two_names_of_which_one_says_nothing_or_the_same(
    options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    assert SamplingParams(**options) == SamplingParams(**wanted)
    name = next(iter(wanted))
    assert vars(SamplingParams(**options))[name] == wanted[name]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
@pytest.mark.parametrize("name", ["embedding_bias", "logit_bias"])
def test_a_bias_that_has_one_of_each_id(name: str, kind: Any) -> None:
    """What it leaves as it is counts for nothing, as many ids as there may be."""
    bias = kind([0.0, -1.5, 0.0, 2.0] + [0.0] * 2 * MAX_BIAS_IDS)
    assert SamplingParams(**{name: bias}).logit_bias == {1: -1.5, 3: 2.0}
    assert SamplingParams(**{name: kind([0.0, 0.0])}).requested_options() == {"max_new_tokens": 32}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(("name", "other"), OTHERS)
def test_no_two_values_of_an_option_end_in_another_error(name: str, other: str, value: Any) -> None:
    """Under both names, with a sound one and with another of its kind."""
    sound = {"logit_bias": {3: 1.0}, "bad_words": ["a"]}.get(name, 7)
    twin = copy.copy(value) if isinstance(value, (list, torch.Tensor, np.ndarray)) else value
    for ours, theirs in ((value, sound), (sound, value), (value, value), (value, twin)):
        with suppress_short(RequestError):
            params = SamplingParams(**{name: ours, other: theirs})
            assert all(len(expected) < LONGEST_LINE for expected in params.unsupported(()))


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_as_many_tokens_as_there_is_room_for(name: str) -> None:
    params = SamplingParams(**{name: None}, min_tokens=40)
    assert params.max_new_tokens is None
    assert dataclasses.replace(params, top_p=0.5).max_new_tokens is None
    facts = RequestFacts.of(0, params, prompt_len=3, max_seq_len=99)
    assert (facts.stop.max_length, facts.full_length) == (99, 99)
    few = RequestFacts.of(0, SamplingParams(), prompt_len=3, max_seq_len=99)
    assert few.stop.max_length == 35


# --- what changes nothing ---


@pytest.mark.parametrize(
    "options",
    [
        {"n": 1},
        {"best_of": 1},
        {"best_of": None},
        {"use_beam_search": False},
        {"length_penalty": 1},
        {"length_penalty": 1.0},
        {"length_penalty": None},
        {"no_repeat_ngram_size": 0},
        {"top_p_decay": 1.0, "top_p_min": 1e-6, "top_p_reset_ids": -1, "temperature": 1.0},
        {"top_p_min": 0.0},
        {"logits_processors": []},
        {"logits_processor": None},
        {"structured_outputs": None},
        {"guided_decoding": {}},
        {"repetition_penalty": 1},
        {"presence_penalty": 0, "frequency_penalty": 0.0},
        {"prompt_ignore_length": 0},
        {"logit_bias": {}},
        {"embedding_bias": {}},
        {"allowed_token_ids": None},
        {"bad_words": []},
        {"bad_words": None, "bad_token_ids": None, "bad": []},
        {"logprobs": None, "prompt_logprobs": None},
        {"min_tokens": 0},
        {"stop": None, "stop_token_ids": []},
        {"stop": []},
        {"ignore_eos": False, "include_stop_str_in_output": False},
        {"speculate": True, "max_draft_len": None},
        {"relaxed_acceptance": True, "relaxed_topk": None, "relaxed_delta": None},
        {"thinking_token_budget": None, "verification": None, "draft_sampling": None},
        {"seed": None, "random_seed": None},
        {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0},
        {"temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": 7},
    ],
    ids=str,
)
def test_neutral_values_are_what_they_are_in_the_field(options: dict[str, Any]) -> None:
    draws = {name: value for name, value in options.items() if name == "temperature" and value}
    requested = SamplingParams(**options).requested_options()
    assert requested == {"max_new_tokens": 32, **draws}


@pytest.mark.parametrize("top_k", [0, -1])
def test_all_ids_are_sampled_from(top_k: int) -> None:
    """With a temperature; and both mean the same."""
    params = SamplingParams(temperature=0.5, top_k=top_k, top_p=1, min_p=0)
    assert params.top_k == 0
    assert params.unsupported({"max_new_tokens", "temperature", "top_k", "top_p", "min_p"}) == []
    assert params == SamplingParams(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0)


# --- what is requested ---


def test_what_needs_is_what_changes_something() -> None:
    assert SamplingParams().requested_options() == {"max_new_tokens": 32}
    options = {
        "max_new_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": (3,),
        "stop": ("a",),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "speculate": False,
        "max_draft_len": 1,
        "relaxed_acceptance": False,
        **UNSUPPORTED,
    }
    assert SamplingParams(**options).requested_options() == options
    assert list(SamplingParams(**options).requested_options()) == list(options)


def test_what_is_requested_of_draws_counts_where_there_are_any() -> None:
    draws = {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3}
    requested = {"max_new_tokens": 32, **draws}
    assert SamplingParams(**draws).requested_options() == requested
    for greedy in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0}):
        assert SamplingParams(**{**draws, **greedy}).requested_options() == {"max_new_tokens": 32}
    # which drafts there may be is decided by the config
    drafts = {"verification": "block", "draft_sampling": "plain"}
    assert SamplingParams(temperature=0, **drafts).requested_options() == {
        "max_new_tokens": 32,
        **drafts,
    }
    # a seed alone draws nothing
    assert SamplingParams(seed=3).requested_options() == {"max_new_tokens": 32}


def test_options_that_are_served_are_supported() -> None:
    params = SamplingParams(temperature=0.7, n=2)
    assert params.unsupported(SERVED | {"temperature"}) == ["n=2"]
    assert params.unsupported(OPTIONS) == []


def test_who_makes_no_drafts_needs_all_else() -> None:
    drafts = {"speculate": False, "max_draft_len": 1, "draft_sampling": "greedy"}
    relaxed = {"relaxed_topk": 2, "relaxed_delta": 0.5}
    for of_drafts in (
        {**drafts, "verification": "coupled", "relaxed_acceptance": False},
        {**drafts, "verification": "block", **relaxed},
    ):
        others = {"max_new_tokens": 9, "logit_bias": {3: 1.0}, "thinking_token_budget": 4}
        requested = SamplingParams(**of_drafts, **others)
        assert requested.requested_options().keys() == {*of_drafts, *others}
        assert requested.without_drafts() == SamplingParams(**others)


def test_edits_of_the_logits() -> None:
    def edits(**options: Any) -> bool:
        facts = RequestFacts.of(0, SamplingParams(**options), prompt_len=1, max_seq_len=9)
        return facts.sampling_kind is SamplingKind.PROCESSED

    assert not edits()
    assert edits(min_tokens=1)
    assert not edits(stop_token_ids=(3,), stop=("a",), ignore_eos=True)
    assert edits(logit_bias={3: 1.0})
    assert not edits(logit_bias={}, bad_words=[], repetition_penalty=1)


def test_greedy_by_the_name_of_the_options_alone() -> None:
    assert is_greedy({})
    assert is_greedy({"seed": 3, "n": 2})
    assert is_greedy({"temperature": None, "top_k": None, "top_p": None, "min_p": None})
    assert not is_greedy({"temperature": 0.7})
    assert not is_greedy({"min_p": 0})
    assert is_greedy({"temperature": 0.0, "min_p": 0.5})


# --- values that make no sense ---


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_value_ends_in_another_error(value: Any) -> None:
    """Each is served, does nothing, or is refused in a line that can be read."""
    for field in dataclasses.fields(SamplingParams):
        with suppress_short(RequestError):
            params = SamplingParams(**{field.name: value})
            assert all(len(expected) < LONGEST_LINE for expected in params.unsupported(()))
