"""What becomes of each option of vLLM with drafts: kept, or refused by vLLM or the plugin."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest

from tests.vllm.engines import NEWLINE, PROCESSORS
from tests.vllm.options import KEPT, REFUSED, TRUNCATION
from tests.vllm.test_random_requests import assert_same_completion

pytest.importorskip("vllm")

END_OF_THINKING = 2
"""Token id of ``</think>``."""


def output(results, name, phase, number):
    return results(name)[phase]["outputs"][number]


@pytest.mark.engines("k3", "without_package_k0")
@pytest.mark.parametrize("option", KEPT)
def test_greedy_output_equals_that_of_vllm_without_the_package(results, option):
    number = list(KEPT).index(option)
    expected = output(results, "without_package_k0", "options greedy", number)
    assert "error" not in expected, expected
    assert_same_completion(output(results, "k3", "options greedy", number), expected)


@pytest.mark.engines("k0", "k3")
@pytest.mark.parametrize("option", KEPT | TRUNCATION)
def test_sampled_output_is_the_same_with_drafts(results, option):
    number = list(KEPT | TRUNCATION).index(option)
    expected = output(results, "k0", "options sampled", number)
    assert "error" not in expected, expected
    assert_same_completion(output(results, "k3", "options sampled", number), expected)


@pytest.mark.engines("k3")
@pytest.mark.parametrize("option", REFUSED)
def test_option_is_refused_with_drafts(results, option):
    error = output(results, "k3", "refused", list(REFUSED).index(option))["error"]
    assert REFUSED[option][1] in error


@pytest.mark.engines("k0", "k3", "processors_k0", "processors_k3")
@pytest.mark.parametrize("phase", PROCESSORS)
def test_processors_give_the_same_output_with_drafts(results, phase):
    for got, expected in zip(
        *(results(name)[phase]["outputs"] for name in ("processors_k3", "processors_k0")),
        strict=True,
    ):
        assert "error" not in expected, expected
        assert_same_completion(got, expected)


@pytest.mark.engines("processors_k3")
def test_thinking_ends_at_its_budget(results):
    phase = results("processors_k3")["thinking"]
    for given, result in zip(PROCESSORS["thinking"], phase["outputs"], strict=True):
        assert result["tokens"].index(END_OF_THINKING) == given["params"]["thinking_token_budget"]


@pytest.mark.engines("processors_k3")
def test_structures_begin_when_thinking_ends(results, report):
    """Also if a draft ends it, and others follow in the same step."""
    outputs = results("processors_k3")["structure after thinking"]["outputs"]
    ended = [each for each in outputs if NEWLINE in each["tokens"]]
    crossing = sum(
        each["tokens"].index(NEWLINE) + 1 not in accumulate(each["new_tokens"]) for each in ended
    )
    finished = sum(each["completions"]["0"]["finish_reason"] == "stop" for each in ended)
    report(
        f"thinking ends in {len(ended)} of {len(outputs)} outputs, in {crossing} within a step; "
        f"{finished} structures end"
    )
    assert crossing > 0
    assert finished > 3


@pytest.mark.engines("processors_k3")
def test_custom_processor_is_applied_to_every_row(results):
    phase = results("processors_k3")["custom"]
    for given, result in zip(PROCESSORS["custom"], phase["outputs"], strict=True):
        tokens = result["tokens"]
        obeys = all(token % 2 == 0 for token in tokens)
        assert obeys == given["params"]["extra_args"]["even"]
        if obeys:
            assert all(a != b for a, b in pairwise(tokens))
