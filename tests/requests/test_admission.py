"""Which options of a host's request are refused: all that would change a greedy output."""

from __future__ import annotations

from enum import Enum
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mtp_plugin.requests.admission import host_options, host_values, unsupported_options
from mtp_plugin.requests.options import HOST_OPTIONS, OPTIONS, Option
from tests.hostile import HOSTILE, LONGEST_LINE


def requested(sampling: dict[str, Any] | None = None, **fields: Any) -> list[str]:
    if sampling is not None:
        fields["sampling_config"] = SimpleNamespace(**sampling)
    return unsupported_options(SimpleNamespace(**fields))


@pytest.mark.parametrize(
    "sampling",
    [
        None,
        {},
        {"beam_width": 1, "temperature": None, "top_k": None, "min_length": [1]},
        {"temperature": [0.0], "top_p": [0.9], "top_k": [50], "min_p": [0.1]},
        {"top_k": [1], "temperature": [0.7]},
        {"top_p": [0.0]},
        {"temperature": 0.0, "repetition_penalty": 1.0, "presence_penalty": [0.0]},
        {"no_repeat_ngram_size": [1 << 30], "frequency_penalty": [0.0]},
        {"no_repeat_ngram_size": [0], "num_return_sequences": 1, "top_p_decay": [1.0]},
        {"num_return_sequences": 2},  # the host makes a request of each
        {"temperature": []},
        {"min_p": [0.0]},
        {"beam_width_array": [1]},
        {"beam_width_array": [1, 1]},
        {"beam_width_array": [[1, 1]]},
        {"beam_width_array": []},
        {"repetition_penalty": [Fraction(1)], "num_return_sequences": Fraction(1)},
        {"length_penalty": [0.0], "prompt_ignore_length": [0]},
        {"length_penalty": 1.0, "no_repeat_ngram_size": 0, "beam_width_array": None},
        {"top_k": [1], "top_p_decay": [1.0], "top_p_min": [1e-6], "top_p_reset_ids": [-1]},
        {"top_p_min": [float(np.float32(1e-6))]},  # as a host in C++ has it
        {"top_p_min": np.float32(1e-6)},
        {"top_p_min": [0.0]},
    ],
)
def test_what_changes_nothing_is_taken(sampling: dict[str, Any] | None) -> None:
    assert requested(sampling, py_return_log_probs=False, embedding_bias=None) == []
    assert requested(sampling, bad_words_list=[], py_beam_width=1) == []


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"temperature": [0.7]}, ["temperature=0.7"]),
        ({"top_p": [0.9]}, ["top_p=0.9"]),
        ({"top_k": [50], "top_p": [1.0]}, ["top_k=50", "top_p=1.0"]),
        ({"min_p": [0.05]}, ["min_p=0.05"]),
        ({"temperature": [1.0], "top_p_decay": [0.5]}, ["temperature=1.0", "top_p_decay=0.5"]),
        ({"beam_width": 4}, ["beam_width=4"]),
        ({"beam_width_array": [1, 2]}, ["beam_width_array"]),
        ({"beam_width_array": [[1, 2]]}, ["beam_width_array"]),
        ({"temperature": [0.0, 0.7]}, ["temperature"]),
        ({"top_p_min": [1.1e-6]}, ["top_p_min=1.1e-06"]),
        ({"num_return_sequences": 0}, ["num_return_sequences=0"]),
        ({"top_p_decay": [0.5]}, ["top_p_decay=0.5"]),
        ({"min_length": [8]}, ["min_length=8"]),
        ({"repetition_penalty": [1.3]}, ["repetition_penalty=1.3"]),
        ({"presence_penalty": [-0.5]}, ["presence_penalty=-0.5"]),
        ({"frequency_penalty": 0.1}, ["frequency_penalty=0.1"]),
        ({"no_repeat_ngram_size": [3]}, ["no_repeat_ngram_size=3"]),
    ],
)
def test_sampling_options(sampling: dict[str, Any], expected: list[str]) -> None:
    assert requested(sampling) == expected


