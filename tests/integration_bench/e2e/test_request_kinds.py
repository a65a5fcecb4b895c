"""Kinds of requests in one executor: their options, comparison and report."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import triton  # noqa: F401 - imported first, so that the commands leave the environment alone
from typer.testing import CliRunner

from integration.bench.case import BenchmarkError
from integration.bench.cli import app
from integration.bench.e2e import measure
from integration.bench.e2e.batch import Run
from integration.bench.e2e.cases import E2ECase, E2EOptions
from integration.bench.e2e.gate import Gate, Match
from integration.bench.e2e.measure import E2EBench
from integration.bench.e2e.outcome import E2EOutcome, KindOutcome, StepFigures
from integration.bench.e2e.report import kinds_table
from integration.bench.e2e.request_kinds import (
    REQUEST_KINDS,
    RequestKind,
    check_kinds,
    kinds_of,
    verifications_of,
)
from integration.bench.e2e.sampled_gate import SampledGate
from integration.bench.e2e.subject import Subject, make_shape
from integration.bench.timing import Times
from mtp_plugin.infer import decode
from mtp_plugin.requests.logprobs import Logprob
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools.parity import TIE_ULPS

CPU = torch.device("cpu")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
NUM_TOKENS = 12
SAMPLED_OPTIONS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def kinds_in(document: dict[str, Any]) -> list[Any]:
    return document["asks"]


# --- options ---


def test_every_request_draws_by_a_seed_of_its_own() -> None:
    params = REQUEST_KINDS["sampled-top5"].params(3, 7, seed=40)
    assert [each.seed for each in params] == [40, 41, 42]
    for each in params:
        assert (each.max_new_tokens, each.ignore_eos, each.logprobs) == (7, True, 5)
        assert (each.temperature, each.top_p, each.top_k) == (0.6, 0.95, 20)
    assert all(each.is_greedy for each in REQUEST_KINDS["greedy"].params(3, 7, seed=40))


def test_one_request_draws_among_greedy_ones() -> None:
    one = REQUEST_KINDS["one-sampled"]
    assert [each.is_greedy for each in one.params(3, 7, seed=0)] == [False, True, True]
    assert one.params(3, 7, seed=0)[0] == REQUEST_KINDS["sampled"].params(3, 7, seed=0)[0]
    # alone it is nothing new
    assert [
        request_kind.name for request_kind in kinds_of(("greedy", "sampled", "one-sampled"), 1)
    ] == ["sampled"]
    assert [request_kind.name for request_kind in kinds_of(("greedy", "one-sampled"), 2)] == [
        "one-sampled"
    ]


@pytest.mark.parametrize("name", ["sampled", "one-sampled", "rejection-t1.0"])
def test_the_texts_to_compare_with_are_made_without_drafts(name: str) -> None:
    request_kind = REQUEST_KINDS[name]
    assert [each.speculate for each in request_kind.without_drafts.params(3, 7, 0)] == [False] * 3
    plain = request_kind.without_drafting.params(3, 7, 0)
    assert all(each.verification is each.draft_sampling is None for each in plain)
    assert plain[0].temperature == request_kind.options["temperature"]


def test_what_the_config_has_to_list() -> None:
    assert verifications_of(("greedy", "sampled", "greedy-drafts-t0.6")) == ["coupled"]
    kind_outcomes = ("greedy", "block-t0.6", "coupled-t1.0", "block-t1.0", "rejection-t0.6")
    assert verifications_of(kind_outcomes) == ["coupled", "block", "rejection"]


@pytest.mark.parametrize(
    ("names", "is_synthetic", "message"),
    [
        (("greedy", "beams"), False, r"--ask: expected some of greedy, sampled, .*got \['beams'\]"),
        (("sampled",), False, "--ask: expected greedy among them.*got sampled"),
        (("greedy", "greedy"), False, "--ask: expected every name once"),
        (("greedy", "block-t1.0"), True, r"--ask: \['block-t1.0'\] need real acceptance"),
    ],
)
def test_names_that_cannot_be_measured_are_refused(names, is_synthetic, message) -> None:
    with pytest.raises(BenchmarkError, match=message):
        check_kinds(names, is_synthetic=is_synthetic)


# --- what is compared ---


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return make_shape("toy", CPU, request.param, 0, fused=False)


@pytest.fixture
def gate(subject: Subject) -> SampledGate:
    return SampledGate(subject, Gate(subject, 2, TIE_ULPS), 2)


def run_of(texts: list[list[int]], logprobs: list | None = None) -> Run:
    return Run(texts, [], 1.0, 0.1, logprobs or [None] * len(texts))


def entries(results) -> list[dict[int, Logprob]]:
    """As the executor reports them."""
    return [
        {token: Logprob(one.logprob, 1 + [*one.top].index(token) if token in one.top else 99)}
        | {each: Logprob(value, rank) for rank, (each, value) in enumerate(one.top.items(), 1)}
        for token, one in results
    ]


def truth(subject: Subject, request_kind: RequestKind) -> tuple[list, Run]:
    params = request_kind.params(len(PROMPTS), NUM_TOKENS, seed=5)
    found = [
        decode(subject.model.target, prompt, kind_outcomes)
        for prompt, kind_outcomes in zip(PROMPTS, params, strict=True)
    ]
    results = [
        None if each.logprobs is None else entries(zip(each.token_ids, each.logprobs, strict=True))
        for each in found
    ]
    return params, run_of([each.token_ids for each in found], results)


def with_worst(subject: Subject, run: Run, request: int, position: int) -> Run:
    """One token replaced by the worst one, so that no rounding explains it."""
    texts = [list(tokens) for tokens in run.token_ids]
    ids = torch.tensor([PROMPTS[request] + texts[request][:position]])
    texts[request][position] = int(subject.model.target(input_ids=ids).logits[0, -1].argmin())
    return dataclasses.replace(run, token_ids=texts)


ORDINARY = ["sampled", "sampled-logprob", "sampled-top5", "sampled-penalty", "one-sampled"]


@pytest.mark.parametrize("name", ORDINARY)
def test_what_target_only_decoding_draws_matches(gate: SampledGate, subject, name: str) -> None:
    params, run = truth(subject, REQUEST_KINDS[name])
    match = gate.match_oracle(PROMPTS, params, run)
    assert match.holds, match.mismatches
    assert match.num_tokens == 2 * NUM_TOKENS
    texts = gate.match_texts(PROMPTS, params, [run, run], run)
    assert texts.holds
    assert texts.num_tokens == 2 * NUM_TOKENS  # equal runs are compared once


@pytest.mark.parametrize("name", ["sampled", "sampled-penalty", "one-sampled"])
def test_a_wrong_token_is_found(gate: SampledGate, subject, name: str) -> None:
    params, run = truth(subject, REQUEST_KINDS[name])
    for request in (0, 1):
        wrong = with_worst(subject, run, request, 7)
        for match in (
            gate.match_oracle(PROMPTS, params, wrong),
            gate.match_texts(PROMPTS, params, [run, wrong], run),
        ):
            (line,) = match.mismatches
            assert line.startswith(f"request {request}, token 8: ")


def test_another_seed_is_found(gate: SampledGate, subject) -> None:
    params, _ = truth(subject, REQUEST_KINDS["sampled"])
    seeded = [dataclasses.replace(each, seed=each.seed + 77) for each in params]
    texts = [
        decode(subject.model.target, prompt, kind_outcomes).token_ids
        for prompt, kind_outcomes in zip(PROMPTS, seeded, strict=True)
    ]
    assert not gate.match_oracle(PROMPTS, params, run_of(texts)).holds


def test_a_shorter_text_is_found(gate: SampledGate, subject) -> None:
    params, run = truth(subject, REQUEST_KINDS["sampled"])
    short = run_of([run.token_ids[0][:-1], run.token_ids[1]])
    (line,) = gate.match_texts(PROMPTS, params, [short], run).mismatches
    assert line.startswith("request 0, token 12: ")


def test_a_text_may_be_the_beginning_of_the_expected_one(gate: SampledGate, subject) -> None:
    _, run = truth(subject, REQUEST_KINDS["sampled"])
    few = REQUEST_KINDS["sampled"].without_drafts.params(2, 5, seed=5)
    begun = run_of([tokens[:5] for tokens in run.token_ids])
    assert gate.match_texts(PROMPTS, few, [begun], run).holds


@pytest.mark.parametrize("name", ["sampled-logprob", "sampled-top5"])
def test_wrong_log_probabilities_are_found(gate: SampledGate, subject, name: str) -> None:
    params, run = truth(subject, REQUEST_KINDS[name])
    token = run.token_ids[1][3]
    results = [list(each) for each in run.logprobs]
    results[1][3] = {**results[1][3], token: Logprob(results[1][3][token].logprob - 0.9, 99)}
    (line,) = gate.match_oracle(
        PROMPTS, params, dataclasses.replace(run, logprobs=results)
    ).mismatches
    assert line.startswith("request 1, token 4: ")
    results[1] = results[1][:-1]
    missing = gate.missing_logprobs(params, [dataclasses.replace(run, logprobs=results)])
    assert missing == ["request 1: 11 log-probabilities of 12 tokens"]
    assert gate.missing_logprobs(params, [dataclasses.replace(run, logprobs=[None, None])])


def sample_run(subject: Subject, count: int, **options) -> tuple[list[list[int]], list, Run]:
    prompts = [[number, 7, 3] for number in range(count)]
    params = RequestKind("any", options).params(count, 20, seed=3)
    texts = [
        decode(subject.model.target, prompt, kind_outcomes).token_ids
        for prompt, kind_outcomes in zip(prompts, params, strict=True)
    ]
    return prompts, params, run_of(texts)


def test_mean_negative_log_likelihood_is_the_entropy() -> None:
    """And that of draws of another distribution is not."""
    toy = make_shape("toy", CPU, "float32", 0, fused=False)
    gate = SampledGate(toy, Gate(toy, 2, TIE_ULPS), 2)
    prompts, params, run = sample_run(toy, 6, temperature=0.3)
    match = gate.match_law(prompts, params, [run, run])
    assert match.num_tokens == run.num_tokens  # one that was run twice is one draw
    assert match.holds, match.mismatches
    assert match.num_tokens == 6 * 20
    for options in ({"temperature": 0.15}, {"temperature": 0.8}, {"top_k": 1}):
        other = gate.match_law(prompts, params, [run, sample_run(toy, 6, **options)[2]])
        assert [line.split(":")[0] for line in other.mismatches] == [
            "negative log-likelihood of all tokens"
        ]
    short = dataclasses.replace(run, token_ids=[run.token_ids[0][:-1], *run.token_ids[1:]])
    assert gate.match_law(prompts, params, [short]).mismatches == ["request 0: 19 tokens, not 20"]


# --- report ---


def figures_of(median: float) -> StepFigures:
    times = Times(median, median, median, median, 9)
    return StepFigures(1.0, 9, 0.1, times, 9.0, AcceptanceStats(3), 0.0, None, False)


GOOD = Match("something", 9)


def outcome_of(batch: int, *, has_targets: bool = True, **medians: float) -> E2EOutcome:
    kind_outcomes = [
        KindOutcome(name.replace("_", "-"), GOOD, figures_of(median))
        for name, median in medians.items()
    ]
    return E2EOutcome(
        E2ECase(batch, "eagle", 3),
        figures=figures_of(2.0),
        match=GOOD,
        kind_outcomes=tuple(kind_outcomes),
        has_targets=has_targets,
    )


def test_steps_are_compared_with_greedy_and_sampled_ones() -> None:
    outcome = outcome_of(8, sampled=2.02, sampled_logprob=2.05)
    first, second = kinds_in(outcome.as_dict())
    assert first["median_step_over"] == {"greedy": 1.01}
    assert first["target"] == {"over": "greedy", "at_most": 1.015, "met": True}
    assert second["median_step_over"] == pytest.approx({"greedy": 1.025, "sampled": 2.05 / 2.02})
    assert second["target"] == {"over": "sampled", "at_most": 1.01, "met": False}
    cells = {column.header: list(column.cells) for column in kinds_table([outcome]).columns}
    assert cells["requests"] == ["greedy", "sampled", "sampled-logprob"]
    assert cells["over greedy"] == ["", "1.010", "1.025"]
    assert cells["over sampled"] == ["", "", "1.015"]
    assert cells["target"] == ["", "<= 1.015", "<= 1.01 sampled"]
    assert cells["met"] == ["", "yes", "NO"]


def test_targets_apply_to_their_sizes() -> None:
    for outcome in (outcome_of(8, has_targets=False, sampled=2.2), outcome_of(32, sampled=2.2)):
        assert "target" not in kinds_in(outcome.as_dict())[0]
    alone = kinds_in(outcome_of(64, sampled_logprob=2.2).as_dict())[0]
    assert alone["target"] == {"over": "sampled", "at_most": 1.01, "met": None}


def test_no_figure_of_a_kind_without_its_match() -> None:
    wrong = KindOutcome("sampled", Match("something", 9, 0, ["request 0: odd"]))
    outcome = dataclasses.replace(outcome_of(8), kind_outcomes=(wrong,))
    assert outcome.matched
    assert not outcome.all_matched
    assert outcome.problems == ["eagle-k3/b8 sampled: no match: request 0: odd"]
    (results,) = kinds_in(outcome.as_dict())
    assert "step_ms" not in results
    assert list(kinds_table([outcome]).columns[2].cells)[1] == "no match"


# --- the command ---


def test_every_round_is_begun_by_the_next_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one kind would always run after the same other one, on a warmer device."""
    monkeypatch.setattr(measure, "LEAST_SECONDS", {"cpu": 1e9})
    monkeypatch.setattr(measure, "MOST_RUNS", 2)
    turns: list[str] = []
    honest = E2EBench._decode

    def decode(self, llm, case, request_kind, **calls):
        turns.append(request_kind.name)
        return honest(self, llm, case, request_kind, **calls)

    monkeypatch.setattr(E2EBench, "_decode", decode)
    toy = make_shape("toy", CPU, "float32", 0, fused=False)
    kinds = ("greedy", "sampled", "one-sampled")
    options = E2EOptions(isl=4, osl=12, quick=True, phases=False, kinds=kinds)
    bench = E2EBench(toy, options, tie_ulps=TIE_ULPS)
    assert bench.measure(E2ECase(2)).matched
    turns.clear()
    outcome = bench.measure(E2ECase(2, "eagle", 1))
    assert [each.matched for each in outcome.kind_outcomes] == [True, True]
    g, s, o = kinds
    # the first round warms up, and in the last each runs for the gaps
    assert turns == [g, s, o, *(g, s, o), *(s, o, g), g, s, o]


