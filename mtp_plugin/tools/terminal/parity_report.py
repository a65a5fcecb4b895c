"""Print the results of ``parity``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from mtp_plugin.tools.parity import Divergence, LogprobComparison, LogprobMismatch
from mtp_plugin.tools.report import Report, as_json
from mtp_plugin.tools.terminal.console import OK, OutputConsole, can_show
from mtp_plugin.tools.terminal.parity import Outcome, ParityReport, Variant
from mtp_plugin.tools.terminal.report import (
    compared_acceptance,
    same_as_target_only,
    spelled,
    without_executor_line,
)

SHOWN_TIES = 10
SHOWN_MISMATCHES = 10
PROMPT_TAIL = 40
"""Characters of a prompt that are shown with a difference."""


def show_parity(report: ParityReport, console: OutputConsole) -> None:
    """Print the table, ties and differences, then the verdict."""
    console.write_line("")
    console.print(_table(report, ascii_box=not can_show("─━", console.file)))
    ties = [(o.variant, n, tie) for o in report.outcomes for n, tie in o.ties]
    for variant, number, tie in ties[:SHOWN_TIES]:
        console.write_line(f"tie: {_describe(report, variant, number, tie)}", "dim")
    if len(ties) > SHOWN_TIES:
        console.write_line(f"and {len(ties) - SHOWN_TIES} further ties", "dim")
    differences = [(o, n, found) for o in report.outcomes for n, found in o.differences]
    for outcome, number, found in differences:
        reported = _describe(report, outcome.variant, number, found)
        prompt = _prompt(report, outcome.results[number - 1].prompt_token_ids)
        console.write_line(f"difference: {reported}, after {prompt}", "bold red")
    for plain in report.plain:
        console.write_line(plain_line(report, plain), "bold red" if plain.differences else "dim")
        for number, found in plain.differences:
            reported = _describe(report, plain.variant, number, found)
            console.write_line(f"difference without the executor: {reported}", "bold red")
    mismatches = [(o, n, one) for o in report.outcomes for n, one in o.mismatches]
    for outcome, number, one in mismatches[:SHOWN_MISMATCHES]:
        reported = _describe_logprob(report, outcome.variant, number, one)
        console.write_line(f"log-probability: {reported}", "bold red")
    if len(mismatches) > SHOWN_MISMATCHES:
        console.write_line(
            f"and {len(mismatches) - SHOWN_MISMATCHES} further log-probabilities", "bold red"
        )
    for outcome in report.outcomes:
        if outcome.logprobs is not None:
            console.write_line(logprobs_line(outcome, outcome.logprobs), "dim")
    tokens = sum(outcome.num_tokens for outcome in report.outcomes)
    num_differences = len(differences) + len(mismatches)
    num_differences += sum(len(plain.differences) for plain in report.plain)
    counted = f"{tokens} tokens; ties: {len(ties)}; differences: {num_differences}"
    verdict = "NO" if num_differences else "yes"
    style = "bold red" if num_differences else None
    console.write_line(f"identical to decoding without MTP: {verdict} ({counted})", style)


def _table(report: ParityReport, *, ascii_box: bool) -> Table:
    title = f"{report.dtype} on {report.device}"
    if report.dtype != "float32":
        title += f", ties up to {report.tie_ulps:g} ulps"
    table = Table(box=box.ASCII if ascii_box else box.SIMPLE_HEAD, title=title)
    table.add_column("worker")
    for name in ("K", "batch", "prompts", "tokens", "equal", "ties", "differ", "accepted"):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in report.outcomes:
        variant = outcome.variant
        accepted = outcome.acceptance.acceptance_length
        table.add_row(
            variant.worker,
            str(variant.k),
            str(variant.batch_size),
            str(len(outcome.results)),
            str(outcome.num_tokens),
            str(outcome.num_equal - outcome.num_ties),
            str(outcome.num_ties),
            str(len(outcome.differences)),
            f"{accepted:.2f}" if variant.k else "",
        )
    return table


def plain_line(report: ParityReport, plain: Outcome) -> str:
    """Describe the outputs of speculative decoding without the executor."""
    runs = [outcome.results for outcome in report.outcomes if outcome.plain is plain]
    same = same_as_target_only(len(plain.differences), plain.num_ties)
    return f"{plain.variant.drafts}, {without_executor_line(plain.results, same, runs)}"


def _describe(report: ParityReport, variant: Variant, number: int, found: Divergence) -> str:
    ours = spelled(found.token, report.tokenizer)
    theirs = spelled(found.expected, report.tokenizer)
    what = "logits" if report.params.is_greedy else "scores"
    gap = "" if found.gap is None else f", {what} {abs(found.gap):.4g} apart"
    if found.gap is not None and found.tolerance:
        gap += f" where {found.tolerance:.4g} is a tie"
    return (
        f"{variant.label}, prompt {number}, token {found.position + 1}: {ours}, "
        f"target-only decoding has {theirs}{gap}"
    )


def logprobs_line(outcome: Outcome, logprobs: Sequence[LogprobComparison]) -> str:
    """Describe the comparison of a variant's log-probabilities."""
    count, gap = _compared(logprobs)
    return f"{outcome.variant.label}, {count} log-probabilities: at most {gap:.2g} apart"


