"""Report a run as a table and a JSON document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich import box
from rich.table import Table

from integration.bench.machine import Ceilings
from integration.bench.measure import Outcome, floor_us
from integration.bench.timing import Times

HOST_BOUND_MARK = "*"
HOST_BOUND = "launched one by one from the host: another host gives other figures"
"""Note about eager times."""
NOT_A_BENCHMARK = "not a benchmark: measured without a GPU"


def heading(machine: dict[str, Any], kernels: str, ceilings: Ceilings | None) -> list[str]:
    """Return the heading: benchmark and machine."""
    named = [f"{name} {value}" for name, value in machine.items() if value not in (None, False)]
    lines = [", ".join(named), f"kernels: {kernels}"]
    if ceilings is not None:
        lines.append(f"ceilings: read {ceilings.read:.0f} GB/s, copy {ceilings.copy:.0f} GB/s")
    return lines


def results_table(outcomes: list[Outcome], ceilings: Ceilings | None) -> Table:
    """Return the table with one row per case; a case that does not match has no numbers."""
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
    """Format with one decimal if the number is small."""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def spread(times: Times, format_value: Callable[[float], str] = number) -> str:
    """Format the range from the 20th to the 80th percentile."""
    return f"{format_value(times.p20)}-{format_value(times.p80)}"


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
    """Return the JSON document of a run; ``complete`` once every case was measured."""
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
