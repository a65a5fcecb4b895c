"""Options of a request that have no flag of their own."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mtp_plugin.errors import RequestError
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.tools.terminal.request_options import sampling_params

FLAGS = {"max_new_tokens": 9, "temperature": None}


@pytest.mark.parametrize(
    ("text", "requested"),
    [
        ("stop_token_ids=[3, 4]", {"stop_token_ids": (3, 4)}),
        ("logit_bias={3: 1.5, 4: -2}", {"logit_bias": {3: 1.5, 4: -2}}),
        ("bad_words=[[3, 4], the]", {"bad_words": ((3, 4), "the")}),
        ("bad=[[3]]", {"bad_words": ((3,),)}),
        ("stop='a=b'", {"stop": ("a=b",)}),
        ("speculate=false", {"speculate": False}),
        ("temperature=0.5", {"temperature": 0.5}),
        ("relaxed_delta=1e-1", {"relaxed_delta": 0.1}),
        ("logprobs=", {}),
    ],
)
def test_values_are_those_of_yaml(text: str, requested: dict[str, Any]) -> None:
    assert sampling_params(FLAGS, [text]) == SamplingParams(max_new_tokens=9, **requested)


def test_several() -> None:
    params = sampling_params(FLAGS, ["min_tokens=2", "logprobs=3"])
    assert (params.max_new_tokens, params.min_tokens, params.logprobs) == (9, 2, 3)
    assert sampling_params(FLAGS) == SamplingParams(max_new_tokens=9)


@pytest.mark.parametrize(
    ("flag", "texts", "tokens"),
    [
        (None, [], 128),
        (None, ["max_tokens=5"], 5),
        (None, ["max_new_tokens=5"], 5),
        (None, ["max_tokens="], None),
        (7, [], 7),
        (7, ["max_tokens=7"], 7),
    ],
)
def test_a_flag_that_nothing_gives_yields_to_another_name(
    flag: int | None, texts: list[str], tokens: int | None
) -> None:
    presumed = {"max_new_tokens": 128}
    params = sampling_params({"max_new_tokens": flag}, texts, presumed=presumed)
    assert params == SamplingParams(max_new_tokens=tokens)


def test_what_nests_without_end_is_named() -> None:
    with pytest.raises(RequestError, match=r"^--option: 'stop': nests too deeply"):
        sampling_params(FLAGS, ["stop=" + "[" * 20_000])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["min_tokens"], "--option: expected NAME=VALUE, got 'min_tokens'"),
        (["=3"], "--option: expected NAME=VALUE, got '=3'"),
        (["max_new_tokens=1"], "--option: max_new_tokens is given by its flag, too"),
        (["min_tokens=1", "min_tokens=1"], "--option: 'min_tokens' is given twice"),
        (
            ["stop=[a"],
            "--option: 'stop': line 1, column 3: while parsing a flow sequence: expected ',' or "
            "']', but got '<stream end>'",
        ),
        (
            ["logit_bias={3: 1, 3: 2}"],
            "--option: 'logit_bias': line 1, column 8: key '3' was already given on line 1",
        ),
        (
            ["max_tokens=3"],
            "sampling parameters: max_tokens=3 is max_new_tokens under another name, and "
            "max_new_tokens=9 is given as well",
        ),
        (["min_tokens=x"], "sampling parameters: min_tokens must be an integer >= 0, got 'x'"),
        (
            ["logit_bais={3: 1}"],
            "sampling parameters: logit_bais: unknown option; did you mean logit_bias?",
        ),
    ],
)
def test_what_cannot_be_is_named(texts: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
        sampling_params(FLAGS, texts)
