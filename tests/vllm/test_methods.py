"""Verification methods and limits of drafts of single requests."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from integration.vllm.methods import chi_square
from tests.vllm.engines import BANNED, LIMITS, METHODS, NEWLINE, PLAIN, RELAXED_BANNED, WAVES

pytest.importorskip("vllm")

LIMIT_OF = [3, 0, 1, 0, 2]
"""Of each of `LIMITS`."""


def tokens(result, phase):
    return [output["tokens"] for output in result[phase]["outputs"]]


def acceptance_length(result, phase):
    counters = result[phase]["counters"]
    return 1 + counters["spec_decode_num_accepted_tokens"] / counters["spec_decode_num_drafts"]


def ranks_of(output):
    """Return the rank of each token of an output among the target's logits."""
    found = output["completions"]["0"]["logprobs"]
    return [
        next(rank for token, _, rank in at if token == sampled)
        for sampled, at in zip(output["tokens"], found, strict=True)
    ]


@pytest.mark.engines("k0", "methods_k3")
def test_withheld_drafts_do_not_change_the_output(results):
    assert tokens(results("methods_k3"), "withheld") == tokens(results("k0"), "plain")


@pytest.mark.engines("methods_k3")
def test_steps_accept_no_more_drafts_than_the_limit(results):
    for number, output in enumerate(results("methods_k3")["withheld"]["outputs"]):
        limit = LIMIT_OF[number % len(LIMITS)]
        assert max(output["new_tokens"]) <= limit + 1
        if limit < 3:
            assert (1 + limit in output["new_tokens"][1:-1]) or limit == 2


@pytest.mark.engines("methods_k3")
def test_metrics_count_no_withheld_drafts(results):
    phase = results("methods_k3")["withheld"]
    steps = drafts = 0
    for number, output in enumerate(phase["outputs"]):
        limit = LIMIT_OF[number % len(LIMITS)]
        later_steps = len(output["new_tokens"]) - 1
        steps += later_steps * (limit > 0)
        drafts += later_steps * limit
    assert phase["counters"]["spec_decode_num_drafts"] == steps
    assert phase["counters"]["spec_decode_num_draft_tokens"] == drafts


@pytest.mark.engines("methods_k3")
def test_methods_by_probability_accept_more_sampled_drafts(results, report):
    result = results("methods_k3")
    lengths = {m: acceptance_length(result, m) for m in ("coupled", "rejection", "block")}
    report(f"acceptance length at T = 0.8: {lengths}")
    assert lengths["rejection"] >= lengths["coupled"] > 1.5
    assert lengths["block"] >= lengths["coupled"]
    for method in ("rejection", "block"):
        assert tokens(result, method) != tokens(result, "coupled")
        assert all(len(output) == 48 for output in tokens(result, method))


@pytest.mark.engines("k0", "methods_k3")
def test_other_methods_in_a_batch_do_not_change_coupled_requests(results):
    """Greedy requests with these methods are verified as coupled ones."""
    pairs = zip(
        METHODS["mixed"],
        tokens(results("methods_k3"), "mixed"),
        tokens(results("k0"), "plain"),
        strict=True,
    )
    differ = 0
    for given, output, expected in pairs:
        if given["params"]["extra_args"] and given["params"]["temperature"] > 0:
            differ += output != expected
            assert len(output) == len(expected)
        else:
            assert output == expected
    assert differ > 0


@pytest.mark.engines("k0", "methods_k3", "dynamic")
@pytest.mark.parametrize("name", ["methods_k3", "dynamic"])
@pytest.mark.parametrize("method", ["rejection", "block"])
def test_min_p_and_logit_bias_are_read_by_methods_by_probability(results, name, method):
    """Where only one token is possible; those of a batch whose draft length changes too."""
    phase = f"{method} one token"
    expected = [each for each in tokens(results("k0"), "both")[::2] for _ in range(2)]
    found = tokens(results(name), phase)
    assert found == [each[: len(got)] for got, each in zip(found, expected, strict=True)]
    assert min(map(len, found)) == (4 if name == "dynamic" else 32)
    assert results(name)[phase]["counters"]["spec_decode_num_accepted_tokens"] > 0


def p_values(one, other):
    """Return the p-values of chi-square tests of the tokens, and pairs of them, by position."""
    found = {}
    for position in range(1, max(map(len, one))):
        for width in (1, 2):
            counts = [
                Counter(
                    tuple(output[position - width + 1 : position + 1])
                    for output in outputs
                    if len(output) > position
                )
                for outputs in (one, other)
            ]
            found[position, width] = chi_square(*counts)[0]
    return found


@pytest.mark.engines("k0", "methods_k3", "dynamic")
@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("methods_k3", ["rejection samples"]),
        ("methods_k3", ["block samples"]),
        ("dynamic", list(WAVES)),
        ("k0", ["other samples"]),
    ],
)
def test_min_p_and_logit_bias_keep_their_distribution(results, report, name, phases):
    """Also if the draft length changes during requests; without the bias it is another one."""
    found = [output for phase in phases for output in tokens(results(name), phase)]
    values = p_values(found, tokens(results("k0"), "samples"))
    least = min(values.values()) * len(values)
    report(
        f"{name} {phases[0]}: least p of {len(values)} chi-square tests, times that: {least:.2g}"
    )
    assert (least < 1e-3) == (name == "k0")


