"""Run the command: model, cases, transformers' ``generate``, report."""

from __future__ import annotations

import json
from pathlib import Path

from integration.bench.case import BenchmarkError
from integration.bench.e2e.cases import E2EOptions, cases_of
from integration.bench.e2e.measure import E2EBench
from integration.bench.e2e.outcome import E2EOutcome
from integration.bench.e2e.report import (
    document,
    heading,
    kinds_table,
    loop_line,
    plot,
    results_table,
    transformers_lines,
)
from integration.bench.e2e.subject import Subject, load_checkpoint, make_shape
from integration.bench.e2e.transformers_side import GenerateOutcome, measure_transformers
from integration.bench.files import (
    TRACE,
    check_output,
    check_writable,
    plot_file,
    results_file,
    store,
    stored_line,
)
from integration.bench.machine import describe_machine
from mtp_plugin.errors import expect
from mtp_plugin.hosts.embedded.resolved_config import resolve_device
from mtp_plugin.tools.terminal.console import INTERRUPTED, OutputConsole

GENERATE_PROMPTS, QUICK_GENERATE_PROMPTS = 4, 1
_NARROWEST = 170


def run(
    options: E2EOptions,
    *,
    checkpoint: Path | None,
    shape: str | None,
    device: str,
    dtype: str | None,
    folder: Path,
    path: Path | None,
    trace: Path | None,
    tie_ulps: float | None,
) -> int:
    """Measure one model; the exit code is 1 if a case does not match, 130 after an interrupt.

    Args:
        folder: where the results of a full run go unless ``path`` names their file.

    Raises:
        BenchmarkError: options that no case fits, not exactly one model, or a file that cannot be
            written.
    """
    expect(
        (checkpoint is None) != (shape is None),
        BenchmarkError,
        "bench e2e: expected either --model or --shape",
    )
    options.check()
    check_output(path)
    if trace is not None:
        check_writable(trace, TRACE)
    log = OutputConsole(stderr=True, highlight=False, markup=False, soft_wrap=True)
    place = resolve_device(device)
    fused = place.type == "cuda" if options.fused is None else options.fused
    if checkpoint is not None:
        subject = load_checkpoint(checkpoint, place, dtype, fused=fused)
    else:
        subject = make_shape(shape or "", place, dtype, options.seed, fused=fused)
    cases, skipped = cases_of(options, subject.model.facts.num_mtp_layers)
    for label in skipped:
        log.print(f"skipped: {label}: vanilla needs a layer per draft")
    bench = E2EBench(subject, options, tie_ulps=tie_ulps, trace=trace)
    bench.check(cases)
    kinds = "-request-kinds" if len(options.kinds) > 1 else ""
    default = folder / f"e2e-{subject.name}{kinds}.json"
    is_full = place.type == "cuda" and not (options.quick or options.only)
    path = results_file(path, default, is_full=is_full)
    machine = describe_machine(place)
    outcomes: list[E2EOutcome] = []
    generated: GenerateOutcome | None = None

    def write(*, complete: bool) -> None:
        # keep finished cases if a later one kills the process
        content = document(
            machine,
            subject,
            options,
            outcomes,
            skipped,
            generated,
            bench.traces,
            tie_ulps=bench.gate.tie_ulps,
            complete=complete,
        )
        store(path, content)

    complete = False
    failed: BenchmarkError | None = None
    try:
        for number, case in enumerate(cases, start=1):
            log.print(f"{number}/{len(cases)} {case.label}")
            outcomes.append(bench.measure(case))
            write(complete=False)
        if options.transformers and checkpoint is not None:
            log.print("transformers' generate")
            generated = _transformers_outcome(subject, options, bench)
        complete = True
        write(complete=True)
    except KeyboardInterrupt:
        log.print(f"interrupted: {len(outcomes)} of {len(cases)} cases are measured")
    except BenchmarkError as error:
        # finished cases are shown
        failed = error
    _show(log, machine, subject, options, outcomes, generated, path if failed is None else None)
    if failed is not None:
        raise failed
    _output().print(stored_line(path), soft_wrap=True)
    if not complete:
        return INTERRUPTED
    return 0 if all(outcome.all_matched for outcome in outcomes) else 1


def _transformers_outcome(
    subject: Subject, options: E2EOptions, bench: E2EBench
) -> GenerateOutcome | None:
    """Run transformers on the first prompts of a batch whose run without MTP matched."""
    count = QUICK_GENERATE_PROMPTS if options.quick else GENERATE_PROMPTS
    batches = [b for b in bench.batches if bench.off_run(b) is not None]
    if not batches:
        return GenerateOutcome(error="no run without MTP has a match to compare with")
    batch = max(batches)
    off = bench.off_run(batch)
    if off is None:
        return None
    prompts = bench.prompts(batch)[:count]
    return measure_transformers(subject, bench.gate, prompts, options.output_tokens, off)


def _show(
    log: OutputConsole,
    machine: dict[str, object],
    subject: Subject,
    options: E2EOptions,
    outcomes: list[E2EOutcome],
    generated: GenerateOutcome | None,
    path: Path | None,
) -> None:
    out = _output()
    if not out.is_terminal:
        out.width = max(out.width, _NARROWEST)
    for line in heading(machine, subject, options):
        out.print(line, soft_wrap=True)
    out.print(results_table(outcomes, is_benchmark=subject.device.type == "cuda"))
    if len(options.kinds) > 1:
        out.print(kinds_table(outcomes))
    single = [o for o in outcomes if o.case.is_off and o.case.batch == 1]
    lines = loop_line(outcomes) + transformers_lines(generated, single[0] if single else None)
    for line in lines:
        out.print(line, soft_wrap=True)
    for outcome in outcomes:
        for problem in outcome.problems:
            log.print(f"no figure: {problem}", style="red")
    if subject.device.type == "cuda" and path is not None:
        out.print(
            plot(plot_file(path), json.loads(path.read_text(encoding="utf-8"))), soft_wrap=True
        )


def _output() -> OutputConsole:
    return OutputConsole(highlight=False, markup=False)