NEVER_GIVEN: dict[str, tuple[Any, str]] = {
    "config.beam_width": (2, "beam_width=2"),
    "config.beam_width_array": ([2], "beam_width_array=2"),
    "config.length_penalty": ([0.5], "length_penalty=0.5"),
    "config.no_repeat_ngram_size": ([3], "no_repeat_ngram_size=3"),
    "config.num_return_sequences": (0, "num_return_sequences=0"),
    "config.top_p_decay": ([0.9], "top_p_decay=0.9"),
    "config.top_p_min": ([0.1], "top_p_min=0.1"),
    "config.top_p_reset_ids": ([5], "top_p_reset_ids=5"),
    "guided_decoding_params": (object(), "guided_decoding_params"),
    "py_additional_outputs": (["x"], "py_additional_outputs"),
    "py_beam_width": (2, "beam_width=2"),
    "py_guided_decoding_params": (object(), "py_guided_decoding_params"),
    "py_logits_post_processors": ([print], "py_logits_post_processors"),
    "py_return_context_logits": (True, "py_return_context_logits (of prompt_logprobs too)"),
    "py_return_generation_logits": (True, "py_return_generation_logits"),
}
"""Fields of a host that are never served, with a value and its message."""
GIVEN = set(OPTIONS) - {*list(OPTIONS)[list(OPTIONS).index("n") :]}


def test_every_field_by_which_nothing_is_given() -> None:
    rows = (row for row in (*OPTIONS.values(), *HOST_OPTIONS) if row.name not in GIVEN)
    assert {*NEVER_GIVEN} == {field for row in rows for field in row.host}


@pytest.mark.parametrize("others", [None, 0.0, 0.7])
@pytest.mark.parametrize("field", NEVER_GIVEN)
def test_what_is_never_given_is_refused_whether_or_not_there_are_draws(
    field: str, others: float | None
) -> None:
    value, expected = NEVER_GIVEN[field]
    request = having({"config.temperature": others, field: value})
    assert unsupported_options(request, served=GIVEN) == [expected]
    assert unsupported_options(request, always_greedy=True, served=GIVEN) == [expected]


class Raw(Enum):
    """A host's names for what log-probabilities are of."""

    RAW = "raw"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"py_return_log_probs": True}, ["py_return_log_probs"]),
        ({"py_beam_width": 2}, ["beam_width=2"]),
        ({"embedding_bias": torch.zeros(3)}, ["embedding_bias"]),
        ({"py_return_log_probs": True, "py_num_logprobs": 2}, ["py_return_log_probs"]),
        (
            {"py_return_log_probs": True, "py_logprobs_mode": "processed"},
            ["py_return_log_probs", "py_logprobs_mode=processed"],
        ),
        ({"py_return_log_probs": True, "py_logprobs_mode": Raw.RAW}, ["py_return_log_probs"]),
        ({"py_return_log_probs": False, "py_logprobs_mode": "processed"}, []),
        ({"py_bad_words_list": [[5]]}, ["py_bad_words_list"]),
        ({"py_logits_post_processors": [print]}, ["py_logits_post_processors"]),
        ({"py_additional_outputs": ["x"]}, ["py_additional_outputs"]),
        ({"guided_decoding_params": object()}, ["guided_decoding_params"]),
    ],
)
def test_fields_of_the_request(fields: dict[str, Any], expected: list[str]) -> None:
    assert requested(**fields) == expected


def test_where_decoding_is_greedy_anyway() -> None:
    """What servers put into every request, and what still changes the output."""
    sampling = SimpleNamespace(temperature=[1.0], top_p=[1.0], top_k=[0], repetition_penalty=[1.3])
    request = SimpleNamespace(sampling_config=sampling)
    assert unsupported_options(request, always_greedy=True) == ["repetition_penalty=1.3"]


def test_every_option_is_named_at_once() -> None:
    expected = requested(
        {"temperature": [0.7], "repetition_penalty": [1.3], "beam_width": 1},
        py_return_context_logits=True,
        bad_words_list=[[3]],
    )
    assert expected == [
        "py_return_context_logits (of prompt_logprobs too)",
        "bad_words_list",
        "temperature=0.7",
        "repetition_penalty=1.3",
    ]


def test_what_is_served_is_not_refused() -> None:
    request = SimpleNamespace(
        sampling_config=SimpleNamespace(min_length=[8], temperature=[0.7]),
        py_relaxed_acceptance=False,
    )
    expected = ["py_relaxed_acceptance", "min_length=8", "temperature=0.7"]
    assert unsupported_options(request) == expected
    assert unsupported_options(request, served={"min_tokens", "relaxed_acceptance"}) == expected[2:]
    # a draw is refused by its own name alone
    assert unsupported_options(request, served={"temperature"}) == expected[:2]


@pytest.mark.thinned("others")
@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("others", [{}, {"config.temperature": [0.5]}], ids=["alone", "sampled"])
def test_no_value_of_a_host_ends_in_another_error(value: Any, others: dict[str, Any]) -> None:
    """Each does nothing, is read as it may be, or is refused in a line that can be read."""
    fields = {field for row in (*OPTIONS.values(), *HOST_OPTIONS) for field in row.host}
    for field in sorted({*fields, "py_num_logprobs"}):
        flag = {"py_return_log_probs": True} if "logprobs" in field else {}
        for given in (value, [value]):
            request = having({**others, **flag, field: given})
            for served in (OPTIONS, ()):
                expected = unsupported_options(request, served=served)
                assert all(len(line) < LONGEST_LINE for line in expected)
            for name, read in host_values(request).items():
                row = OPTIONS[name]
                if name not in ("logit_bias", "bad_words", "logprobs"):
                    assert row.values.allows(read), (field, read)


