"""What a request may ask for: the table, the ranges, and what counts as asked for."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_plugin.errors import MTPPluginError, RequestError
from mtp_plugin.requests.columns import REQUEST_COLUMNS
from mtp_plugin.requests.options import HOST_OPTIONS, OPTIONS, Option, SamplingParams, is_greedy
from mtp_plugin.speculative.host import RequestFacts
from mtp_plugin.speculative.ops.logits import EDITED_OPTIONS
from mtp_plugin.speculative.sampler import OWN_OPTIONS

SERVED = OWN_OPTIONS | EDITED_OPTIONS
"""What the embedded executor gives."""

# --- the table ---


def test_every_field_is_a_row_of_the_table() -> None:
    assert list(OPTIONS) == [field.name for field in dataclasses.fields(SamplingParams)]
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


@pytest.mark.parametrize("name", OPTIONS)
def test_a_neutral_value_is_never_asked_for(name: str) -> None:
    if name == "max_new_tokens":
        assert not OPTIONS[name].values.allows(None)  # every value of it changes something
        return
    params = SamplingParams(**{name: OPTIONS[name].neutral})
    assert name not in params.asked()
    assert params.unsupported(()) == ["max_new_tokens=128"]


def test_columns_hold_numbers() -> None:
    """What a slot holds of a request that does not ask changes nothing."""
    held = {column.name: column for column in REQUEST_COLUMNS}
    asked = {name: option for name, option in OPTIONS.items() if option.column is not None}
    assert set(asked) == {"min_tokens", "temperature", "top_k", "top_p", "min_p"}
    for name, option in asked.items():
        assert option.column in (int, float)
        assert not isinstance(option.empty, bool)
        assert option.neutral in (None, option.empty)
        assert held[name].empty == option.empty
        assert held[name].kind is option.column


def test_every_option_is_served_or_refused() -> None:
    """A new option has to be put on one of the two sides."""
    used = {
        "max_new_tokens",
        "min_tokens",
        "stop_token_ids",
        "stop",
        "ignore_eos",
        "speculate",
        "relaxed_acceptance",
    }
    assert used == SERVED
    draws = {"temperature", "top_k", "top_p", "min_p", "seed"}
    assert {name for name, option in OPTIONS.items() if option.draws} == draws
    assert set(OPTIONS) == used | draws | set(UNSUPPORTED)


# --- ranges ---


class Refused(NamedTuple):
    options: dict[str, Any]
    message: str


REFUSED = [
    Refused({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
    Refused({"max_new_tokens": -3}, "max_new_tokens must be an integer >= 1, got -3"),
    Refused({"max_new_tokens": 2.0}, "max_new_tokens must be an integer >= 1, got 2.0"),
    Refused({"max_new_tokens": True}, "max_new_tokens must be an integer >= 1, got True"),
    Refused({"max_new_tokens": None}, "max_new_tokens must be an integer >= 1, got None"),
    Refused({"min_tokens": -1}, "min_tokens must be an integer >= 0, got -1"),
    Refused({"min_tokens": "2"}, "min_tokens must be an integer >= 0, got '2'"),
    Refused({"min_tokens": 9, "max_new_tokens": 8}, "min_tokens 9 is above max_new_tokens 8"),
    Refused({"stop": "END"}, "stop must be a sequence of strings that are not empty, got 'END'"),
    Refused({"stop": [""]}, "stop must be a sequence of strings that are not empty, got ('',)"),
    Refused({"stop": [3]}, "stop must be a sequence of strings that are not empty, got (3,)"),
    Refused({"stop": b"x"}, "stop must be a sequence of strings that are not empty, got b'x'"),
    Refused({"stop_token_ids": 5}, "stop_token_ids must be a sequence of token ids >= 0, got 5"),
    Refused(
        {"stop_token_ids": [-1]}, "stop_token_ids must be a sequence of token ids >= 0, got (-1,)"
    ),
    Refused(
        {"stop_token_ids": "12"}, "stop_token_ids must be a sequence of token ids >= 0, got '12'"
    ),
    Refused({"temperature": -0.1}, "temperature must be a number >= 0, got -0.1"),
    Refused({"temperature": float("nan")}, "temperature must be a number >= 0, got nan"),
    Refused({"temperature": float("inf")}, "temperature must be a number >= 0, got inf"),
    Refused({"temperature": "hot"}, "temperature must be a number >= 0, got 'hot'"),
    Refused({"top_k": -1}, "top_k must be an integer >= 0, got -1"),
    Refused({"top_k": 1.5}, "top_k must be an integer >= 0, got 1.5"),
    Refused({"top_p": 1.1}, "top_p must be a number from 0 to 1, got 1.1"),
    Refused({"top_p": -0.5}, "top_p must be a number from 0 to 1, got -0.5"),
    Refused({"min_p": 2}, "min_p must be a number from 0 to 1, got 2"),
    Refused({"seed": -1}, "seed must be an integer from 0 to 2**64 - 1, got -1"),
    Refused({"seed": 2**64}, f"seed must be an integer from 0 to 2**64 - 1, got {2**64}"),
    Refused({"n": 0}, "n must be an integer >= 1, got 0"),
    Refused({"ignore_eos": "yes"}, "ignore_eos must be True or False, got 'yes'"),
    Refused({"speculate": 1}, "speculate must be True or False, got 1"),
    Refused({"relaxed_acceptance": None}, "relaxed_acceptance must be True or False, got None"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: str(case.options))
def test_wrong_values_are_refused(case: Refused) -> None:
    message = f"^sampling parameters: {re.escape(case.message)}$"
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**case.options)
    assert isinstance(caught.value, MTPPluginError)
    assert isinstance(caught.value, ValueError)


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_new_tokens=0, stop="x", temperature=-1, n=0)
    assert str(caught.value).split("; ") == [
        "sampling parameters: max_new_tokens must be an integer >= 1, got 0",
        "stop must be a sequence of strings that are not empty, got 'x'",
        "temperature must be a number >= 0, got -1",
        "n must be an integer >= 1, got 0",
    ]


def test_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no_repeat_ngram_size"):
        SamplingParams(no_repeat_ngram_size=2)  # type: ignore[call-arg]


def test_lists_and_none_are_as_good_as_tuples() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[3], bad_words=[])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("a",), (3,), ())
    assert params.unsupported(SERVED) == []
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # type: ignore[arg-type]


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_new_tokens = 3  # type: ignore[misc]


def test_what_counts_as_greedy() -> None:
    """R27: an unset temperature beside a set option samples; 0, top_k 1 and top_p 0 do not."""
    table = itertools.product(
        (None, 0, 1e-3, 0.7, 1), (None, 0, 1, 50), (None, 0, 0.9, 1), (None, 0, 0.1)
    )
    for values in table:
        options = dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
        params = SamplingParams(**options)
        temperature, top_k, top_p, _ = values
        unset = values == (None, None, None, None)
        greedy = unset or temperature == 0 or top_k == 1 or top_p == 0
        assert params.is_greedy is greedy, values
        named = {option.split("=")[0] for option in params.unsupported(SERVED)}
        given = {name for name, value in options.items() if value is not None}
        assert named == (set() if greedy else given), values


UNSUPPORTED = {
    "n": 2,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {3: -1.0},
    "bad_words": ("a",),
    "logprobs": 0,
    "prompt_logprobs": 1,
    "guided_decoding": {"json": {}},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_option_is_named_with_its_value(name: str) -> None:
    value = UNSUPPORTED[name]
    assert SamplingParams(**{name: value}).unsupported(SERVED) == [f"{name}={value!r}"]


def test_every_unsupported_option_is_named() -> None:
    options = SamplingParams(temperature=0.7, top_p=0.9, **UNSUPPORTED).unsupported(SERVED)
    assert [option.split("=")[0] for option in options] == ["temperature", "top_p", *UNSUPPORTED]


ALLOWED: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.integers(1),
    "min_tokens": st.integers(0, SamplingParams().max_new_tokens),
    "stop_token_ids": st.tuples(st.integers(0)),
    "stop": st.tuples(st.text(min_size=1)),
    "ignore_eos": st.booleans(),
    "speculate": st.booleans(),
    "relaxed_acceptance": st.booleans(),
    "temperature": st.floats(0, allow_infinity=False),
    "top_k": st.integers(0),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(0, 2**64 - 1),
    "n": st.integers(1),
}
"""Values in the range of every option that has one; None too where None is the default."""


def outside(name: str) -> st.SearchStrategy[Any]:
    """Values out of an option's range, those of every other kind too."""
    option = OPTIONS[name]
    anything = st.one_of(
        st.integers(-(2**65), 2**65),
        st.floats(),
        st.just(math.nan),
        st.booleans(),
        st.none(),
        st.text(max_size=2),
        st.binary(max_size=2),
        st.tuples(st.one_of(st.integers(-2, 2), st.booleans(), st.text(max_size=1), st.none())),
        st.dictionaries(st.integers(), st.integers(), max_size=1),
    )
    taken_as_empty = name in ("stop_token_ids", "stop")
    return anything.filter(
        lambda value: not (option.values.allows(value) or (value is None and taken_as_empty))
    )


