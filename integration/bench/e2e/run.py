"""Measure whole steps with and without MTP; numbers are reported only if outputs match."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from integration.bench.case import BenchmarkError
from integration.bench.e2e.batch import Run, TimedStep, run_batch
from integration.bench.e2e.case_config import executor_config
from integration.bench.e2e.cases import E2ECase, E2EOptions, RequestKind
from integration.bench.e2e.prompts import make_prompts
from integration.bench.e2e.reference import Match, Reference, check_synthetic
from integration.bench.e2e.subject import Subject
from integration.bench.machine import describe_machine, store
from mtp_plugin.errors import expect
from mtp_plugin.hosts.embedded import LLM
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools.terminal.console import OutputConsole

LEAST_SECONDS, MOST_RUNS = {"cuda": 1.0, "cpu": 0.0}, 20
"""Seconds of decode steps to time per kind of requests, and the maximum number of runs."""
LEAST_STEADY_STEPS = 3
COMPARED_REQUESTS = 4
"""Requests per kind to compare with target-only decoding, which decodes one by one."""
NARROWEST = 120
STEP_MS = (
    "from the start of a step to that of the next; tokens per second and speed-ups follow from the "
    "mean"
)


def run(subject: Subject, options: E2EOptions, output: Path | None) -> int:
    """Measure one model; the exit code is 1 if an output does not match."""
    log = OutputConsole(stderr=True, highlight=False, markup=False, soft_wrap=True)
    synthetic = options.synthetic(is_trained=subject.is_trained)
    cases = options.cases(subject.model.facts.num_mtp_layers)
    bench = E2EBench(subject, options)
    found: list[dict[str, Any]] = []
    for number, case in enumerate(cases, start=1):
        log.print(f"{number}/{len(cases)} {case.label}")
        found.append(bench.measure(case))
        document = {
            "kind": "e2e",
            "name": subject.name,
            "benchmark": subject.device.type == "cuda",
            "complete": number == len(cases),
            "machine": describe_machine(subject.device),
            "model": subject.as_dict(),
            "input_tokens": options.isl,
            "output_tokens": options.osl,
            "seed": options.seed,
            "draft_vocab": options.draft_vocab,
            "asks": list(options.kinds),
            "acceptance": "real" if synthetic is None else "synthetic",
            "synthetic_acceptance": None if synthetic is None else asdict(synthetic),
            "step_ms": STEP_MS,
            "matched": all(each["matched"] for each in found),
            "cases": found,
        }
        # keep finished cases if a later one ends the process
        store(output, document)
    _show(found)
    for each in (kind for case in found for kind in (case, *case["asks"]) if not kind["matched"]):
        reason = each.get("error") or "; ".join(each["match"]["mismatches"])
        log.print(f"no numbers: {each.get('ask') or each['case']}: {reason}", style="red")
    return 0 if all(each["matched"] for each in found) else 1


class E2EBench:
    """Measures the cases of one subject; a batch size is first run without MTP."""

    def __init__(self, subject: Subject, options: E2EOptions) -> None:
        self._subject = subject
        self._options = options
        self._synthetic = options.synthetic(is_trained=subject.is_trained)
        self._reference = Reference(subject)
        self._off: dict[int, dict[str, Any]] = {}

    def measure(self, case: E2ECase) -> dict[str, Any]:
        """Compare outputs, then return the results; an error is part of them."""
        described: dict[str, Any] = {
            "case": case.label,
            "batch": case.batch,
            "worker": case.worker,
            "max_draft_len": case.k,
            "asks": [],
        }
        if self._synthetic is not None and not case.is_off:
            described["synthetic_acceptance"] = {
                "expected_per_position": list(self._synthetic.shares(case.k))
            }
        try:
            first, *others = self._measured(case)
        except Exception as error:  # a case that fails must not take the others along
            return described | {"matched": False, "error": f"{type(error).__name__}: {error}"}
        if case.is_off:
            self._off[case.batch] = first
        matched = first["matched"] and all(other["matched"] for other in others)
        described |= first | {"asks": others, "matched": matched}
        off = self._off.get(case.batch, {}).get("steady_tokens_per_second")
        if matched and off and not case.is_off:
            described["speed_up"] = {"steady": first["steady_tokens_per_second"] / off}
        return described

    def _measured(self, case: E2ECase) -> list[dict[str, Any]]:
        """Run every kind of requests in turn in one executor, until each was timed long enough."""
        subject, options = self._subject, self._options
        prompts = make_prompts(subject, case.batch, options.isl, options.seed)
        kinds = options.kinds_of(case)
        params = [kind.params(case.batch, options.osl, options.seed) for kind in kinds]
        runs: list[list[Run]] = [[] for _ in kinds]
        config = executor_config(subject, case, options, self._synthetic)
        with LLM(config, model=subject.model) as llm:
            for given in params:  # the first requests of a kind allocate and compile
                run_batch(llm, prompts, options.osl, params=given)
            least = LEAST_SECONDS[subject.device.type]
            for number in range(MOST_RUNS):
                for index in range(len(kinds)):
                    place = (index + number) % len(kinds)  # drift affects all of them
                    found = run_batch(llm, prompts, options.osl, params=params[place])
                    runs[place].append(found)
                if all(_seconds(each) >= least for each in runs):
                    break
        del llm
        gc.collect()
        if subject.device.type == "cuda":
            torch.cuda.empty_cache()
        results = []
        for kind, given, each in zip(kinds, params, runs, strict=True):
            match = self._match(case, kind, given, each)
            entry: dict[str, Any] = {"ask": kind.name, "matched": not match.mismatches}
            entry["match"] = match.as_dict()
            results.append(entry | ({} if match.mismatches else figures(each, case)))
        return results

    def _match(
        self,
        case: E2ECase,
        kind: RequestKind,
        params: Sequence[SamplingParams],
        runs: Sequence[Run],
    ) -> Match:
        results = runs[0].results
        if self._synthetic is not None and not case.is_off:
            vocab, shares = self._subject.model.facts.vocab_size, self._synthetic.shares(case.k)
            stats = acceptance(runs[:1], case.k)  # other runs may repeat its random numbers
            return check_synthetic(results, self._options.osl, vocab, shares, stats)
        if not kind.keeps_output:
            return Match("nothing: other samples of the same distribution")
        return self._reference.compare(results[:COMPARED_REQUESTS], params[:COMPARED_REQUESTS])


def figures(runs: Sequence[Run], case: E2ECase) -> dict[str, Any]:
    """Return the numbers of the runs of one kind of requests.

    Raises:
        BenchmarkError: there are too few whole steps.
    """
    steps = _steady(runs)
    expect(
        len(steps) >= LEAST_STEADY_STEPS,
        BenchmarkError,
        f"expected at least {LEAST_STEADY_STEPS} steps in which every request generates, got "
        f"{len(steps)}; --osl must be larger",
    )
    times = sorted(step.seconds * 1000 for step in steps)
    stats = acceptance(runs, case.k)
    seconds = statistics.median(run.seconds for run in runs)
    return {
        "seconds": seconds,
        "tokens_per_second": runs[0].num_tokens / seconds,
        "first_tokens_seconds": statistics.median(run.first_tokens_seconds for run in runs),
        "step_ms": {
            "median": statistics.median(times),
            "mean": statistics.fmean(times),
            "p20": times[round(0.2 * (len(times) - 1))],
            "p80": times[round(0.8 * (len(times) - 1))],
            "samples": len(times),
        },
        "steady_tokens_per_second": 1000 * sum(sum(s.emitted) for s in steps) / sum(times),
        "acceptance_length": stats.acceptance_length,
        "acceptance_per_position": stats.per_position,
        "share_of_repeated_8_grams": runs[0].share_of_repeated_8_grams,
    }


def acceptance(runs: Sequence[Run], k: int) -> AcceptanceStats:
    """Return the acceptance in steps that only generate."""
    stats = AcceptanceStats(k)
    for step in _steady(runs):
        for count in step.emitted:
            stats.record(count, k)
    return stats


def _steady(runs: Sequence[Run]) -> list[TimedStep]:
    return [step for run in runs for step in run.steady]


def _seconds(runs: Sequence[Run]) -> float:
    return sum(step.seconds for step in _steady(runs))


def _show(found: list[dict[str, Any]]) -> None:
    out = OutputConsole(highlight=False, markup=False)
    if not out.is_terminal:
        out.width = max(out.width, NARROWEST)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("case", "requests"):
        table.add_column(name, no_wrap=True)
    for name in ("step ms", "p20-p80", "accepted", "tok/s", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for case in found:
        for each in (case, *case["asks"]):
            if "step_ms" not in each:
                table.add_row(case["case"], each.get("ask", ""), "no match or failed")
                continue
            times, speed_up = each["step_ms"], each.get("speed_up")
            table.add_row(
                case["case"],
                each["ask"],
                f"{times['median']:.3f}",
                f"{times['p20']:.3f}-{times['p80']:.3f}",
                f"{each['acceptance_length']:.2f}",
                f"{each['steady_tokens_per_second']:.1f}",
                "" if speed_up is None else f"{speed_up['steady']:.2f}x",
            )
    out.print(table)
