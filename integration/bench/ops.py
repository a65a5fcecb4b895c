"""The benchmark of ops and of a worker's step: compare with torch, then time if results match."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from integration.bench.case import (
    REFERENCE,
    TINY,
    BenchmarkError,
    Case,
    Trial,
    variations,
)
from integration.bench.machine import describe_machine, store
from integration.bench.op_cases import (
    MIXTURE,
    STATE,
    TINY_MIXTURE,
    TINY_STATE,
    first_pass_case,
    op_cases,
    state_copy_case,
)
from integration.bench.sampling_cases import sampling_cases
from integration.bench.step_cases import kind_cases, step_cases
from mtp_plugin.errors import expect
from mtp_plugin.ops.backend import Backend
from mtp_plugin.tools.terminal.console import OutputConsole

MIXED_BATCH = 64
MIN_SETS, MAX_SETS, SETS_ON_CPU = 4, 64, 2
"""Number of input sets in one graph, which amortize its launch; the device's cache is flushed
before each replay."""
SET_BYTES = 2**27
NARROWEST = 120


@dataclass(frozen=True)
class OpsOptions:
    """Options of the command line."""

    batches: tuple[int, ...] = ()
    only: str | None = None
    cpu: bool = False
    output: Path | None = None


def cases_of(options: OpsOptions, device: torch.device) -> list[Case]:
    """Return the selected cases.

    Raises:
        BenchmarkError: no case has the text in its name.
    """
    base, batches = (TINY, (1, 3)) if options.cpu else (REFERENCE, (1, 8, 64, 256))
    shapes = [replace(base, batch=batch) for batch in options.batches or batches]
    mixture, state = (TINY_MIXTURE, TINY_STATE) if options.cpu else (MIXTURE, STATE)
    mixed = replace(base, batch=mixture.num_contexts + 1 if options.cpu else MIXED_BATCH)
    cases = [first_pass_case("first-pass/mixed", mixed, device, mixture)]
    for shape in shapes:
        cases += op_cases(shape, device) + sampling_cases(shape, device)
        cases += [state_copy_case(shape, device, state), *step_cases(shape, device)]
        if not options.cpu:  # each interpreted step takes seconds
            cases += kind_cases(shape, device)
            for varied in variations(shape):
                cases += step_cases(varied, device)
    found = [case for case in cases if not options.only or options.only in case.label]
    expect(bool(found), BenchmarkError, f"--filter: no case has {options.only!r} in its name")
    return found


def run(options: OpsOptions) -> int:
    """Measure the cases; the exit code is 1 if a result does not match.

    Raises:
        BenchmarkError: no GPU and no ``cpu``, or no case left.
    """
    if not options.cpu and not torch.cuda.is_available():
        raise BenchmarkError(
            "bench ops: expected a CUDA device, found none; --cpu compares results on tiny shapes"
        )
    device = torch.device("cpu" if options.cpu else "cuda")
    cases = cases_of(options, device)
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    backend = Backend.TRITON if is_interpreted or not options.cpu else Backend.TORCH
    log = OutputConsole(stderr=True, highlight=False, markup=False, soft_wrap=True)
    found: list[dict[str, Any]] = []
    for number, case in enumerate(cases, start=1):
        log.print(f"{number}/{len(cases)} {case.label}")
        found.append(measure(case, backend, device))
        document = {
            "kind": "ops",
            "benchmark": not options.cpu,
            "complete": number == len(cases),
            "machine": describe_machine(device),
            "kernels": backend.value,
            "matched": all(each["matched"] for each in found),
            "cases": found,
        }
        # keep the results if a later case ends the process
        store(options.output, document)
    _show(found)
    return 0 if all(each["matched"] for each in found) else 1


@torch.no_grad()
def measure(case: Case, backend: Backend, device: torch.device) -> dict[str, Any]:
    """Compare with torch, then time; an error is part of the result."""
    described = {"case": case.label, "name": case.name, "shape": asdict(case.shape)}
    try:
        found = _measured(case, backend, device)
    except Exception as error:  # a failed case must not stop the others
        found = {"matched": False, "error": f"{type(error).__name__}: {error}"}
    return described | {"bytes_moved": case.bytes_moved} | found


def _measured(case: Case, backend: Backend, device: torch.device) -> dict[str, Any]:
    on_device = device.type == "cuda"
    count = min(max(SET_BYTES // max(case.bytes_moved, 1), MIN_SETS), MAX_SETS)
    trials = [case.prepare(seed) for seed in range(count if on_device else SETS_ON_CPU)]
    initial = [{name: each.clone() for name, each in trial.state.items()} for trial in trials]

    def restore() -> None:
        for trial, state in zip(trials, initial, strict=True):
            for name, value in state.items():
                trial.state[name].copy_(value)

    expected = [_results(trial, trial.run(Backend.TORCH)) for trial in trials]
    restore()
    wrong = _mismatches(trials, expected, [trial.run(backend) for trial in trials])
    if wrong or not on_device:
        return {"matched": not wrong, "mismatches": wrong}
    restore()
    graph, results = capture(lambda: [trial.run(backend) for trial in trials])
    for result in results:  # detects a replay that does not write one
        for tensor in result.values():
            tensor.fill_(-777)
    restore()
    graph.replay()
    wrong = _mismatches(trials, expected, results)
    if wrong:
        return {"matched": False, "mismatches": wrong}
    # measured here alone, and triton may be missing
    from triton.testing import do_bench

    quantiles = do_bench(graph.replay, quantiles=[0.5, 0.2, 0.8])
    median, p20, p80 = (milliseconds * 1000 / len(trials) for milliseconds in quantiles)
    launches = count_launches(graph)
    return {
        "matched": True,
        "input_sets": len(trials),
        "graph_us": {"median": median, "p20": p20, "p80": p80},
        "launches": {kind: number / len(trials) for kind, number in launches.items()},
        "gb_per_s": case.bytes_moved / 1000 / median,
    }


def _results(trial: Trial, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in (results | trial.state).items()}


def _mismatches(
    trials: list[Trial],
    expected: list[dict[str, torch.Tensor]],
    results: list[dict[str, torch.Tensor]],
) -> list[str]:
    """Return the names of results and states that differ from the reference."""
    wrong: set[str] = set()
    for trial, want, result in zip(trials, expected, results, strict=True):
        actual = result | trial.state
        wrong |= want.keys() ^ actual.keys()
        for name in want.keys() & actual.keys():
            rtol, atol = (1e-4, 1e-6) if name in trial.approximate else (0.0, 0.0)
            one, other = actual[name], want[name]
            same = one.shape == other.shape and one.dtype == other.dtype
            if not (same and torch.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True)):
                wrong.add(name)
    return sorted(wrong)


Results = list[dict[str, torch.Tensor]]


def capture(call: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """Return a graph of the call, and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        results = call()
    graph.instantiate()
    return graph, results


