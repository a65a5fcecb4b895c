"""``python -m integration.bench e2e`` on a CPU: figures that matched, and none that did not."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton  # noqa: F401 - imported first, so that the commands leave the environment alone
from typer.testing import CliRunner

from integration.bench.case import BenchmarkError
from integration.bench.cli import app
from integration.bench.e2e import measure, transformers_side
from integration.bench.e2e import run as command
from integration.bench.e2e.batch import Batch, Call, Run, run_batch, timed_steps
from integration.bench.e2e.case_config import executor_config
from integration.bench.e2e.cases import E2ECase, E2EOptions
from integration.bench.e2e.gate import RANDOM_WEIGHTS_ULPS
from integration.bench.e2e.measure import E2EBench, is_host_bound
from integration.bench.e2e.outcome import E2EOutcome
from integration.bench.e2e.report import document, heading, plot, results_table
from integration.bench.e2e.subject import Subject, load_checkpoint, make_shape
from mtp_plugin.hosts.embedded import LLM
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.tools.parity import TIE_ULPS
from tests.checkpoints import write_echo_checkpoint

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[3] / "integration" / "results"
TINY = Path(__file__).parents[3] / "integration" / "tiny_model" / "checkpoint"
FIGURES = ("tokens_per_second", "step_ms", "steady_tokens_per_second", "phases_ms", "speed_up")


@pytest.fixture
def bench(tmp_path):
    """Run the command; its result, and the document that it left."""

    def invoke(*arguments: str):
        path = tmp_path / "results" / "e2e.json"
        result = CliRunner().invoke(
            app, ["e2e", "--quick", "--device", "cpu", *arguments, "--output", str(path)]
        )
        return result, json.loads(path.read_text()) if path.exists() else None

    return invoke


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three MTP layers whose drafts are often right."""
    path = tmp_path_factory.mktemp("echo") / "checkpoint"
    write_echo_checkpoint(path, vocab_size=96)
    return str(path)


def test_a_checkpoint_with_real_acceptance(bench, checkpoint: str) -> None:
    result, results = bench("--model", checkpoint, "--osl", "40", "--k", "2", "--batch", "2")
    assert result.exit_code == 0, result.output
    assert (results["kind"], results["benchmark"], results["complete"]) == ("e2e", False, True)
    assert "not a benchmark" in results["note"]
    assert results["matched"] is True
    assert results["acceptance"] == "real"
    assert results["model"]["weights"] == "checkpoint"
    assert results["tie_tolerance_ulps"] == TIE_ULPS
    assert {"torch", "triton", "python", "commit"} <= results["machine"].keys()
    names = [case["case"] for case in results["cases"]]
    assert names == ["off/b2", "eagle-k2/b2", "vanilla-k2/b2"]
    for case in results["cases"]:
        assert case["matched"] is True
        assert case["tokens"] == 40 * case["batch"]
        assert 0 < case["step_ms"]["p20"] <= case["step_ms"]["median"] <= case["step_ms"]["p80"]
        per_step = case["batch"] * case["acceptance_length"]
        rate = per_step / case["step_ms"]["mean"] * 1000
        assert case["steady_tokens_per_second"] == pytest.approx(rate)
        assert case["tokens_per_second_per_request"] * case["batch"] == pytest.approx(
            case["tokens_per_second"]
        )
        assert 0 < case["first_tokens_seconds"] < case["seconds"]
        assert case["ran"]["attention"]
        assert case["ran"]["steps"] > case["ran"]["graph_replays"] == 0
        phases = case["phases_ms"]
        assert phases["target"] > 0
        assert phases["acceptance"] > 0
        assert phases["samples"] == case["step_ms"]["samples"]
    off, eagle = results["cases"][:2]
    assert off["acceptance"] is None
    assert off["acceptance_length"] == 1.0
    assert off["phases_ms"]["draft_layers"] == off["phases_ms"]["draft_head"] == 0
    assert "speed_up" not in off
    assert off["match"]["compared_with"] == "target-only decoding of 2 requests"
    assert eagle["acceptance"] == "real"
    assert 1.2 < eagle["acceptance_length"] <= 3
    assert eagle["phases_ms"]["draft_layers"] > 0 < eagle["phases_ms"]["draft_head"]
    assert eagle["match"] == {
        "compared_with": "the run without MTP",
        "tokens": 80,  # the timed run and the one with phases are equal
        "ties": 0,
        "mismatches": [],
    }
    ratio = eagle["steady_tokens_per_second"] / off["steady_tokens_per_second"]
    assert eagle["speed_up"]["steady"] == pytest.approx(ratio)
    assert "as_asked" not in eagle["speed_up"]
    assert "speed-ups follow from the mean" in results["step_ms"]
    assert all(case["host_bound"] is True for case in results["cases"])  # eager
    assert results["transformers"]["host_bound"] is True
    assert "or the device idles for more than 3% of one" in results["host_bound_if"]
    assert "* host-bound: steps run eagerly, or" in result.stdout
    assert results["transformers"]["generate"]["tokens_per_second"] > 0