@pytest.fixture
def bench(tmp_path):
    """Run the command on a toy; its result, and the document that it left."""

    def invoke(*arguments: str):
        path = tmp_path / "e2e.json"
        fixed = ["--shape", "toy", "--dtype", "float32", "--k", "1", "--worker", "eagle"]
        fixed += ["--device", "cpu", "--no-phases", "--isl", "6", "--osl", "14"]
        result = CliRunner().invoke(app, ["e2e", *fixed, *arguments, "--output", str(path)])
        return result, json.loads(path.read_text()) if path.exists() else None

    return invoke


def test_kinds_of_requests_take_turns_in_one_executor(bench) -> None:
    kinds = "greedy,sampled-top5,one-sampled"
    result, results = bench("--batch", "2", "--ask", kinds)
    assert result.exit_code == 0, result.output
    assert kinds_in(results) == kinds.split(",")
    off, eagle = results["cases"]
    for each in kinds_in(off):
        assert each["matched"]
        assert "step_ms" not in each
        assert each["match"]["compared_with"].startswith("target-only decoding of 2 requests")
    for each in kinds_in(eagle):
        assert each["matched"]
        assert each["step_ms"]["samples"] > 2
        assert each["tokens"] == 28
        assert each["median_step_over"]["greedy"] == pytest.approx(
            each["step_ms"]["median"] / eagle["step_ms"]["median"]
        )
        describe_differences = each["match"]["compared_with"]
        assert "with drafts absent, the run without MTP of the same seeds" in describe_differences
        assert "target" not in each
    assert [each["ask"] for each in kinds_in(eagle)] == kinds.split(",")[1:]
    assert "over greedy" in result.stdout


