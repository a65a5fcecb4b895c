"""Report a run as tables, a JSON document and a plot."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from integration.bench.e2e.cases import E2EOptions, acceptance_kind
from integration.bench.e2e.measure import HOST_BOUND_GAP
from integration.bench.e2e.outcome import E2EOutcome, StepFigures
from integration.bench.e2e.phases import PHASES
from integration.bench.e2e.request_kinds import GREEDY, SAMPLED
from integration.bench.e2e.subject import Subject
from integration.bench.e2e.transformers_side import GenerateOutcome
from integration.bench.files import why_no_plot, written_whole
from integration.bench.report import HOST_BOUND_MARK, NOT_A_BENCHMARK, number, spread

TIMED = (
    "from the start of a step to that of the next; tokens per second and speed-ups follow from the "
    "mean"
)
HOST_BOUND = (
    f"steps run eagerly, or the device idles for more than {HOST_BOUND_GAP:.0%} of one: another "
    "host gives other figures"
)
SYNTHETIC = "synthetic acceptance: drafts are accepted at random, the outputs are meaningless"
_GAP = "host_gap"
_SHORT = {
    "target": "target",
    "acceptance": "accept",
    "draft_layers": "layers",
    "draft_head": "head",
    _GAP: "gap",
}


def heading(machine: dict[str, Any], subject: Subject, options: E2EOptions) -> list[str]:
    """Return lines that describe machine, model and lengths."""
    named = [f"{name} {value}" for name, value in machine.items() if value not in (None, False)]
    model = subject.as_dict()
    lines = [
        ", ".join(named),
        f"model {model['name']}: {model['weights']} weights, {model['family']}, "
        f"{model['parameters'] / 1e9:.2f} B parameters, {model['dtype']} on {model['device']}, "
        f"layers {model['layers']}",
        f"{options.input_tokens} tokens in, {options.output_tokens} tokens out",
    ]
    if options.synthetic(is_trained=subject.is_trained) is not None:
        lines.append(SYNTHETIC)
    return lines


def results_table(outcomes: list[E2EOutcome], *, is_benchmark: bool) -> Table:
    """One row per case; a case that did not match has no numbers."""
    title = None if is_benchmark else NOT_A_BENCHMARK
    caption = f"step ms: mean, {TIMED}; phases in ms; tok/s of the batch"
    if any(outcome.synthetic is not None for outcome in outcomes):
        caption += (
            "\nas configured: with the configured tokens per step instead of the measured ones"
        )
    if any(outcome.figures is not None and outcome.figures.host_bound for outcome in outcomes):
        caption += f"\n{HOST_BOUND_MARK} host-bound: {HOST_BOUND}"
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption)
    table.add_column("case", no_wrap=True)
    step = ["step ms", "median", "p20-p80"]
    speed = ["tok/s", "speed-up", "as configured", "tok/s in all", "speed-up"]
    for name in [*step, "accepted", *speed, *_SHORT.values()]:
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*_row(outcome))
    return table


def _row(outcome: E2EOutcome) -> list[str]:
    figures, case = outcome.figures, outcome.case
    if figures is None:
        return [case.label, "failed" if outcome.error else "no match"]
    kind = "" if outcome.synthetic is None else " synth."
    mark = HOST_BOUND_MARK if figures.host_bound else ""
    row = [
        case.label,
        _milliseconds(figures.step_ms.mean) + mark,
        _milliseconds(figures.step_ms.median),
        spread(figures.step_ms, _milliseconds),
        "" if case.is_off else f"{figures.acceptance.acceptance_length:.2f}{kind}",
        number(figures.steady_tokens_per_second),
        _ratio(outcome.speed_up),
        _ratio(outcome.speed_up_as_configured),
        number(figures.tokens_per_second),
        _ratio(outcome.total_speed_up),
    ]
    return row + [_milliseconds(value) for value in _phases(figures).values()]


def kinds_table(outcomes: list[E2EOutcome]) -> Table:
    """One row per kind of requests and case with MTP."""
    caption = (
        "step ms: median; kinds of requests took turns in one executor\n"
        "target: relative to greedy, or to sampled if it says so"
    )
    table = Table(box=box.SIMPLE_HEAD, caption=caption)
    table.add_column("case", no_wrap=True)
    table.add_column("requests", no_wrap=True)
    for name in ("step ms", "p20-p80", "over greedy", "over sampled", "target", "met"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("accepted", "tok/s", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        if outcome.case.is_off:
            continue
        if outcome.figures is not None:
            table.add_row(*_kind_row(outcome, GREEDY, outcome.figures, None))
        for each in outcome.kind_outcomes:
            if each.figures is None:
                table.add_row(
                    outcome.case.label, each.request_kind, "failed" if each.error else "no match"
                )
            else:
                table.add_row(
                    *_kind_row(outcome, each.request_kind, each.figures, each.host_gap_ms)
                )
    return table


def _kind_row(
    outcome: E2EOutcome, request_kind: str, figures: StepFigures, gap: float | None
) -> list[str]:
    kind = "" if outcome.synthetic is None else " synth."
    mark = HOST_BOUND_MARK if figures.host_bound else ""
    target, limit, met = outcome.target_of(request_kind), "", ""
    if target is not None:
        bound, ratio = (
            target.at_most[outcome.case.batch],
            outcome.step_over(request_kind, target.over),
        )
        limit = f"<= {bound:g}" + (f" {SAMPLED}" if target.over == SAMPLED else "")
        met = "" if ratio is None else "yes" if ratio <= bound else "NO"
    ratios = [
        "" if request_kind in (over, GREEDY) or ratio is None else f"{ratio:.3f}"
        for over in (GREEDY, SAMPLED)
        for ratio in [outcome.step_over(request_kind, over)]
    ]
    return [
        outcome.case.label,
        request_kind,
        f"{figures.step_ms.median:.3f}{mark}",
        spread(figures.step_ms, "{:.3f}".format),
        *ratios,
        limit,
        met,
        f"{figures.acceptance.acceptance_length:.2f}{kind}",
        number(figures.steady_tokens_per_second),
        "" if gap is None else f"{gap:.3f}",
    ]


def _phases(figures: StepFigures) -> dict[str, float]:
    """Return the milliseconds by phase and of the host gap; empty if not measured."""
    if figures.phases is None:
        return {}
    return {**{name: figures.phases.spent[name] for name in PHASES}, _GAP: figures.phases.host_gap}


def _milliseconds(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def loop_line(outcomes: list[E2EOutcome]) -> list[str]:
    """Report how much outputs with real acceptance repeat, which raises acceptance."""
    shares = [
        outcome.figures.share_of_repeated_8_grams
        for outcome in outcomes
        if outcome.figures is not None and outcome.synthetic is None and not outcome.case.is_off
    ]
    if not shares:
        return []
    return [f"repeated 8-grams in these texts: {min(shares):.0%} to {max(shares):.0%}"]


def transformers_lines(found: GenerateOutcome | None, off: E2EOutcome | None) -> list[str]:
    """Report transformers' ``generate`` with the same prompts at batch 1."""
    if found is None:
        return []
    lines = []
    for name, figures in (("generate", found.without_mtp), ("generate, use_mtp", found.with_mtp)):
        if figures is not None:
            lines.append(
                f"transformers {name}, batch 1: {number(figures.decode_tokens_per_second)} tok/s"
                f"{HOST_BOUND_MARK} decoding"
            )
    if found.without_mtp is not None and found.with_mtp is not None:
        lines[-1] += f", {_ratio(found.as_dict()['speed_up'])} of generate"
    if off is not None and off.figures is not None and found.without_mtp is not None:
        ratio = off.figures.steady_tokens_per_second / found.without_mtp.decode_tokens_per_second
        lines.append(f"this executor without MTP, batch 1: {_ratio(ratio)} of generate")
    if lines:
        lines.append(f"{HOST_BOUND_MARK} host-bound: eager")
    if found.error is not None:
        lines.append(f"no figure: transformers: {found.error}")
    return lines