def count_launches(graph: torch.cuda.CUDAGraph) -> dict[str, int]:
    """Return the number of kernels, copies and memsets of a graph.

    Raises:
        BenchmarkError: the CUDA driver reports an error.
    """
    driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph())
    size, kind = ctypes.c_size_t(0), ctypes.c_int(-1)
    status = driver.cuGraphGetNodes(handle, None, ctypes.byref(size))
    nodes = (ctypes.c_void_p * size.value)()
    status |= driver.cuGraphGetNodes(handle, nodes, ctypes.byref(size))
    counts = {"kernels": 0, "copies": 0, "memsets": 0, "others": 0}
    for node in nodes:
        status |= driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        counts[("kernels", "copies", "memsets")[kind.value] if kind.value < 3 else "others"] += 1
    expect(not status, BenchmarkError, f"the CUDA driver answered {status}")
    return counts


def _show(found: list[dict[str, Any]]) -> None:
    out = OutputConsole(highlight=False, markup=False)
    if not out.is_terminal:
        out.width = max(out.width, NARROWEST)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("case", no_wrap=True)
    for title in ("graph us", "p20-p80", "launches", "MB", "GB/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in found:
        if not each["matched"]:
            table.add_row(each["case"], each.get("error") or f"differs: {each['mismatches']}")
        elif "graph_us" not in each:
            table.add_row(each["case"], "matches")
        else:
            times = each["graph_us"]
            table.add_row(
                each["case"],
                f"{times['median']:.1f}",
                f"{times['p20']:.1f}-{times['p80']:.1f}",
                f"{each['launches']['kernels']:g}",
                f"{each['bytes_moved'] / 1e6:.1f}",
                f"{each['gb_per_s']:.0f}",
            )
    out.print(table)