def test_a_shape_with_synthetic_acceptance_says_so_everywhere(bench) -> None:
    result, results = bench(
        *("--shape", "toy", "--acceptance", "0.9,0.5", "--k", "2", "--osl", "64"),
        *("--batch", "1", "--seed", "5"),
    )
    assert result.exit_code == 0, result.output
    assert "synthetic acceptance: drafts are accepted at random" in result.stdout
    assert " synth." in result.stdout
    assert "as configured: with the configured tokens per step" in result.stdout
    assert results["acceptance"] == "synthetic"
    assert results["synthetic_acceptance"] == {"rates": [0.9, 0.5], "seed": 5}
    assert results["skipped"] == ["vanilla-k2/b1"]
    assert results["tie_tolerance_ulps"] == RANDOM_WEIGHTS_ULPS
    assert results["transformers"] is None
    off, eagle = results["cases"]
    assert eagle["acceptance"] == "synthetic"
    assert eagle["synthetic_acceptance"]["expected_per_position"] == [0.9, 0.5]
    assert eagle["match"]["compared_with"] == "valid ids and the configured acceptance"
    assert 1.8 < eagle["acceptance_length"] < 2.9
    # the configured tokens per step, not the measured ones
    means = [case["step_ms"]["mean"] for case in (off, eagle)]
    assert eagle["speed_up"]["as_asked"] == pytest.approx((1 + 0.9 + 0.5) * means[0] / means[1])
    assert off["match"]["compared_with"] == "target-only decoding of 1 requests"


def tamper(monkeypatch: pytest.MonkeyPatch, is_wrong) -> None:
    """Executors whose first request emits another first token where ``is_wrong`` says so."""
    honest = measure.run_batch

    def run(llm: LLM, prompts, num_tokens, **options):
        ran = honest(llm, prompts, num_tokens, **options)
        if is_wrong(llm):
            ran.token_ids[0][0] = (ran.token_ids[0][0] + 1) % 96
        return ran

    monkeypatch.setattr(measure, "run_batch", run)


def no_figure_in(case: dict) -> bool:
    return case["matched"] is False and not any(name in case for name in FIGURES)


def test_a_wrong_token_with_mtp_yields_no_figure(bench, checkpoint, monkeypatch) -> None:
    tamper(monkeypatch, lambda llm: llm.pieces.plan.max_draft_len == 2)
    result, results = bench(
        *("--model", checkpoint, "--batch", "1", "--k", "1,2", "--worker", "eagle"),
        *("--osl", "40", "--no-transformers"),
    )
    assert result.exit_code == 1
    assert results["matched"] is False
    off, right, wrong = results["cases"]
    assert no_figure_in(wrong)
    assert wrong["match"]["mismatches"][0].startswith("request 0, token 1: ")
    assert "no figure: eagle-k2/b1: no match: request 0, token 1: " in result.stderr
    row = next(line for line in result.stdout.splitlines() if "eagle-k2/b1" in line)
    assert row.split()[1:] == ["no", "match"]
    # the others keep theirs
    assert all(case["step_ms"]["median"] > 0 for case in (off, right))


def test_a_wrong_token_without_mtp_yields_no_figure_at_all(bench, checkpoint, monkeypatch) -> None:
    tamper(monkeypatch, lambda llm: llm.pieces.plan.max_draft_len == 0)
    result, results = bench(
        *("--model", checkpoint, "--batch", "1", "--k", "1", "--worker", "eagle", "--osl", "40")
    )
    assert result.exit_code == 1
    off, eagle = results["cases"]
    assert no_figure_in(off)
    assert no_figure_in(eagle)
    assert "has no match to compare with" in eagle["error"]
    assert "has a match to compare with" in results["transformers"]["error"]
    assert "generate" not in results["transformers"]


