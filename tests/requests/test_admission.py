"""Which options of a host's request are refused: all that would change a greedy output."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.requests.admission import host_options, unsupported_options
from mtp_plugin.requests.options import HOST_OPTIONS, OPTIONS, Option


def asked(sampling: dict[str, Any] | None = None, **fields: Any) -> list[str]:
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
        {"no_repeat_ngram_size": [0], "num_return_sequences": 1, "top_p_decay": [0.5]},
        {"temperature": []},
        {"min_p": [0.0]},
        {"beam_width_array": [1]},
        {"repetition_penalty": [Fraction(1)], "num_return_sequences": Fraction(1)},
    ],
)
def test_what_changes_nothing_is_taken(sampling: dict[str, Any] | None) -> None:
    assert asked(sampling, py_return_log_probs=False, embedding_bias=None) == []
    assert asked(sampling, bad_words_list=[], py_beam_width=1) == []


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"temperature": [0.7]}, ["temperature=0.7"]),
        ({"top_p": [0.9]}, ["top_p=0.9"]),
        ({"top_k": [50], "top_p": [1.0]}, ["top_k=50", "top_p=1.0"]),
        ({"min_p": [0.05]}, ["min_p=0.05"]),
        ({"temperature": [1.0], "top_p_decay": [0.5]}, ["temperature=1.0", "top_p_decay=0.5"]),
        ({"beam_width": 4}, ["beam_width=4"]),
        ({"num_return_sequences": 2}, ["num_return_sequences=2"]),
        ({"min_length": [8]}, ["min_length=8"]),
        ({"repetition_penalty": [1.3]}, ["repetition_penalty=1.3"]),
        ({"presence_penalty": [-0.5]}, ["presence_penalty=-0.5"]),
        ({"frequency_penalty": 0.1}, ["frequency_penalty=0.1"]),
        ({"no_repeat_ngram_size": [3]}, ["no_repeat_ngram_size=3"]),
    ],
)
def test_sampling_options(sampling: dict[str, Any], told: list[str]) -> None:
    assert asked(sampling) == told


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"py_return_log_probs": True}, ["py_return_log_probs"]),
        ({"py_beam_width": 2}, ["beam_width=2"]),
        ({"embedding_bias": torch.zeros(3)}, ["embedding_bias"]),
        ({"py_bad_words_list": [[5]]}, ["py_bad_words_list"]),
        ({"py_logits_post_processors": [print]}, ["py_logits_post_processors"]),
        ({"py_additional_outputs": ["x"]}, ["py_additional_outputs"]),
        ({"guided_decoding_params": object()}, ["guided_decoding_params"]),
    ],
)
def test_fields_of_the_request(fields: dict[str, Any], told: list[str]) -> None:
    assert asked(**fields) == told


def test_where_decoding_is_greedy_anyway() -> None:
    """What servers put into every request, and what still changes the output."""
    sampling = SimpleNamespace(temperature=[1.0], top_p=[1.0], top_k=[0], repetition_penalty=[1.3])
    request = SimpleNamespace(sampling_config=sampling)
    assert unsupported_options(request, always_greedy=True) == ["repetition_penalty=1.3"]


def test_every_option_is_named_at_once() -> None:
    told = asked(
        {"temperature": [0.7], "repetition_penalty": [1.3], "beam_width": 1},
        py_return_context_logits=True,
        bad_words_list=[[3]],
    )
    assert told == [
        "py_return_context_logits",
        "bad_words_list",
        "temperature=0.7",
        "repetition_penalty=1.3",
    ]


def test_what_is_served_is_not_refused() -> None:
    request = SimpleNamespace(
        sampling_config=SimpleNamespace(min_length=[8], temperature=[0.7]),
        py_relaxed_acceptance=False,
    )
    told = ["py_relaxed_acceptance", "min_length=8", "temperature=0.7"]
    assert unsupported_options(request) == told
    assert unsupported_options(request, served={"min_tokens", "relaxed_acceptance"}) == told[2:]
    # a draw is refused by its own name alone
    assert unsupported_options(request, served={"temperature"}) == told[:2]


def test_options_are_found_under_our_names() -> None:
    sampling = SimpleNamespace(min_length=[8], num_return_sequences=2, beam_width=3)
    request = SimpleNamespace(sampling_config=sampling, py_return_log_probs=True)
    found = {one.option.name: (one.field, one.value) for one in host_options(request)}
    assert found == {
        "logprobs": ("py_return_log_probs", True),
        "min_tokens": ("config.min_length", 8),
        "n": ("config.num_return_sequences", 2),
        "beam_width": ("config.beam_width", 3),
    }


READ = [row for row in (*OPTIONS.values(), *HOST_OPTIONS) if row.host]


def having(fields: dict[str, Any]) -> SimpleNamespace:
    """A request with these fields, those of its config by ``config.NAME``."""
    of_config = {n.removeprefix("config."): v for n, v in fields.items() if "." in n}
    plain = {name: value for name, value in fields.items() if "." not in name}
    return SimpleNamespace(**plain, sampling_config=SimpleNamespace(**of_config))


@pytest.mark.parametrize("row", READ, ids=lambda row: row.name)
def test_the_first_field_that_is_there_counts(row: Option) -> None:
    asks: Any = not row.neutral if isinstance(row.neutral, bool) else 7
    names = row.host
    for place, name in enumerate(names):
        before = dict.fromkeys(names[:place])  # they are there, and say nothing
        behind = dict.fromkeys(names[place + 1 :], asks)
        (found,) = host_options(having({**before, name: asks, **behind}))
        assert (found.option, found.field, found.value) == (row, name, asks)
        neutral = row.neutral
        if isinstance(neutral, (int, float)):
            assert host_options(having({**before, name: neutral, **behind})) == []
    assert host_options(having(dict.fromkeys(names))) == []
    assert host_options(having(dict.fromkeys(names, ()))) == []


def test_a_request_without_a_config() -> None:
    assert host_options(SimpleNamespace()) == []
    assert host_options(SimpleNamespace(sampling_config=None)) == []
