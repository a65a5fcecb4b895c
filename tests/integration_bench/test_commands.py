"""The commands without a GPU: they refuse, or compare results and say that it is no benchmark."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import triton  # noqa: F401 - imported first, so that the commands leave the environment alone
from typer.testing import CliRunner

from integration.bench import op_cases, run
from integration.bench.case import BenchmarkError
from integration.bench.cli import RESULTS, app, main
from integration.bench.files import results_file
from integration.bench.step_cases import step_cases
from integration.bench.suites import Options, cases_of
from mtp_plugin.ops.acceptance import STRICT
from mtp_plugin.ops.backend import Backend
from mtp_plugin.speculative.verification import draft_rules

CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path):
    """Run a command; its result, and the document that it left."""

    def invoke(*arguments: str):
        path = tmp_path / "results" / "bench.json"
        result = CliRunner().invoke(app, [*arguments, "--output", str(path)])
        return result, json.loads(path.read_text()) if path.exists() else None

    return invoke


@pytest.mark.parametrize(("kind", "num_cases"), [("step", 3), ("ops", 22)])
def test_tiny_shapes_match_and_are_no_benchmark(bench, kind: str, num_cases: int) -> None:
    result, report = bench(kind, "--cpu", "--batch", "2")
    assert result.exit_code == 0, result.output
    assert "not a benchmark" in result.stdout
    assert report["kind"] == kind
    assert report["benchmark"] is False
    assert "not a benchmark" in report["note"]
    assert report["complete"] is report["matched"] is True
    assert len(report["cases"]) == num_cases
    assert all(case["matched"] and case["graph_us"] is None for case in report["cases"])
    # a time of eager launches is the host's
    assert all(case["eager_us"]["host_bound"] is True for case in report["cases"])
    assert report["host_bound_if"].startswith("launched one by one from the host")
    assert "eager us*" in result.stdout
    assert "* host-bound: launched one by one" in result.stdout
    assert {"cpu", "cpu_cores", "torch", "triton", "commit"} <= report["machine"].keys()


def test_a_result_that_cannot_be_stored_is_refused_first(monkeypatch) -> None:
    monkeypatch.setattr(run, "measured_backend", None)  # nothing may be measured
    arguments = ["ops", "--cpu", "--batch", "2", "--output", "/proc/none/ops.json"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, BenchmarkError)
    assert "--output: /proc/none/ops.json cannot be written" in str(result.exception)


def test_a_run_without_a_gpu_replaces_no_published_result(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    published = tmp_path / RESULTS / "step.json"
    published.parent.mkdir(parents=True)
    published.write_text("{}")
    arguments = ["step", "--cpu", "--batch", "2", "--filter", "vanilla/"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "results are not written: without a GPU" in result.stdout
    assert published.read_text() == "{}"
    assert [*tmp_path.rglob("*.*")] == [published]


def test_only_full_runs_replace_published_results(tmp_path) -> None:
    default, requested = tmp_path / "published.json", tmp_path / "requested.json"
    assert results_file(None, default, is_full=True) == default
    assert results_file(None, default, is_full=False) is None
    assert all(results_file(requested, default, is_full=yes) == requested for yes in (True, False))


def test_an_interrupt_keeps_what_is_measured(bench, monkeypatch) -> None:
    honest, seen = run.Bench.measure, []

    def measure(self, case):
        if seen:
            raise KeyboardInterrupt
        seen.append(case)
        return honest(self, case)

    monkeypatch.setattr(run.Bench, "measure", measure)
    result, report = bench("ops", "--cpu", "--batch", "2", "--filter", "accept")
    assert result.exit_code == 130
    assert "interrupted: 1 of 2 cases are measured" in result.stderr
    assert report["complete"] is False
    assert len(report["cases"]) == 1
    assert "accept/strict" in result.stdout


def test_a_full_disk_loses_no_report(bench, monkeypatch) -> None:
    def fill(*_: object) -> None:
        raise BenchmarkError("--output: cannot be written: No space left on device")

    monkeypatch.setattr(run, "store", fill)
    result, report = bench("ops", "--cpu", "--batch", "2", "--filter", "accept")
    assert isinstance(result.exception, BenchmarkError)
    assert report is None
    assert "accept/strict" in result.stdout
    assert "results: " not in result.stdout


def test_a_wrong_kernel_yields_no_number(bench, monkeypatch) -> None:
    right = op_cases.accept

    def wrong(layout, logits, drafts, rules=STRICT, *, backend, **options):
        accepted = right(layout, logits, drafts, rules, backend=Backend.TORCH, **options)
        if backend is Backend.TORCH or rules.relaxed is not None:
            return accepted
        return dataclasses.replace(accepted, tokens=accepted.tokens + 1)

    monkeypatch.setattr(op_cases, "accept", wrong)
    monkeypatch.setattr(run, "measured_backend", lambda _: Backend.TRITON)
    result, report = bench("ops", "--cpu", "--batch", "2", "--filter", "accept")
    assert result.exit_code == 1
    assert "no figure: accept/strict/" in result.stderr
    assert "differs from the reference: tokens" in result.stderr
    strict, relaxed = report["cases"]
    assert report["matched"] is strict["matched"] is False
    assert strict["mismatches"] == ["tokens"]
    assert "eager_us" not in strict
    assert "gb_per_s" not in strict
    # the others keep theirs
    assert relaxed["matched"] is True
    assert relaxed["eager_us"]["median"] > 0
    row = next(line for line in result.stdout.splitlines() if "accept/strict" in line)
    assert row.split()[1:] == ["differs"]


def test_a_kernel_that_leaves_a_wrong_phase_yields_no_number(bench, monkeypatch) -> None:
    """Slots are compared after the call."""
    right = op_cases.accept

    def wrong(layout, logits, drafts, rules=STRICT, *, backend, **options):
        accepted = right(layout, logits, drafts, rules, backend=Backend.TORCH, **options)
        if backend is Backend.TRITON and rules.relaxed is not None:
            rules.relaxed.slots.table[-1] += 1
        return accepted

    monkeypatch.setattr(op_cases, "accept", wrong)
    monkeypatch.setattr(run, "measured_backend", lambda _: Backend.TRITON)
    result, report = bench("ops", "--cpu", "--batch", "2", "--filter", "accept")
    assert result.exit_code == 1
    assert [case.get("mismatches") for case in report["cases"]] == [None, ["slots"]]


def test_a_wrong_kernel_in_a_step_yields_no_number(bench, monkeypatch) -> None:
    right = draft_rules.propose

    def wrong(logits, place, *, backend):
        if backend is Backend.TORCH:
            right(logits, place, backend=backend)
        else:
            place.write(logits[:, 0])

    monkeypatch.setattr(draft_rules, "propose", wrong)
    monkeypatch.setattr(run, "measured_backend", lambda _: Backend.TRITON)
    result, report = bench("step", "--cpu", "--batch", "2")
    assert result.exit_code == 1
    assert all("eager_us" not in case for case in report["cases"])
    assert all("next_draft_tokens" in case["mismatches"] for case in report["cases"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses(bench) -> None:
    result, report = bench("step")
    assert isinstance(result.exception, BenchmarkError)
    assert "expected a CUDA device, found none; --cpu" in str(result.exception)
    assert report is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(only="nothing"), "--filter: no case has 'nothing' in its name"),
        (Options(batches=(4, 0)), "--batch: expected sizes of at least 1, got 0"),
        (Options(batches=(10**20,)), "--batch: expected sizes of at most 16777216, got 1000000"),
        (Options(vocab=10**20), "--vocab: expected at most 16777216, got 100000000000000000000"),
        (Options(k=0), "--k: expected at least 1, got 0"),
        (Options(k=99), "--k: expected at most 16, got 99"),
        (Options(vocab=4), "--vocab: expected at least 16, got 4"),
        (Options(dtype="float64"), "--dtype: expected one of float32, bfloat16, got float64"),
    ],
)
def test_options_that_fit_no_case_are_named(options: Options, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        cases_of("ops", options, CPU)


def test_a_batch_that_is_no_number_is_named(bench) -> None:
    result, _ = bench("ops", "--cpu", "--batch", "1,many")
    assert result.exit_code == 2
    assert "expected whole numbers" in result.stderr


def test_named_errors_are_one_line_on_its_own(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "ops", "--cpu", "--filter", "nothing"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: --filter: no case has 'nothing' in its name\n"


# --- which cases there are ---


def labels(kind: str, **options) -> list[str]:
    return [case.label for case in cases_of(kind, Options(**options), CPU)]


def test_every_case_has_a_name_of_its_own() -> None:
    for kind in ("step", "ops"):
        names = labels(kind)
        assert len(set(names)) == len(names)


def test_targets_are_for_the_reference_sizes() -> None:
    with_target = {case.label for case in cases_of("step", Options(), CPU) if case.target}
    assert with_target == {
        f"step/{worker}/b{batch}" for worker in ("vanilla", "eagle") for batch in (1, 8, 64, 256)
    }
    others = cases_of("ops", Options(k=1), CPU)
    assert not any(case.target for case in others)
    ops = {case.name: str(case.target) for case in cases_of("ops", Options(), CPU) if case.target}
    assert ops["bookkeeping/fused"] == "<= 3, eager <= 30"
    assert ops["first-pass/mixed"] == "<= 90"
    assert ops["state-copy"] == ">= 4100 GB/s"


def test_other_sizes_are_measured_unless_sizes_are_given() -> None:
    names = labels("step")
    for part in ("bfloat16", "-k1", "-k7", "-h4096", "write-limits"):
        assert any(part in name for name in names)
    assert len(labels("step", quick=True)) == 14
    assert len(labels("step", hidden=4096)) == 28


def test_a_host_with_write_limits_steps_as_well() -> None:
    shape = Options(tiny=True, batches=(2,)).base_shapes()[0]
    reference = Backend.TORCH
    for case in step_cases(shape, CPU, write_limits=True):
        state = case.prepare(0).state
        assert {"kv_write_limit", "kv_capacity"} <= state.keys()
        assert run.Bench(reference, reference, CPU, samples=1).measure(case).matched