def test_without_an_output_nothing_is_written(checkpoint, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["e2e", "--quick", "--device", "cpu", "--model", checkpoint, "--batch", "1"]
    few = ["--k", "1", "--worker", "eagle", "--no-phases", "--no-transformers"]
    result = CliRunner().invoke(app, [*arguments, *few])
    assert result.exit_code == 0, result.output
    assert "results are not written: without a GPU" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_too_few_tokens_for_a_steady_state_are_named(
    toy: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = E2EOptions(isl=4, osl=8, phases=False)
    monkeypatch.setattr(measure, "LEAST_STEADY_STEPS", 99)
    outcome = E2EBench(toy, options, tie_ulps=TIE_ULPS).measure(E2ECase(1))
    assert outcome.problem.endswith("more output tokens are needed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--k", "1,99"), "--k: expected at most 16, got [99]"),
        (("--k", "1,3", "--acceptance", "0.9,0.5"), "eagle-k3/b1: --acceptance: expected one rate"),
        (("--isl", "1000"), "off/b1: max_seq_len: 1024 is above the model's 512 positions"),
        (("--draft-vocab", "97"), "mtp.draft_vocab: expected at most the vocabulary of 96, got 97"),
        (("--osl", "4"), "off/b1: --osl: expected at least 5 tokens"),
        (("--k", "1,8", "--osl", "20"), "eagle-k8/b1: --osl: expected at least 21 tokens"),
    ],
)
def test_a_case_that_cannot_run_is_named_before_any_has(
    bench, checkpoint, monkeypatch: pytest.MonkeyPatch, arguments, message: str
) -> None:
    monkeypatch.setattr(measure, "LLM", None)  # nothing may run
    result, results = bench("--model", checkpoint, "--batch", "1", *arguments)
    assert isinstance(result.exception, BenchmarkError)
    assert message in str(result.exception)
    assert results is None


def test_the_fewest_tokens_that_are_let_through_can_be_timed(toy: Subject) -> None:
    bench = E2EBench(toy, E2EOptions(isl=4, osl=5, phases=False), tie_ulps=TIE_ULPS)
    bench.check([E2ECase(1)])
    assert bench.measure(E2ECase(1)).problem is None


def test_traces_are_written_per_case(bench, checkpoint, tmp_path) -> None:
    result, results = bench(
        *("--model", checkpoint, "--batch", "1", "--k", "1", "--worker", "eagle"),
        *("--no-transformers", "--no-phases"),
        *("--osl", "30", "--trace", str(tmp_path / "deep" / "trace.json")),
    )
    assert result.exit_code == 0
    assert [case["phases_ms"] for case in results["cases"]] == [None, None]
    (path,) = results["traces"]
    assert path == str(tmp_path / "deep" / "trace-eagle-k1-b1.json")
    events = json.loads(Path(path).read_text())["traceEvents"]
    assert sum(event.get("name") == "step" for event in events) >= measure.TRACED_STEPS


def test_transformers_runs_the_tiny_model(bench) -> None:
    result, results = bench(
        *("--model", str(TINY), "--batch", "1", "--k", "3", "--worker", "eagle", "--osl", "32"),
        "--no-phases",
    )
    assert result.exit_code == 0, result.output
    found = results["transformers"]
    assert found["error"] is None
    assert found["match"]["mismatches"] == []
    plain, with_mtp = found["generate"], found["generate_use_mtp"]
    assert plain["tokens"] == with_mtp["tokens"] == 32
    rates = [each["decode_tokens_per_second"] for each in (plain, with_mtp)]
    assert found["speed_up"] == pytest.approx(rates[1] / rates[0])
    assert "transformers generate, use_mtp, batch 1: " in result.stdout
    assert results["name"] == "tiny_model"