def document(
    machine: dict[str, Any],
    subject: Subject,
    options: E2EOptions,
    outcomes: list[E2EOutcome],
    skipped: list[str],
    transformers: GenerateOutcome | None,
    traces: list[str],
    *,
    tie_ulps: float,
    complete: bool,
) -> dict[str, Any]:
    """Return the JSON document of a run; ``complete`` once every case was measured."""
    on_device = subject.device.type == "cuda"
    synthetic = options.synthetic(is_trained=subject.is_trained)
    return {
        "kind": "e2e",
        "name": subject.name,
        "benchmark": on_device,
        "note": None if on_device else NOT_A_BENCHMARK,
        "complete": complete,
        "machine": machine,
        "model": subject.as_dict(),
        "input_tokens": options.input_tokens,
        "output_tokens": options.output_tokens,
        "seed": options.seed,
        "cuda_graphs": on_device and options.graphs,
        "draft_vocab": options.draft_vocab,
        "asks": list(options.kinds),
        "acceptance": acceptance_kind(synthetic),
        "synthetic_acceptance": None if synthetic is None else synthetic.as_dict(),
        "step_ms": TIMED,
        "host_bound_if": HOST_BOUND,
        "tie_tolerance_ulps": tie_ulps,
        "matched": all(outcome.all_matched for outcome in outcomes),
        "skipped": skipped,
        "cases": [outcome.as_dict() for outcome in outcomes],
        "transformers": None if transformers is None else transformers.as_dict(),
        "traces": traces,
    }