def test_a_draw_that_cannot_be_is_reported_where_there_are_draws() -> None:
    config = SimpleNamespace(temperature=[0.0], top_p=[1.5])
    assert unsupported_options(SimpleNamespace(sampling_config=config), served=SERVED) == []


def test_options_are_found_under_our_names() -> None:
    sampling = SimpleNamespace(min_length=[8], num_return_sequences=0, beam_width=3)
    request = SimpleNamespace(sampling_config=sampling, py_return_log_probs=True, py_num_logprobs=5)
    found = {one.option.name: (one.field, one.value) for one in host_options(request)}
    assert found == {
        "logprobs": ("py_return_log_probs", 5),
        "min_tokens": ("config.min_length", 8),
        "n": ("config.num_return_sequences", 0),
        "beam_width": ("config.beam_width", 3),
    }


SERVED = set(OPTIONS) - {"no_repeat_ngram_size"}
READ = [row for row in (*OPTIONS.values(), *HOST_OPTIONS) if row.host]


def having(fields: dict[str, Any]) -> SimpleNamespace:
    """A request with these fields, those of its config by ``config.NAME``."""
    of_config = {n.removeprefix("config."): v for n, v in fields.items() if "." in n}
    plain = {name: value for name, value in fields.items() if "." not in name}
    return SimpleNamespace(**plain, sampling_config=SimpleNamespace(**of_config))


@pytest.mark.parametrize("row", READ, ids=lambda row: row.name)
def test_the_first_field_that_is_there_counts(row: Option) -> None:
    requested_value: Any = not row.neutral if isinstance(row.neutral, bool) else 7
    requested_value = 0 if row.name == "n" else requested_value
    value = 0 if row.name == "logprobs" else requested_value  # a flag with a number
    names = row.host
    if row.name == "logprobs_mode":  # no effect without log-probabilities
        assert host_options(having({"py_logprobs_mode": "processed"})) == []
        return
    for place, name in enumerate(names):
        before = dict.fromkeys(names[:place])  # they are there, and say nothing
        following = dict.fromkeys(names[place + 1 :], requested_value)
        (found,) = host_options(having({**before, name: requested_value, **following}))
        assert (found.option, found.field, found.value) == (row, name, value)
        neutral = row.neutral
        if isinstance(neutral, (int, float)):
            assert host_options(having({**before, name: neutral, **following})) == []
    assert host_options(having(dict.fromkeys(names))) == []
    assert host_options(having(dict.fromkeys(names, ()))) == []


def test_how_many_log_probabilities() -> None:
    for number, expected in ((None, 0), (0, 0), (3, 3), (True, 1)):
        request = SimpleNamespace(py_return_log_probs=True, py_num_logprobs=number)
        assert host_values(request) == {"logprobs": expected}
    assert host_values(SimpleNamespace(py_return_log_probs=True)) == {"logprobs": 0}
    assert host_values(SimpleNamespace(py_return_log_probs=False, py_num_logprobs=3)) == {}


def test_plain_words_are_never_taken_for_a_pair() -> None:
    """Two words as long as each other look like words and their ends."""
    pair = [[5, 9], [1, 2]]
    assert host_values(SimpleNamespace(bad_words_list=pair)) == {"bad_words": ((5,), (9,))}
    assert host_values(SimpleNamespace(py_bad_words=pair)) == {"bad_words": ((5, 9), (1, 2))}
    both = SimpleNamespace(py_bad_words=[[5], [1]], bad_words_list=torch.tensor([[[5, 1], [1, 2]]]))
    assert host_values(both) == {"bad_words": ((5,), (1,))}


def test_draws_are_left_out_of_greedy_decoding() -> None:
    greedy = SimpleNamespace(temperature=[0.0], top_k=[50], random_seed=[7], min_length=[3])
    assert host_values(SimpleNamespace(sampling_config=greedy)) == {"min_tokens": 3}
    sampled = SimpleNamespace(top_p_decay=[0.5])
    assert host_values(SimpleNamespace(sampling_config=sampled)) == {"top_p_decay": 0.5}


def test_a_request_without_a_config() -> None:
    assert host_options(SimpleNamespace()) == []
    assert host_options(SimpleNamespace(sampling_config=None)) == []