def test_every_option_with_a_range_is_drawn() -> None:
    unranged = {name for name, option in OPTIONS.items() if option.values.words == "anything"}
    assert set(ALLOWED) == set(OPTIONS) - unranged


@pytest.mark.parametrize("name", ALLOWED)
@given(data=st.data())
def test_a_range_takes_what_is_in_it(name: str, data: Any) -> None:
    value = data.draw(ALLOWED[name])
    assert vars(SamplingParams(**{name: value}))[name] == value
    if OPTIONS[name].neutral is None and name != "max_new_tokens":
        assert vars(SamplingParams(**{name: None}))[name] is None


@pytest.mark.parametrize("name", ALLOWED)
@given(data=st.data())
def test_a_range_refuses_what_lies_outside(name: str, data: Any) -> None:
    value = data.draw(outside(name))
    told = re.escape(f"{name} must be {OPTIONS[name].values.words}, got {value!r}")
    with pytest.raises(RequestError, match=told):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("value", [True, False, math.nan, math.inf, -1, -0.5])
def test_no_range_holds_these(name: str, value: float) -> None:
    """But a flag's holds bools."""
    if isinstance(value, bool) and isinstance(OPTIONS[name].neutral, bool):
        assert OPTIONS[name].values.allows(value)
        return
    with pytest.raises(RequestError, match=f"{name} must be"):
        SamplingParams(**{name: value})