PHASE_LABELS = {
    "target": "target",
    "acceptance": "acceptance and bookkeeping",
    "draft_layers": "draft layers",
    "draft_head": "draft heads",
    _GAP: "gap between steps",
}


def plot(path: Path, results: dict[str, Any]) -> str:
    """Plot tokens per second, speed-up and, if measured, the phases of a step over batch sizes.

    Args:
        path: PNG file to write.
        results: as `document` returns them.

    Returns:
        A line that says what was done.
    """
    missing = why_no_plot()
    if missing is not None:
        return f"no plot: {missing}"
    cases = [each for each in results["cases"] if "steady_tokens_per_second" in each]
    if not cases:
        return "no plot: no case has results"
    # optional, so unknown to type checkers where it is not installed
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    has_phases = any(each["phases_ms"] for each in cases)
    panels = 3 if has_phases else 2
    with pyplot.rc_context({"font.size": 13, "axes.titlesize": 14, "legend.fontsize": 11}):
        figure, axes = pyplot.subplots(1, panels, figsize=(6 * panels, 5.4))
        _plot_speed(axes[0], axes[1], cases)
        if has_phases:
            _plot_phases(axes[2], [each for each in cases if each["phases_ms"]])
        figure.suptitle(_plot_title(results), fontsize=15)
        figure.tight_layout()
        with written_whole(path) as partial:
            figure.savefig(partial, dpi=100)
        pyplot.close(figure)
    return f"plot: {path}"


def _plot_title(results: dict[str, Any]) -> str:
    """GPU, model, lengths and the kind of acceptance."""
    machine, model = results["machine"], results["model"]
    title = (
        f"{machine.get('gpu') or machine['cpu']}, {model['family']}, "
        f"{model['parameters'] / 1e9:.2g} B {model['weights']} weights, {model['dtype']}"
    )
    if results["draft_vocab"]:
        title += f", draft vocabulary {results['draft_vocab']}"
    second = f"{results['input_tokens']} input tokens, {results['output_tokens']} output tokens"
    return f"{title}\n{second}, {results['acceptance']} acceptance"


def _series(case: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    """How the legend names a case: its K, and the worker if there are several."""
    if not case["max_draft_len"]:
        return "MTP off"
    workers = {each["worker"] for each in cases if each["max_draft_len"]}
    worker = f", {case['worker']}" if len(workers) > 1 else ""
    return f"K = {case['max_draft_len']}{worker}"


def _plot_speed(speed: Any, gain: Any, cases: list[dict[str, Any]]) -> None:
    batches = sorted({each["batch"] for each in cases})
    for name in dict.fromkeys(_series(each, cases) for each in cases):
        points = [each for each in cases if _series(each, cases) == name]
        sizes = [each["batch"] for each in points]
        style = "k--" if name == "MTP off" else "-"
        rates = [each["steady_tokens_per_second"] for each in points]
        speed.plot(sizes, rates, style, marker="o", linewidth=2, label=name)
        if name != "MTP off":
            ratios = [
                each["speed_up"].get("as_asked") or each["speed_up"]["steady"] for each in points
            ]
            gain.plot(sizes, ratios, marker="o", linewidth=2, label=name)
            for size, ratio in zip(sizes, ratios, strict=True):
                gain.annotate(
                    f"{ratio:.2f}x", (size, ratio), (0, 8), textcoords="offset points", ha="center"
                )
    gain.axhline(1.0, color="k", linestyle="--", label="MTP off")
    highest = max(max(line.get_ydata()) for line in gain.get_lines())
    gain.set_ylim(0, 1.25 * highest)
    gain.margins(x=0.1)
    speed.set_yscale("log")
    for axis, title, label in (
        (speed, "Throughput while decoding", "tokens per second"),
        (gain, "Speed-up of MTP", "tokens per second relative to MTP off"),
    ):
        axis.set(title=title, xlabel="batch size", ylabel=label, xscale="log")
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")


def _plot_phases(axis: Any, cases: list[dict[str, Any]]) -> None:
    bottoms = [0.0] * len(cases)
    for name, label in PHASE_LABELS.items():
        heights = [max(0.0, each["phases_ms"][name]) for each in cases]
        axis.bar(range(len(cases)), heights, bottom=bottoms, label=label)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    names = [f"{_series(each, cases)}\nbatch {each['batch']}" for each in cases]
    axis.set_xticks(range(len(cases)), names, fontsize=10, rotation=90 if len(cases) > 6 else 0)
    axis.set(title="Time of a step by phase", ylabel="milliseconds")
    axis.set_ylim(top=1.35 * max(bottoms))
    axis.legend(loc="upper left")
