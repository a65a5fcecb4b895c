"""Whole steps and the soak test: numbers are reported only if outputs match."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.bench import cli
from integration.bench.case import BenchmarkError
from integration.bench.e2e.cases import KINDS, E2ECase, E2EOptions, Synthetic, check_kinds
from integration.bench.e2e.reference import Reference, check_synthetic
from integration.bench.e2e.run import E2EBench
from integration.bench.e2e.subject import Subject, load_checkpoint, make_shape
from integration.bench.soak import (
    OutputKey,
    Outputs,
    RequestPlan,
    SoakOptions,
    Third,
    acceptance_check,
    leak_checks,
    random_plan,
)
from mtp_plugin.hosts.embedded import LLM
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools.check import PromptResult

CHECKPOINT = Path(__file__).parents[2] / "integration" / "tiny_model" / "checkpoint"
CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4], [1, 5, 9, 2]]


@pytest.fixture(scope="module")
def toy() -> Subject:
    return make_shape("toy", CPU, "float32", 0, fused=False)


def run(*arguments: str) -> int:
    given = cli.parser().parse_args(arguments)
    return int(given.run(given))


def decoded(prompt: list[int], tokens: list[int]) -> PromptResult:
    return PromptResult(prompt, tokens, "", FinishReason.LENGTH, AcceptanceStats(0))


# --- comparisons ---


@pytest.mark.parametrize("kind", ["greedy", "sampled", "sampled-penalty"])
def test_a_wrong_token_is_found(toy: Subject, kind: str) -> None:
    params = KINDS[kind].params(2, 6, seed=7)
    config = {"model": "toy", "device": "cpu", "max_batch_size": 2, "max_seq_len": 16}
    with LLM(config, model=toy.model) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    results = [
        decoded(prompt, list(output.token_ids))
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    reference = Reference(toy)
    assert reference.compare(results, params).mismatches == []
    tokens = list(results[1].token_ids)
    tokens[3] = (tokens[3] + 1) % 256
    match = reference.compare([results[0], decoded(PROMPTS[1], tokens)], params)
    assert match.mismatches == [
        f"request 2, token 4: {tokens[3]}, expected {results[1].token_ids[3]}"
    ]
    assert (match.num_tokens, match.num_ties) == (12, 0)


def test_a_wrong_logprob_is_found(toy: Subject) -> None:
    params = KINDS["sampled-top5"].params(1, 3)
    config = {"model": "toy", "device": "cpu", "max_batch_size": 1, "max_seq_len": 16}
    with LLM(config, model=toy.model) as llm:
        (output,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    logprobs = [dict(entries) for entries in output.logprobs or ()]
    tokens = list(output.token_ids)
    result = replace(decoded(PROMPTS[0], tokens), logprobs=logprobs)
    reference = Reference(toy)
    assert reference.compare([result], params).mismatches == []
    logprobs[1][tokens[1]] = logprobs[1][tokens[1]]._replace(logprob=-0.5)
    assert reference.compare([result], params).mismatches == [
        f"request 1, token 2: logprob of {tokens[1]}"
    ]


def test_synthetic_acceptance_is_checked() -> None:
    stats = AcceptanceStats(1)
    for count in [2] * 800 + [1] * 200:
        stats.record(count, 1)
    results = [decoded([1], [3, 4])]
    assert check_synthetic(results, 2, 5, (0.8,), stats).mismatches == []
    assert check_synthetic(results, 2, 5, (0.6,), stats).mismatches == [
        "drafts 1..1 were accepted in 0.800 of the steps, expected 0.600"
    ]
    for num_tokens, vocab_size in ((3, 5), (2, 4)):
        assert check_synthetic(results, num_tokens, vocab_size, (0.8,), stats).mismatches


# --- e2e ---


def test_cases_of_a_batch_begin_without_mtp() -> None:
    options = E2EOptions(batches=(1, 4), ks=(1, 3))
    assert [case.label for case in options.cases(num_mtp_layers=1)] == [
        *("off/b1", "eagle-k1/b1", "eagle-k3/b1", "vanilla-k1/b1"),
        *("off/b4", "eagle-k1/b4", "eagle-k3/b4", "vanilla-k1/b4"),
    ]


def test_rates_per_draft() -> None:
    assert Synthetic((0.5,), 0).shares(3) == (0.5, 0.25, 0.125)
    assert Synthetic((0.8, 0.5, 0.1), 0).shares(2) == (0.8, 0.5)
    with pytest.raises(BenchmarkError, match="expected one rate, or 3 of them, got 2"):
        Synthetic((0.8, 0.5), 0).shares(3)


def test_one_sampled_request_among_others() -> None:
    params = KINDS["one-sampled"].params(3, 5, seed=2)
    assert [each.is_greedy for each in params] == [False, True, True]
    kinds = E2EOptions(kinds=("greedy", "sampled", "one-sampled"))
    assert [kind.name for kind in kinds.kinds_of(E2ECase(1, "eagle", 1))] == ["greedy", "sampled"]
    assert [kind.name for kind in kinds.kinds_of(E2ECase(4))] == ["greedy"]


def test_kinds_are_checked() -> None:
    check_kinds(("sampled", "rejection-t1.0"))
    for kind in ("other", "rejection-t1.0", "one-sampled"):
        with pytest.raises(BenchmarkError, match=f"--ask: .* got \\['{kind}'\\]"):
            check_kinds((kind,), only_with_output=True)


def test_random_weights(tmp_path: Path) -> None:
    file = tmp_path / "e2e.json"
    sizes = ("--batch", "2", "--k", "2", "--worker", "eagle", "--isl", "8", "--osl", "24")
    where = ("--shape", "toy", "--device", "cpu", "--dtype", "float32")
    ask = ("--ask", "greedy,sampled-logprob")
    assert run("e2e", *where, *sizes, *ask, "--output", str(file)) == 0
    document = json.loads(file.read_text())
    off, on = document["cases"]
    assert document["acceptance"] == "synthetic"
    assert document["matched"] is document["complete"] is True
    assert on["synthetic_acceptance"]["expected_per_position"] == pytest.approx([0.8, 0.64])
    assert off["acceptance_length"] == 1 < on["acceptance_length"] <= 3
    assert on["step_ms"]["p20"] <= on["step_ms"]["median"] <= on["step_ms"]["p80"]
    assert on["speed_up"]["steady"] == pytest.approx(
        on["steady_tokens_per_second"] / off["steady_tokens_per_second"]
    )
    assert [each["ask"] for each in on["asks"]] == ["sampled-logprob"]


def test_no_numbers_without_a_match(toy: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    options = E2EOptions(batches=(1,), isl=4, osl=8)
    compare = Reference.compare

    def with_an_error(self: Reference, *arguments: Any) -> Any:
        return replace(compare(self, *arguments), mismatches=["request 1"])

    monkeypatch.setattr(Reference, "compare", with_an_error)
    found = E2EBench(toy, options).measure(E2ECase(1))
    assert found["matched"] is False
    assert found["match"]["mismatches"] == ["request 1"]
    assert "step_ms" not in found


def test_a_failed_case_is_a_result(toy: Subject) -> None:
    found = E2EBench(toy, E2EOptions(isl=4, osl=2)).measure(E2ECase(1))
    assert found["matched"] is False
    assert found["error"].startswith("BenchmarkError: expected at least 3 steps")


# --- soak ---


def test_a_soak_with_all_it_checks(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    what = ("--model", str(CHECKPOINT), "--device", "cpu", "--ask", "greedy,sampled")
    assert run("soak", *what, "--steps", "60", "--batch-size", "4", "--output", str(file)) == 0
    document = json.loads(file.read_text())
    assert (document["kind"], document["identical"]) == ("soak", True)
    assert all(check["holds"] for check in document["results"])
    counts = document["counts"]
    assert counts["requests"] == counts["finished"] + counts["aborted"] > 0
    assert document["options"]["steps"] == counts["steps"] == 60


def test_traffic_is_determined_by_its_seed() -> None:
    options = SoakOptions(kinds=("greedy", "sampled"))

    def plans(seed: int) -> list[RequestPlan]:
        rng = random.Random(seed)
        return [random_plan(rng, options) for _ in range(50)]

    assert plans(1) == plans(1) != plans(2)
    assert any(plan.patience is not None for plan in plans(1))
    assert {plan.key.kind for plan in plans(1)} == {"greedy", "sampled"}


def test_outputs_are_kept_once_and_wrong_ones_found(toy: Subject) -> None:
    outputs, key = Outputs(end_ids=(9,)), OutputKey(0)
    expected = Reference(toy)
    config = {"model": "toy", "device": "cpu", "max_batch_size": 1, "max_seq_len": 16}
    with LLM(config, model=toy.model) as llm:
        (output,) = llm.generate(PROMPTS[:1], [key.params(6)], use_tqdm=False)
    tokens = list(output.token_ids)
    plan = RequestPlan(key, key.params(6), None)
    outputs.add(RequestPlan(key, key.params(2), None), tokens[:2], FinishReason.LENGTH)
    outputs.add(plan, tokens, FinishReason.LENGTH)
    assert (outputs.longest, outputs.odd, outputs.num_tokens) == ({key: tokens}, [], 8)
    assert outputs.check(expected, PROMPTS)[0].holds
    odd = [*tokens[:2], (tokens[2] + 1) % 256]
    outputs.add(plan, odd, FinishReason.CANCELLED)
    assert outputs.odd == [(key, odd)]
    assert not outputs.check(expected, PROMPTS)[0].holds


@pytest.mark.parametrize(
    ("tokens", "reason", "is_right"),
    [
        ([1, 2, 3], FinishReason.LENGTH, True),
        ([1, 2], FinishReason.LENGTH, False),
        ([1, 2], FinishReason.CANCELLED, True),
        ([1, 9], FinishReason.END_ID, True),
        ([1, 2], FinishReason.END_ID, False),
        ([9, 2, 3], FinishReason.LENGTH, False),
        ([1], None, False),
    ],
)
def test_ends(tokens: list[int], reason: FinishReason | None, is_right: bool) -> None:
    outputs, key = Outputs(end_ids=(9,)), OutputKey(0)
    params = replace(key.params(3), ignore_eos=False)
    outputs.add(RequestPlan(key, params, None), tokens, reason)
    assert (outputs.wrong_ends == []) is is_right


def test_leaks_are_found() -> None:
    subject = load_checkpoint(CHECKPOINT, CPU, None, fused=False)
    with LLM({"model": str(CHECKPOINT), "device": "cpu"}, model=subject.model) as llm:
        assert all(check.holds for check in leak_checks(llm))
        llm.executor.enqueue(llm.make_request(PROMPTS[0], KINDS["greedy"].params(1, 8)[0]))
        llm.executor.step()
        found = {check.name for check in leak_checks(llm) if not check.holds}
    assert found >= {"KV blocks", "requests", "sequence slots"}


def test_drift_is_found() -> None:
    def third(length: int) -> Third:
        found = Third(AcceptanceStats(3))
        for _ in range(20):
            stats = AcceptanceStats(3)
            stats.record(length, 3)
            found.add(stats)
        return found

    assert acceptance_check([third(2)] * 3, 2.0).holds
    assert not acceptance_check([third(2), third(2), third(3)], 7 / 3).holds