# --- what is asked for ---


def test_what_is_asked_for_is_what_changes_something() -> None:
    assert SamplingParams().asked() == {"max_new_tokens": 128}
    options = {
        "max_new_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": (3,),
        "stop": ("a",),
        "ignore_eos": True,
        "speculate": False,
        "relaxed_acceptance": False,
        **UNSUPPORTED,
    }
    assert SamplingParams(**options).asked() == options
    assert list(SamplingParams(**options).asked()) == list(options)  # in the table's order


def test_what_is_asked_of_draws_counts_where_there_are_any() -> None:
    draws = {"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3}
    asked = {"max_new_tokens": 128, **draws}
    assert SamplingParams(**draws).asked() == asked
    for greedy in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0}):
        assert SamplingParams(**{**draws, **greedy}).asked() == {"max_new_tokens": 128}
    # a seed alone draws nothing
    assert SamplingParams(seed=3).asked() == {"max_new_tokens": 128}


def test_options_that_are_served_are_supported() -> None:
    params = SamplingParams(temperature=0.7, n=2)
    assert params.unsupported(SERVED | {"temperature"}) == ["n=2"]
    assert params.unsupported(OPTIONS) == []


def test_edits_of_the_logits() -> None:
    def edits(**options: Any) -> bool:
        params = SamplingParams(**options)
        return RequestFacts.of(0, params, prompt_len=1, max_seq_len=9).edits_logits

    assert not edits()
    assert edits(min_tokens=1)
    assert not edits(stop_token_ids=(3,), stop=("a",), ignore_eos=True)
    assert {name for name, option in OPTIONS.items() if option.edits_logits} == EDITED_OPTIONS


def test_greedy_by_the_name_of_the_options_alone() -> None:
    assert is_greedy({})
    assert is_greedy({"seed": 3, "n": 2})
    assert is_greedy({"temperature": None, "top_k": None, "top_p": None, "min_p": None})
    assert not is_greedy({"temperature": 0.7})
    assert not is_greedy({"min_p": 0})
    assert is_greedy({"temperature": 0.0, "min_p": 0.5})