def test_another_text_of_transformers_yields_no_figure(bench, checkpoint, monkeypatch) -> None:
    honest = transformers_side._generate

    def generate(*arguments, **options):
        seconds, ids = honest(*arguments, **options)
        return seconds, [(ids[0] + 1) % 96, *ids[1:]]

    monkeypatch.setattr(transformers_side, "_generate", generate)
    result, results = bench("--model", checkpoint, "--batch", "1", "--k", "1", "--osl", "30")
    found = results["transformers"]
    assert found["error"].startswith("use_mtp=False: request 0, token 1: ")
    assert "generate" not in found
    assert "no figure: transformers: use_mtp=False" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected either --model or --shape"),
        (("--model", "x", "--shape", "toy"), "expected either --model or --shape"),
        (("--shape", "huge"), "--shape: expected one of 8gb, toy, got 'huge'"),
        (("--shape", "toy", "--seed", f"{2**63}"), "--seed: expected an integer of at most 64"),
        (("--shape", "toy", "--k", "0"), "--k: expected at least 1"),
        (
            ("--shape", "toy", "--trace", "/proc/trace.json"),
            "--trace: /proc/trace.json cannot be written: No such file or directory",
        ),
    ],
)
def test_wrong_options_are_named(bench, arguments, message: str) -> None:
    result, results = bench(*arguments)
    assert result.exit_code == 1
    assert message in str(result.exception)
    assert results is None


