"""A whole run: machine, ceilings, cases, report."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from mtp_plugin.bench.case import BenchmarkError
from mtp_plugin.bench.kernels import Kernels, reference_kernels, triton_kernels
from mtp_plugin.bench.machine import describe_machine, measure_ceilings
from mtp_plugin.bench.measure import Bench, Outcome
from mtp_plugin.bench.report import NOT_A_BENCHMARK, document, plot, results_table, store
from mtp_plugin.bench.suites import Options, cases_of
from mtp_plugin.terminal.console import DIFFERENT, OK, can_show, messages, output, progress

SAMPLES, QUICK_SAMPLES, CPU_SAMPLES = 50, 20, 3
_NARROWEST = 150


def run(kind: str, options: Options, path: Path, *, cpu: bool) -> int:
    """Measure the cases of ``kind``; the exit code is 1 where a result did not match.

    Raises:
        BenchmarkError: no GPU and ``cpu`` not given, or no case left.
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
    measured = measured_kernels(device)
    machine = describe_machine(device)
    samples = CPU_SAMPLES if cpu else QUICK_SAMPLES if options.quick else SAMPLES
    out, log = output(), messages()
    outcomes: list[Outcome] = []
    with progress(log) as tell:
        ceilings = None
        if device.type == "cuda":
            tell("reading and copying large buffers")
            ceilings = measure_ceilings(device)
        bench = Bench(measured, reference_kernels(), device, samples=samples)
        for number, case in enumerate(cases, start=1):
            tell(f"{number}/{len(cases)} {case.label}")
            outcomes.append(bench.measure(case))
            # what is there stays there if a later case takes the process down
            content = document(
                kind,
                machine,
                measured.name,
                ceilings,
                outcomes,
                complete=number == len(cases),
            )
            store(path, content)
    if not out.is_terminal:
        out.width = max(out.width, _NARROWEST)
    out.write_line("  ".join(f"{name} {value}" for name, value in machine.items()))
    if ceilings is None:
        out.write_line(f"{NOT_A_BENCHMARK}; kernels: {measured.name}")
    else:
        out.write_line(f"ceilings: read {ceilings.read:.0f} GB/s, copy {ceilings.copy:.0f} GB/s")
    out.print(results_table(outcomes, ceilings, plain_box=not can_show("─", sys.stdout)))
    for outcome in outcomes:
        if outcome.error is not None:
            log.write_line(f"failed: {outcome.case.label}: {outcome.error}", "red")
        elif outcome.mismatches:
            names = ", ".join(outcome.mismatches)
            log.write_line(f"differs: {outcome.case.label}: {names}; no figure", "red")
    if ceilings is not None:
        met = [outcome.target_met for outcome in outcomes if outcome.target_met is not None]
        out.write_line(f"targets met: {sum(met)} of {len(met)}")
        out.write_line(plot(path.with_suffix(".png"), outcomes, ceilings))
    out.write_line(f"results: {path}")
    return OK if all(outcome.matched for outcome in outcomes) else DIFFERENT


def measured_kernels(device: torch.device) -> Kernels:
    """Triton on a device or in its interpreter, the references elsewhere."""
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return triton_kernels()
    return reference_kernels()