@pytest.mark.engines("k0", "methods_k3")
def test_relaxed_acceptance_reads_biased_logits(results, report):
    """With 120 tokens ruled out by a bias: other drafts are accepted by rank and probability."""
    result = results("methods_k3")
    strict, relaxed = results("k0")["strict banned"]["outputs"], result["relaxed banned"]["outputs"]
    assert [each["tokens"] for each in relaxed] != [each["tokens"] for each in strict]
    ranks = Counter()
    for output in relaxed:
        ends = set(itertools.accumulate(output["new_tokens"][:-1]))
        logprobs = output["completions"]["0"]["logprobs"]
        for number, (token, at) in enumerate(zip(output["tokens"], logprobs, strict=True), 1):
            allowed = {each: math.exp(value) for each, value, _ in at if each not in BANNED}
            ruled_out = sum(math.exp(value) for each, value, _ in at if each in BANNED)
            rank = 1 + sum(value > allowed[token] for value in allowed.values())
            ranks[rank] += 1
            assert rank <= (1 if number in ends else RELAXED_BANNED["mtp_relaxed_topk"])
            below = (max(allowed.values()) - allowed[token]) / (1 - ruled_out)
            assert below <= RELAXED_BANNED["mtp_relaxed_delta"] + 0.01
    length = acceptance_length(result, "relaxed banned")
    report(f"relaxed with a bias: acceptance length {length:.2f}, tokens by rank {dict(ranks)}")
    assert ranks[2] > 0


@pytest.mark.engines("methods_k3")
def test_relaxed_acceptance_accepts_more_drafts_while_thinking(results, report):
    result = results("methods_k3")
    strict, relaxed = (acceptance_length(result, phase) for phase in ("strict", "relaxed"))
    report(f"acceptance length while thinking: strict {strict:.2f}, relaxed {relaxed:.2f}")
    assert relaxed > strict + 0.1


@pytest.mark.engines("methods_k3")
def test_relaxed_acceptance_changes_nothing_outside_the_thinking_phase(results):
    result = results("methods_k3")
    assert tokens(result, "relaxed outside") == tokens(result, "strict outside")
    assert tokens(result, "relaxed") != tokens(result, "strict")


@pytest.mark.engines("relaxed_k3")
def test_output_after_the_thinking_phase_is_that_of_strict_acceptance(results, report):
    result = results("relaxed_k3")
    strict, relaxed = tokens(result, "strict"), tokens(result, "relaxed")
    ended = [output for output in relaxed if NEWLINE in output[:-1]]
    after = [output[output.index(NEWLINE) + 1 :] for output in ended]
    report(f"relaxed: {len(ended)} of {len(relaxed)} outputs leave the thinking phase")
    assert tokens(result, "continued") == after
    assert len(ended) >= 3
    assert sum(map(len, after)) > 30
    changed = [
        output[: output.index(NEWLINE)] != expected[: output.index(NEWLINE)]
        for output, expected in zip(relaxed, strict, strict=True)
        if NEWLINE in output[:-1]
    ]
    assert any(changed)


@pytest.mark.engines("rejection_k1")
def test_rejection_with_one_draft_and_preemptions_finishes(results, report):
    result = results("rejection_k1")
    assert "mtp_plugin on: verification rejection, 1 drafts per step" in result["log"]
    for phase in ("plain", "long"):
        assert all(len(output) == 32 for output in tokens(result, phase))
    preemptions = [result[phase]["counters"]["num_preemptions"] for phase in ("plain", "long")]
    length = acceptance_length(result, "plain")
    report(f"rejection, K = 1: acceptance length {length:.2f}, preemptions {preemptions}")
    assert sum(preemptions) > 0
    assert length > 1.4
    assert len(PLAIN["plain"]) >= 8


@pytest.mark.engines("k0", "top2_k3")
def test_a_method_from_outside_decides_on_the_drafts_of_its_requests(results, report):
    """``top2`` accepts drafts of rank 2 too; the last token of a step is the target's own."""
    result = results("top2_k3")
    assert "mtp_plugin on: verification top2, 3 drafts per step" in result["log"]
    outputs = result["top2"]["outputs"]
    top2, coupled, without_drafts = (outputs[n::3] for n in range(3))
    strict = tokens(results("k0"), "plain")[: 2 * len(top2) : 2]
    assert [output["tokens"] for output in coupled] == strict
    assert [output["tokens"] for output in without_drafts] == strict
    assert [output["tokens"] for output in top2] != strict

    second = 0
    for output in top2:
        ranks = ranks_of(output)
        second += ranks.count(2)
        assert set(ranks) <= {1, 2}
        for end in itertools.accumulate(output["new_tokens"][:-1]):
            assert ranks[end - 1] == 1
    steps = [sum(len(output["new_tokens"]) for output in each) for each in (top2, coupled)]
    report(f"top2: {second} tokens of rank 2; steps {steps[0]}, strict {steps[1]}")
    assert second > 0
    assert steps[0] < steps[1]
