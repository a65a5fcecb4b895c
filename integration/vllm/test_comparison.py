"""The comparison of outputs, and the chi-square test, without vLLM."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from typing import Any

import pytest

from integration.vllm.methods import LEAST_P, chi_square
from integration.vllm.reference import (
    differing,
    first_difference,
    logprob_difference,
    other_differences,
)
from integration.vllm.replay import copied, make_texts, right_drafts
from integration.vllm.traffic import make_requests, outputs_of


def given(tokens: list[int], *, is_aborted: bool = False, **completion: Any) -> dict[str, Any]:
    result = {"tokens": tokens, "completions": {"0": completed(**completion)}}
    return {"result": result, "is_aborted": is_aborted, "num_drafts": 3, "params": {}}


def expected(tokens: list[int], **completion: Any) -> dict[str, Any]:
    return {"tokens": tokens, "completions": {0: completed(**completion)}}


def completed(**options: Any) -> dict[str, Any]:
    defaults = {"text": "a", "finish_reason": "length", "stop_reason": None, "logprobs": None}
    return defaults | options


@pytest.mark.parametrize(
    ("got", "wanted", "is_aborted", "position"),
    [
        ([1, 2, 3], [1, 2, 3], False, None),
        ([1, 5, 3], [1, 2, 3], False, 1),
        ([1, 2], [1, 2, 3], False, 2),
        ([1, 2, 3], [1, 2], False, 2),
        ([1, 2], [1, 2, 3], True, None),
        ([1, 5], [1, 2, 3], True, 1),
        ([], [1], True, None),
    ],
)
def test_first_difference(
    got: list[int], wanted: list[int], is_aborted: bool, position: int | None
) -> None:
    assert first_difference(given(got, is_aborted=is_aborted), expected(wanted)) == position


def test_tokens_after_a_stop_string_are_no_difference_within_one_step() -> None:
    stopped = expected([1, 2], finish_reason="stop", stop_reason="e")
    assert first_difference(given([1, 2, 3, 4, 5]), stopped) is None
    assert first_difference(given([1, 2, 3, 4, 5, 6]), stopped) == 2
    assert first_difference(given([1, 3, 2]), stopped) == 1
    by_token = expected([1, 2], finish_reason="stop", stop_reason=2)
    assert first_difference(given([1, 2, 3]), by_token) == 2


def test_tokens_after_one_that_the_grammar_rejects_are_no_difference_within_one_step() -> None:
    ended = expected([1, 2], text="ab", finish_reason="error")
    ours = given([1, 2, 3], text="abc", finish_reason="error")
    assert first_difference(ours, ended) is None
    assert other_differences(ours, ended, 0.01) == []
    other = given([1, 2, 3], text="bcd", finish_reason="error")
    assert other_differences(other, ended, 0.01) == ["text is 'bcd' with drafts, 'ab' without"]


STOP_STRING = {"finish_reason": "stop", "stop_reason": "bc"}
STOP_TOKEN = {"finish_reason": "stop", "stop_reason": 2}
ERROR = {"finish_reason": "error"}


@pytest.mark.parametrize(
    ("got", "wanted", "is_same"),
    [
        ({**STOP_STRING, "text": "a"}, {**ERROR, "text": "ab"}, True),  # without "bc"
        ({**STOP_STRING, "text": "a"}, {**ERROR, "text": "x"}, False),
        ({**STOP_TOKEN, "text": "abc"}, {**ERROR, "text": "ab"}, False),
        ({**ERROR, "text": "abc"}, {**STOP_STRING, "text": "a"}, True),
        ({**ERROR, "text": "abc"}, {**STOP_TOKEN, "text": "ab"}, True),
        ({**ERROR, "text": "bcd"}, {**STOP_TOKEN, "text": "ab"}, False),
        ({"text": "abc"}, {**ERROR, "text": "ab"}, False),
    ],
)
def test_a_step_at_the_end_of_a_grammar_may_end_with_error_or_stop(
    got: dict[str, Any], wanted: dict[str, Any], is_same: bool
) -> None:
    ours = given([1, 2, 3], **got) | {"params": {"stop": ["bc"]}}
    ended = expected([1, 2], **wanted)
    assert first_difference(ours, ended) is None
    assert (other_differences(ours, ended, 0.01) == []) == is_same


@pytest.mark.parametrize(("first", "text"), [(")", "(self"), ("(self)", "")])
def test_of_two_stop_strings_of_a_step_the_first_of_the_list_may_end_the_output(
    first: str, text: str
) -> None:
    def ended(stop: str, text: str) -> dict[str, Any]:
        return {"finish_reason": "stop", "stop_reason": stop, "text": text}

    ours = given([1, 2], **ended(first, text)) | {"params": {"stop": [first, "self"]}}
    without = expected([1, 2], **ended("self", "("))
    assert other_differences(ours, without, 0.01) == []
    ours["params"] = {"stop": ["self", first]}
    assert len(other_differences(ours, without, 0.01)) == 2


def test_requests_of_a_batch_differ_at_a_token_or_an_end() -> None:
    requests = [{"prompt": [n], "params": {}} for n in range(4)]
    found = differing(requests, [[1, 2], [1, 3], [1], [5]], [[1, 2], [1, 2], [1, 2], [5]])
    assert [(r["number"], r["result"]["tokens"], at) for r, _, at in found] == [
        (1, [1, 3], 1),
        (2, [1], 1),
    ]
    assert found[0][1] == {"tokens": [1, 2], "prompt_token_ids": [1]}


def test_finish_reasons_and_logprobs_are_compared() -> None:
    ours = given([1], logprobs=[[[1, -0.5, 1]]])
    assert other_differences(ours, expected([1], logprobs=[[[1, -0.5, 1]]]), 0.01) == []
    found = other_differences(
        ours, expected([1], finish_reason="stop", logprobs=[[[1, -0.6, 1]]]), 0.01
    )
    assert found == [
        "finish_reason is 'length' with drafts, 'stop' without",
        "logprobs differ by 0.1",
    ]


def test_missing_logprobs_differ() -> None:
    assert logprob_difference(None, None) == 0.0
    assert logprob_difference(None, [[[1, -0.5, 1]]]) == float("inf")
    assert logprob_difference([None, [[1, -0.5, 1]]], [None, [[1, -0.5, 1]]]) == 0.0
    assert logprob_difference([None], [[[1, -0.5, 1]]]) == float("inf")


def test_requests_are_the_same_for_the_same_seed() -> None:
    def first(seed: int) -> str:
        requests = make_requests(["abc def ", "ghi"], seed, 3, 32, ("rejection", "block"))
        return json.dumps(list(itertools.islice(requests, 200)))

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_compared_requests_have_options_that_change_no_output() -> None:
    requests = make_requests(["abc def "], 0, 3, 32, ("rejection", "block"))
    kinds: Counter[Any] = Counter()
    for request in itertools.islice(requests, 500):
        extra = request["params"].get("extra_args", {})
        if request["is_compared"]:
            assert "seed" in request["params"]
            assert set(extra) <= {"mtp_speculate", "mtp_max_draft_len"}
        kinds.update([(request["is_compared"], *sorted(extra.items()))])
    assert kinds[True, ("mtp_speculate", False)] > 5
    assert kinds[True, ("mtp_max_draft_len", 2)] > 5
    assert kinds[False, ("mtp_verification", "block")] > 5


def test_plain_requests_come_first() -> None:
    requests = list(itertools.islice(make_requests(["a", "b"], 0, 3, 32, (), plain=3), 7))
    temperatures = [request["params"]["temperature"] for request in requests[:6]]
    assert temperatures == [0.0] * 3 + [0.8] * 3
    assert [request["number"] for request in requests] == list(range(7))


def test_several_outputs_are_compared_each_by_its_seed() -> None:
    request = {"number": 4, "params": {"n": 2, "seed": 10, "temperature": 1.0}}
    result = {"tokens": [5], "completions": {1: {"tokens": [6]}, 0: {"tokens": [5]}}}
    found = {
        each["number"]: (each["params"]["seed"], each["result"]["tokens"], "n" in each["params"])
        for each in outputs_of(request, result)
    }
    assert found == {"4.0": (10, [5], False), "4.1": (11, [6], False)}


def sampled(seed: int, weights: list[float]) -> Counter[int]:
    return Counter(random.Random(seed).choices(range(len(weights)), weights, k=4000))


def test_chi_square_accepts_samples_of_one_distribution() -> None:
    weights = [50.0, 20, 20, 9, 0.5, 0.3, 0.2]
    least = min(
        chi_square(sampled(seed, weights), sampled(100 + seed, weights))[0] for seed in range(20)
    )
    assert LEAST_P < least < 0.3


def test_chi_square_finds_another_distribution() -> None:
    one, other = sampled(1, [50, 20, 20, 10]), sampled(2, [44, 20, 20, 16])
    assert chi_square(one, other)[0] < LEAST_P


def test_chi_square_of_a_known_table() -> None:
    p, freedom = chi_square(Counter(a=60, b=40), Counter(a=40, b=60))
    assert freedom == 1
    assert p == pytest.approx(0.00467773, rel=1e-5)  # statistic 8


@pytest.mark.parametrize(
    ("name", "least", "most"), [("edits", 0.6, 0.9), ("quotes", 0.25, 0.4), ("prose", 0.0, 0.001)]
)
def test_replayed_texts_copy_what_they_should(name: str, least: float, most: float) -> None:
    texts = make_texts(name, 4, 512, 384, 129280)
    assert {(len(text["prompt"]), len(text["output"])) for text in texts} == {(512, 384)}
    flags = [flag for text in texts for flag in copied(text["prompt"], text["output"])]
    assert least <= sum(flags) / len(flags) <= most


def test_tokens_that_follow_six_equal_ones_are_copied() -> None:
    assert copied([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 9, 8]) == [
        *([False] * 6),
        True,
        False,
        False,
    ]


def test_drafts_are_right_by_their_rates() -> None:
    for is_copy, first, third in ((True, 0.9, 0.9), (False, 0.78, 0.467 / 0.605)):
        right = right_drafts([is_copy] * 4000, 0.9, 1)
        for bit, rate in ((0, first), (2, third)):
            assert abs(sum(bits >> bit & 1 for bits in right) / 4000 - rate) < 0.03
