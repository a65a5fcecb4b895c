"""Run a benchmark: machine, bandwidth, cases, report."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from integration.bench.case import BenchmarkError
from integration.bench.files import results_file, store, stored_line
from integration.bench.machine import describe_machine, measure_ceilings
from integration.bench.measure import Bench, Outcome
from integration.bench.report import document, heading, results_table
from integration.bench.suites import Options, cases_of
from mtp_plugin.ops.backend import Backend
from mtp_plugin.tools.terminal.console import INTERRUPTED, OutputConsole

SAMPLES, QUICK_SAMPLES, CPU_SAMPLES = 50, 20, 3
_NARROWEST = 150


def run(kind: str, options: Options, *, folder: Path, path: Path | None, cpu: bool) -> int:
    """Measure the cases of ``kind``; the exit code is 1 if a result does not match, 130 if an
    interrupt left some out.

    Args:
        folder: where the results of a full run go unless ``path`` names their file.

    Raises:
        BenchmarkError: no GPU and ``cpu`` not given, no case left, or a path that cannot be
            written.
    """
    if cpu:
        device = torch.device("cpu")
    elif torch.cuda.is_available():
        device = torch.device("cuda")
    else:
        raise BenchmarkError(
            "bench: expected a CUDA device, found none; --cpu compares results on tiny shapes "
            "without one, and its times are no benchmark"
        )
    cases = cases_of(kind, options, device)
    is_full = not (cpu or options.quick or options.only or options.batches)
    path = results_file(path, folder / f"{kind}.json", is_full=is_full)
    measured = measured_backend(device)
    machine = describe_machine(device)
    samples = CPU_SAMPLES if cpu else QUICK_SAMPLES if options.quick else SAMPLES
    ceilings = measure_ceilings(device) if device.type == "cuda" else None
    bench = Bench(measured, Backend.TORCH, device, samples=samples)
    log = OutputConsole(stderr=True, highlight=False, markup=False, soft_wrap=True)
    outcomes: list[Outcome] = []
    complete = False
    failed: BenchmarkError | None = None
    try:
        for number, case in enumerate(cases, start=1):
            log.print(f"{number}/{len(cases)} {case.label}")
            outcomes.append(bench.measure(case))
            complete = number == len(cases)
            # keep the results if a later case ends the process
            results = document(kind, machine, measured.value, ceilings, outcomes, complete=complete)
            store(path, results)
    except KeyboardInterrupt:
        log.print(f"interrupted: {len(outcomes)} of {len(cases)} cases are measured")
    except BenchmarkError as error:
        # show the results in any case
        failed = error
    out = OutputConsole(highlight=False, markup=False)
    if not out.is_terminal:
        out.width = max(out.width, _NARROWEST)
    for line in heading(machine, measured.value, ceilings):
        out.print(line, soft_wrap=True)
    out.print(results_table(outcomes, ceilings))
    for outcome in outcomes:
        if outcome.problem is not None:
            log.print(f"no figure: {outcome.case.label}: {outcome.problem}", style="red")
    if ceilings is not None:
        met = [outcome.target_met for outcome in outcomes if outcome.target_met is not None]
        out.print(f"targets met: {sum(met)} of {len(met)}")
    if failed is not None:
        raise failed
    out.print(stored_line(path), soft_wrap=True)
    if not complete:
        return INTERRUPTED
    return 0 if all(outcome.matched for outcome in outcomes) else 1


def measured_backend(device: torch.device) -> Backend:
    """Return Triton on a device or in its interpreter, else torch."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return Backend.TRITON
    return Backend.TORCH