def test_an_interrupt_keeps_what_is_measured(bench, checkpoint, monkeypatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(E2EBench, "_measure_on", stop)
    result, results = bench("--model", checkpoint, "--batch", "1", "--k", "1", "--osl", "30")
    assert result.exit_code == 130
    assert "interrupted: 1 of " in result.stderr
    assert results["complete"] is False
    assert len(results["cases"]) == 1


def test_a_full_disk_loses_no_report(bench, checkpoint, monkeypatch) -> None:
    def fill(*_: object) -> None:
        raise BenchmarkError("--output: cannot be written: No space left on device")

    monkeypatch.setattr(command, "store", fill)
    result, results = bench("--model", checkpoint, "--batch", "1", "--k", "1", "--osl", "30")
    assert isinstance(result.exception, BenchmarkError)
    assert results is None
    assert "off/b1" in " ".join(result.stdout.split())
    assert "results: " not in result.stdout


@pytest.mark.parametrize("option", ["--k", "--batch", "--acceptance"])
def test_numbers_that_are_none_are_named(bench, option: str) -> None:
    result, _ = bench("--shape", "toy", option, "1,many")
    assert result.exit_code == 2
    assert "with commas between" in result.stderr


# --- the batch ---


@pytest.fixture(scope="module")
def toy() -> Subject:
    return make_shape("toy", CPU, "float32", 0, fused=False)


@pytest.mark.parametrize(("most", "seconds", "timed"), [(3, 1e9, 3), (3, 1e-9, 1), (3, 0.0, 1)])
def test_a_device_is_timed_long_enough_and_every_run_is_compared(
    toy: Subject, monkeypatch: pytest.MonkeyPatch, most: int, seconds: float, timed: int
) -> None:
    """A run that was too short warms the device up; it is not timed, and compared all the same."""
    monkeypatch.setattr(measure, "LEAST_SECONDS", {"cpu": seconds})
    monkeypatch.setattr(measure, "MOST_RUNS", most)
    pools: list[list[Run]] = []
    honest = measure.pooled
    monkeypatch.setattr(measure, "pooled", lambda runs: pools.append(runs) or honest(runs))
    bench = E2EBench(toy, E2EOptions(isl=4, osl=24, quick=True), tie_ulps=TIE_ULPS)
    compared: list[int] = []
    match_off = bench.gate.match_off
    monkeypatch.setattr(
        bench.gate, "match_off", lambda p, runs: compared.append(len(runs)) or match_off(p, runs)
    )
    outcome = bench.measure(E2ECase(1))
    assert outcome.matched
    assert [len(runs) for runs in pools] == [timed]
    # the short one, and the one of the phases
    assert compared == [timed + (seconds == 1e9) + 1]
    seconds = [step.seconds for run in pools[0] for step in run.steady]
    assert outcome.figures is not None
    assert outcome.figures.step_ms.samples == len(seconds)
    assert outcome.figures.step_ms.mean == pytest.approx(sum(seconds) / len(seconds) * 1000)


@pytest.mark.parametrize("text", [False, True])
def test_text_is_decoded_if_requested(monkeypatch: pytest.MonkeyPatch, text: bool) -> None:
    subject = load_checkpoint(TINY, CPU, None, fused=False)
    made: list[object] = []
    honest = measure.LLM

    def llm(*arguments, **options) -> LLM:
        made.append(honest(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(measure, "LLM", llm)
    options = E2EOptions(isl=4, osl=16, phases=False, text=text, quick=True)
    assert E2EBench(subject, options, tie_ulps=TIE_ULPS).measure(E2ECase(1)).matched
    assert [each.tokenizer is not None for each in made] == [text]


def executor(toy: Subject, case: E2ECase, options: E2EOptions, **changed) -> LLM:
    config = executor_config(toy, case, options, None) | changed
    return LLM(config, model=toy.model)


def test_steady_steps_have_the_whole_batch_and_nothing_else(toy: Subject) -> None:
    options = E2EOptions(isl=9, osl=30)
    with executor(toy, E2ECase(3, "eagle", 2), options, max_num_tokens=12) as llm:
        prompts = [[i, 2, 3, 4, 5, 6, 7, 8, 9] for i in range(3)]
        run = run_batch(llm, prompts, 30)
        steps_of_one = run_batch(llm, prompts[:1], 30).steps
    # prompts come in chunks, so that the first request is ahead of the last one
    steady = [i for i, step in enumerate(run.steps) if step.is_steady]
    assert steady == list(range(steady[0], steady[-1] + 1))
    assert steady[0] > 2
    assert steady[-1] < len(run.steps) - 2
    assert all(len(run.steps[i].emitted) == 3 for i in steady)
    assert run.num_tokens == 90
    assert 0 < run.first_tokens_seconds < run.seconds
    assert sum(step.is_steady for step in steps_of_one) > len(steady)


def test_probes_are_called_around_steps_that_may_be_steady(toy: Subject) -> None:
    calls: list[str] = []
    with executor(toy, E2ECase(2), E2EOptions(isl=4, osl=12)) as llm:
        run = run_batch(
            llm,
            [[1, 2, 3, 4], [5, 6, 7, 8]],
            12,
            before=lambda: calls.append("before"),
            after=lambda step: calls.append(f"after {step.is_steady}"),
        )
    assert calls == ["before", "after True"] * len(run.steady)


def test_a_step_lasts_until_the_next_one_starts(toy: Subject) -> None:
    calls = [Call(start, 0.5, [1], True) for start in (1.0, 2.0, 4.0)]
    assert [step.seconds for step in timed_steps(calls, 4.5)] == [1.0, 2.0, 0.5]
    spent: list[Call] = []
    with executor(toy, E2ECase(2), E2EOptions(isl=4, osl=12)) as llm:
        run = run_batch(llm, [[1, 2, 3, 4]] * 2, 12, after=lambda c: spent.append(c) or sleep(0.01))
    host = [step.seconds - call.seconds for step, call in zip(run.steady, spent, strict=True)]
    assert min(host) >= 0.01


def test_a_request_that_fails_is_named(toy: Subject) -> None:
    with executor(toy, E2ECase(2), E2EOptions(isl=4, osl=12)) as llm:
        batch = Batch(llm, [[1, 2, 3, 4]] * 2, 12)
        second = batch.requests[1]
        second.fail("broken")
        failed = SimpleNamespace(
            request_id=second.request_id, finish_reason=FinishReason.ERROR, token_ids=[]
        )
        batch._executor = SimpleNamespace(step=lambda: [failed])
        with pytest.raises(BenchmarkError, match=f"request {second.request_id}: broken"):
            batch.step()


def test_a_batch_that_is_cancelled_leaves_nothing(toy: Subject) -> None:
    with executor(toy, E2ECase(2), E2EOptions(isl=4, osl=12)) as llm:
        batch = Batch(llm, [[1, 2, 3, 4], [5, 6, 7, 8]], 12)
        batch.start()
        while not batch.is_steady:
            batch.step()
        batch.cancel()
        assert not batch.is_running
        assert llm.blocks.num_free_blocks == llm.blocks.num_blocks


def test_preempted_batches_are_refused(toy: Subject) -> None:
    cache = {"tokens_per_block": 4, "max_tokens": 60}
    with executor(toy, E2ECase(4), E2EOptions(isl=9, osl=30), kv_cache_config=cache) as llm:
        prompts = [[i, 2, 3, 4, 5, 6, 7, 8, 9] for i in range(4)]
        with pytest.raises(Exception, match="preempted: too few KV blocks"):
            run_batch(llm, prompts, 30)


@pytest.mark.parametrize(("tokens", "share"), [(list(range(16)), 0.0), ([7] * 17, 0.9)])
def test_repeated_8_grams_are_counted(tokens: list[int], share: float) -> None:
    assert Run([tokens], [], 1.0, 0.1).share_of_repeated_8_grams == share


# --- the report ---


def measured(toy: Subject, *cases: E2ECase) -> list[E2EOutcome]:
    options = E2EOptions(isl=6, osl=30, quick=True)
    bench = E2EBench(toy, options, tie_ulps=TIE_ULPS)
    bench.synthetic = None
    return [bench.measure(case) for case in cases]


def test_the_table_has_a_row_per_case(toy: Subject) -> None:
    outcomes = measured(toy, E2ECase(1), E2ECase(1, "eagle", 1), E2ECase(1, "vanilla", 7))
    assert [outcome.matched for outcome in outcomes] == [True, True, False]
    assert "ConfigError: max_draft_len: 7 is more than the checkpoint's 1" in outcomes[2].problem
    table = results_table(outcomes, is_benchmark=True)
    assert table.row_count == 3
    assert table.title is None
    assert results_table(outcomes, is_benchmark=False).title.startswith("not a benchmark")
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["case"] == ["off/b1", "eagle-k1/b1", "vanilla-k7/b1"]
    assert cells["step ms"][2] == "failed"
    assert cells["speed-up"][1].endswith("x")
    assert cells["gap"][2] == ""
    results = document({}, toy, E2EOptions(), outcomes, [], None, [], tie_ulps=4, complete=False)
    assert (results["complete"], results["matched"]) == (False, False)
    assert "synthetic" in heading({"gpu": None}, toy, E2EOptions())[-1]


@pytest.mark.parametrize(
    ("gaps", "step_ms", "bound"),
    [([], 2.0, True), ([0.016, 0.017, 3.0], 2.3, False), ([0.016, 0.017, 0.017], 0.35, True)],
    ids=["eager", "long-steps", "short-steps"],
)
def test_the_host_sets_the_pace_of_eager_and_of_short_steps(
    gaps: list[float], step_ms: float, bound: bool
) -> None:
    assert is_host_bound(gaps, step_ms) is bound


def test_host_bound_rows_are_marked(toy: Subject) -> None:
    (outcome,) = measured(toy, E2ECase(1))
    figures = dataclasses.replace(outcome.figures, host_bound=False)
    free = dataclasses.replace(outcome, figures=figures)
    tables = [results_table(each, is_benchmark=True) for each in ([outcome, free], [free])]
    steps = [list(table.columns[1].cells) for table in tables]
    assert [[cell.endswith("*") for cell in cells] for cells in steps] == [[True, False], [False]]
    assert ["host-bound" in table.caption for table in tables] == [True, False]


@pytest.mark.parametrize(
    ("matplotlib", "reason"),
    [
        (sys, "no case has results"),
        (None, "matplotlib is not installed: pip install matplotlib"),
    ],
)
def test_plot_reports_why_it_is_missing(
    tmp_path, monkeypatch, matplotlib: object, reason: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    assert plot(tmp_path / "plot.png", {"cases": [{"error": "no"}]}) == f"no plot: {reason}"


@pytest.mark.parametrize(
    ("name", "panels"), [("e2e-8gb-draft-vocab", 3), ("e2e-8gb-request-kinds", 2)]
)
def test_plot_has_no_empty_panel(tmp_path, monkeypatch, name: str, panels: int) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    path = tmp_path / "plot.png"
    assert plot(path, json.loads((RESULTS / f"{name}.json").read_text())) == f"plot: {path}"
    (figure,) = figures
    assert path.stat().st_size > 10_000
    assert len(figure.axes) == panels
    assert all(axis.has_data() and axis.get_ylabel() for axis in figure.axes)
    assert "NVIDIA H200, glm4_moe" in figure.get_suptitle()