def _compared(logprobs: Sequence[LogprobComparison]) -> tuple[int, float]:
    """Return the number of compared values and the largest gap."""
    gaps = [found.largest_gap for found in logprobs]
    return sum(found.num_values for found in logprobs), max(gaps, default=0.0)


def _describe_logprob(
    report: ParityReport, variant: Variant, number: int, one: LogprobMismatch
) -> str:
    whose = "prompt token" if one.in_prompt else "token"
    reported = (
        "nothing" if one.reported is None else f"{one.reported.logprob:.6g} ({one.reported.rank})"
    )
    return (
        f"{variant.label}, prompt {number}, {whose} {one.position + 1}: {reported} of "
        f"{spelled(one.token, report.tokenizer)}, the target has {one.expected.logprob:.6g} "
        f"({one.expected.rank}), where {one.tolerance:.4g} is no gap"
    )


def _prompt(report: ParityReport, ids: Iterable[int]) -> str:
    if report.tokenizer is None:
        return f"prompt ids {list(ids)[-8:]}"
    return repr(report.tokenizer.decode(list(ids), skip_special_tokens=False)[-PROMPT_TAIL:])


def as_report(report: ParityReport) -> Report:
    """Return the results in the form of every command."""
    return Report(
        command="parity",
        ran={
            "config": report.config.model_dump(mode="json"),
            "device": report.device,
            "dtype": report.dtype,
            "sampling_params": report.params.requested_options(),
            "tie_tolerance_ulps": report.tie_ulps,
        },
        identical=report.exit_code == OK,
        results=[_as_json_outcome(outcome) for outcome in report.outcomes],
    )


def _as_json_outcome(outcome: Outcome) -> dict[str, Any]:
    variant, plain, logprobs = outcome.variant, outcome.plain, outcome.logprobs
    entry: dict[str, Any] = {
        "worker": variant.worker,
        "max_draft_len": variant.k,
        "batch_size": variant.batch_size,
        "num_prompts": len(outcome.results),
        "num_tokens": outcome.num_tokens,
        "num_equal": outcome.num_equal - outcome.num_ties,
        "num_ties": outcome.num_ties,
        "num_differences": len(outcome.differences),
        "acceptance_length": outcome.acceptance.acceptance_length if variant.k else None,
        "ties": _as_json_found(outcome, outcome.ties),
        "differences": _as_json_found(outcome, outcome.differences),
        "without_executor": None,
        "logprobs": None,
    }
    if plain is not None:
        entry["without_executor"] = {
            **compared_acceptance(outcome.results, plain.results),
            "num_ties": plain.num_ties,
            "differences": _as_json_found(plain, plain.differences),
        }
    if logprobs is not None:
        count, gap = _compared(logprobs)
        entry["logprobs"] = {
            "num_values": count,
            "largest_gap": as_json(gap),
            "differences": [
                {
                    "prompt": number,
                    "in_prompt": one.in_prompt,
                    "position": one.position + 1,
                    "token": one.token,
                    "logprob": one.reported and as_json(one.reported.logprob),
                    "rank": one.reported and one.reported.rank,
                    "expected_logprob": as_json(one.expected.logprob),
                    "expected_rank": one.expected.rank,
                    "tolerance": one.tolerance,
                }
                for number, one in outcome.mismatches
            ],
        }
    return entry


def _as_json_found(
    outcome: Outcome, found: Sequence[tuple[int, Divergence]]
) -> list[dict[str, Any]]:
    return [
        {
            "prompt": number,
            "prompt_token_ids": outcome.results[number - 1].prompt_token_ids,
            "position": one.position + 1,
            "token": one.token,
            "expected": one.expected,
            "gap": one.gap,
            "tie_tolerance": one.tolerance,
        }
        for number, one in found
    ]