@pytest.mark.parametrize("acceptance", ["1.0", None])
def test_a_wrong_sampled_output_yields_no_result(bench, monkeypatch, acceptance) -> None:
    """Of the executor with drafts, whether draws accept or the target does."""
    honest = measure.run_batch

    def run(llm, prompts, num_tokens, *, params=None, **options):
        ran = honest(llm, prompts, num_tokens, params=params, **options)
        drafts = llm.pieces.plan.max_draft_len > 0
        undrafted = params[0].speculate is False or acceptance is None
        if drafts and undrafted and not params[0].is_greedy:
            ran.token_ids[0][3] = (ran.token_ids[0][3] + 1) % 256
        return ran

    monkeypatch.setattr(measure, "run_batch", run)
    if acceptance is None:
        monkeypatch.setattr(E2EOptions, "synthetic", lambda *_, **__: None)
    given = () if acceptance is None else ("--acceptance", acceptance)
    result, results = bench("--batch", "1", "--ask", "greedy,sampled", *given)
    assert result.exit_code == 1
    assert results["matched"] is False
    eagle = results["cases"][1]
    assert eagle["matched"] is True
    assert [each["matched"] for each in kinds_in(eagle)] == [False]
    assert "step_ms" not in kinds_in(eagle)[0]
    assert "no figure: eagle-k1/b1 sampled: no match: request 0, token 4" in result.output


def test_without_a_match_without_mtp_there_is_none_with_it(bench, monkeypatch) -> None:
    honest = measure.run_batch

    def run(llm, prompts, num_tokens, *, params=None, **options):
        ran = honest(llm, prompts, num_tokens, params=params, **options)
        if llm.pieces.plan.max_draft_len == 0 and not params[0].is_greedy:
            ran.token_ids[0][3] = (ran.token_ids[0][3] + 1) % 256
        return ran

    monkeypatch.setattr(measure, "run_batch", run)
    result, results = bench("--batch", "1", "--ask", "greedy,sampled")
    assert result.exit_code == 1
    assert [kinds_in(each)[0]["matched"] for each in results["cases"]] == [False, False]
    assert "no match to compare with" in kinds_in(results["cases"][1])[0]["error"]
