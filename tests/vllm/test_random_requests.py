"""Requests with random options give the same output with and without drafts."""

from __future__ import annotations

import pytest

from tests.vllm.engines import MAX_MODEL_LEN, MIXED_WITH_METHODS, RANDOM

pytest.importorskip("vllm")

LOGPROB_TOLERANCE = 1e-4


def assert_same_completion(got, expected):
    assert got.get("error") == expected.get("error")
    for key in ("tokens", "text", "finish_reason", "stop_reason"):
        assert got["completions"]["0"][key] == expected["completions"]["0"][key], key
    assert_close(got["completions"]["0"]["logprobs"], expected["completions"]["0"]["logprobs"])
    assert_close(got.get("prompt_logprobs"), expected.get("prompt_logprobs"))


def assert_close(got, expected):
    assert (got is None) == (expected is None)
    for mine, other in zip(got or [], expected or [], strict=True):
        assert (mine is None) == (other is None)
        values = {token: value for token, value, _ in mine or []}
        wanted = {token: value for token, value, _ in other or []}
        assert values == pytest.approx(wanted, abs=LOGPROB_TOLERANCE)


@pytest.mark.engines("k0", "k3")
@pytest.mark.parametrize("number", range(len(RANDOM)))
def test_options_give_the_same_output_with_drafts(results, number):
    got, expected = (results(name)["random"]["outputs"][number] for name in ("k3", "k0"))
    assert "error" not in expected, expected
    assert_same_completion(got, expected)


@pytest.mark.engines("k0", "few_blocks")
def test_preemption_and_the_longest_sequence_do_not_change_the_output(results, report):
    """Other methods are in the batch; their greedy requests are compared too."""
    result = results("few_blocks")["mixed"]
    expected = results("k0")["mixed"]["outputs"]
    at_the_end = compared = 0
    for given, got, wanted in zip(MIXED_WITH_METHODS, result["outputs"], expected, strict=True):
        assert "error" not in wanted, wanted
        is_at_the_end = len(got["prompt_token_ids"]) + len(got["tokens"]) == MAX_MODEL_LEN
        at_the_end += is_at_the_end
        if given["params"]["temperature"] == 0 or not given["params"]["extra_args"].get(
            "mtp_verification"
        ):
            compared += 1
            assert_same_completion(got, wanted)
    preemptions = result["counters"]["num_preemptions"]
    report(
        f"random requests: {compared} compared, {at_the_end} at the end, {preemptions} preempted"
    )
    assert preemptions > 2
    assert at_the_end > 2


@pytest.mark.engines("k0", "triton_k3")
@pytest.mark.parametrize("number", range(10))
def test_options_give_the_same_output_with_triton_kernels(results, number):
    got, expected = (results(name)["random"]["outputs"][number] for name in ("triton_k3", "k0"))
    assert_same_completion(got, expected)


@pytest.mark.engines("k0", "k3")
@pytest.mark.parametrize("name", ["k0", "k3"])
def test_prompt_without_a_seed_gives_different_outputs(results, name):
    outputs = [tuple(output["tokens"]) for output in results(name)["unseeded"]["outputs"]]
    assert len(set(outputs)) == len(outputs)


@pytest.mark.engines("k0", "k3")
def test_completions_of_one_prompt_differ(results):
    def completions(name):
        outputs = results(name)["n"]["outputs"]
        return [[o["completions"][str(i)]["tokens"] for i in range(3)] for o in outputs]

    seeded, unseeded = completions("k3")
    assert len({tuple(x) for x in unseeded}) == 3
    assert len({tuple(x) for x in seeded}) == 3
    assert seeded == completions("k0")[0]
