"""What a run tells: a table, a JSON document, a plot."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from integration.bench.files import why_no_plot, written_whole
from integration.bench.machine import Ceilings
from integration.bench.measure import Outcome, floor_us
from integration.bench.timing import Times

HOST_BOUND_MARK = "*"
HOST_BOUND = "launched one by one from the host: another host gives other figures"
"""What eager times are by nature."""
NOT_A_BENCHMARK = "not a benchmark: measured without a GPU"


def heading(machine: dict[str, Any], kernels: str, ceilings: Ceilings | None) -> list[str]:
    """What was measured on what."""
    named = [f"{name} {value}" for name, value in machine.items() if value not in (None, False)]
    lines = [", ".join(named), f"kernels: {kernels}"]
    if ceilings is not None:
        lines.append(f"ceilings: read {ceilings.read:.0f} GB/s, copy {ceilings.copy:.0f} GB/s")
    return lines


def results_table(outcomes: list[Outcome], ceilings: Ceilings | None) -> Table:
    """One row per case; a case that did not match has no figure in it."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=None if ceilings is not None else NOT_A_BENCHMARK,
        caption=f"{HOST_BOUND_MARK} host-bound: {HOST_BOUND}",
    )
    table.add_column("case", no_wrap=True)
    eager = f"eager us{HOST_BOUND_MARK}"
    for title in ("graph us", "p20-p80", "target", "met", eager, "launches", "MB"):
        table.add_column(title, justify="right", no_wrap=True)
    for title in ("floor us", "of ceiling"):
        table.add_column(title, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*_row(outcome, ceilings))
    return table


def _row(outcome: Outcome, ceilings: Ceilings | None) -> list[str]:
    case, figures = outcome.case, outcome.figures
    if figures is None:
        return [case.label, "differs" if outcome.mismatches else "failed"]
    graph, launches = figures.graph, figures.launches
    floor = share = ""
    if ceilings is not None and outcome.gb_per_s is not None:
        floor = number(floor_us(case, ceilings))
        share = f"{outcome.gb_per_s / ceilings.best:.0%}"
    return [
        case.label,
        "" if graph is None else number(graph.median),
        "" if graph is None else spread(graph),
        "" if case.target is None else str(case.target),
        {None: "", True: "yes", False: "NO"}[outcome.target_met],
        number(figures.eager.median),
        "" if launches is None else _launches(launches.kernels, launches.copies + launches.memsets),
        number(case.bytes_moved / 1e6),
        floor,
        share,
    ]


def number(value: float) -> str:
    """With one decimal where that says something."""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def spread(times: Times, told: Callable[[float], str] = number) -> str:
    """From the 20th to the 80th percentile."""
    return f"{told(times.p20)}-{told(times.p80)}"


def _launches(kernels: float, transfers: float) -> str:
    return f"{kernels:g}" if transfers == 0 else f"{kernels:g}+{transfers:g}"


def document(
    kind: str,
    machine: dict[str, Any],
    kernels: str,
    ceilings: Ceilings | None,
    outcomes: list[Outcome],
    *,
    complete: bool,
) -> dict[str, Any]:
    """Everything that is known of a run; ``complete`` once every case was measured."""
    met = [outcome.target_met for outcome in outcomes if outcome.target_met is not None]
    return {
        "kind": kind,
        "benchmark": ceilings is not None,
        "note": None if ceilings is not None else NOT_A_BENCHMARK,
        "complete": complete,
        "machine": machine,
        "kernels": kernels,
        "host_bound_if": HOST_BOUND,
        "ceilings_gb_per_s": None if ceilings is None else ceilings.as_dict(),
        "matched": all(outcome.matched for outcome in outcomes),
        "targets_met": sum(met),
        "targets": len(met),
        "cases": [outcome.as_dict(ceilings) for outcome in outcomes],
    }


def plot(path: Path, outcomes: list[Outcome], ceilings: Ceilings) -> str:
    """Time over batch size against the byte floor, where matplotlib is there; says what it did."""
    missing = why_no_plot()
    if missing is not None:
        return f"no plot: {missing}"
    lines = _lines(outcomes, ceilings)
    if not lines:
        return "no plot: no case has more than one batch size"
    # optional, so unknown to type checkers where it is not installed
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    columns = min(3, len(lines))
    rows = -(-len(lines) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 4 * rows), squeeze=False)
    for axis, (name, points) in zip(axes.flat, lines.items(), strict=False):
        batches = [point[0] for point in points]
        low, middle, high = ([point[i] for point in points] for i in (1, 2, 3))
        axis.plot(batches, middle, marker="o", label="CUDA graph, median")
        axis.fill_between(batches, low, high, alpha=0.3, label="p20 to p80")
        axis.plot(batches, [point[4] for point in points], "k--", label="byte floor")
        targets = [(point[0], point[5]) for point in points if point[5] is not None]
        if targets:
            axis.plot(*zip(*targets, strict=True), "rv", label="target")
        axis.set(title=name, xlabel="batch", ylabel="microseconds", xscale="log", yscale="log")
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.minorticks_off()
        axis.legend(fontsize="small")
    for axis in axes.flat[len(lines) :]:
        axis.remove()
    figure.tight_layout()
    with written_whole(path) as beside:
        figure.savefig(beside, dpi=120)
    pyplot.close(figure)
    return f"plot: {path}"


Point = tuple[int, float, float, float, float, float | None]
"""Batch, p20, median, p80, byte floor, target."""


def _lines(outcomes: list[Outcome], ceilings: Ceilings) -> dict[str, list[Point]]:
    """The points of each case name and sizes with at least two batch sizes."""
    lines: dict[str, list[Point]] = {}
    for outcome in outcomes:
        case, figures = outcome.case, outcome.figures
        if figures is None or figures.graph is None:
            continue
        graph, target = figures.graph, case.target
        point = (
            case.shape.batch,
            graph.p20,
            graph.median,
            graph.p80,
            floor_us(case, ceilings),
            None if target is None else target.graph_us,
        )
        lines.setdefault(f"{case.name} {case.shape.sizes}".rstrip(), []).append(point)
    return {name: sorted(points) for name, points in lines.items() if len(points) > 1}
