"""The results of ``generate``: a table and a summary, or a report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from mtp_plugin.config import LLMConfig
from mtp_plugin.requests.detokenizer import Tokenizer
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.tools.report import Report, as_json
from mtp_plugin.tools.terminal.console import DIFFERENT, OK, OutputConsole, can_show
from mtp_plugin.tools.terminal.decoding import BatchRun, PromptResult, merged
from mtp_plugin.tools.terminal.plain_decoding import BatchComparison, Difference, PlainRun

SHOWN_LOGPROBS = 10
"""Number of tokens per prompt and output whose log-probabilities are printed."""


@dataclass(frozen=True)
class Generated:
    """Results of ``generate``."""

    config: LLMConfig
    max_draft_len: int
    device: str
    dtype: str
    prompts: list[str]
    run: BatchRun
    run_without_mtp: BatchRun | None
    """The same executor without drafts; None if it was not requested or is `run` itself."""
    comparison: BatchComparison | None
    run_without_executor: PlainRun | None
    """None: not run."""
    tokenizer: Tokenizer | None

    @property
    def label(self) -> Label | None:
        """Note about the output; None: it is the target's own."""
        return self.run.acceptance.label

    @property
    def exit_code(self) -> int:
        """`DIFFERENT` if an output is not identical to the reference."""
        if self.label is not None:
            return OK
        plain = None if self.run_without_executor is None else self.run_without_executor.comparison
        compared = [found for found in (self.comparison, plain) if found is not None]
        return DIFFERENT if any(found.differences for found in compared) else OK


def show_report(report: Generated, console: OutputConsole) -> None:
    """Print the requested log-probabilities, the table under its headline, and how the output
    compares with decoding without MTP."""
    console.write_line("")
    for line in logprob_lines(report.run.results, report.tokenizer):
        console.write_line(line)
    if report.label is not None:
        console.write_line(str(report.label), "bold yellow")
    verdict_style = "bold green" if report.exit_code == OK else "bold red"
    summary = headline(report)
    if summary is not None:
        console.write_line(summary, "bold yellow" if report.label is not None else verdict_style)
    console.print(_table(report, ascii_box=not can_show("─━", console.file)))
    if report.run_without_executor is not None:
        for line in without_executor_lines(report, report.run_without_executor):
            console.write_line(line, "dim" if report.exit_code == OK else "bold red")
    for line in comparison_lines(report):
        console.write_line(line, None if report.exit_code == OK else "bold red")


def headline(report: Generated) -> str | None:
    """Return the speed-up and whether outputs are identical; None without a run without MTP."""
    if report.run_without_mtp is None or not report.run_without_mtp.tokens_per_second:
        return None
    ratio = report.run.tokens_per_second / report.run_without_mtp.tokens_per_second
    speed = f"{ratio:.1f}x tokens per second"
    if report.label is not None:
        return f"{speed}, {report.label.name} acceptance"
    comparison = report.comparison
    if comparison is None:
        return speed
    if comparison.differences:
        return f"{speed}, output NOT identical"
    ties = f" up to {comparison.num_ties} rounding ties" if comparison.num_ties else ""
    return f"{speed}, identical output{ties}"


def logprob_lines(results: Sequence[PromptResult], tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield the log-probabilities and ranks of the first tokens and their top-k tokens."""
    for number, result in enumerate(results, 1):
        for whose, logprobs in (("prompt", result.prompt_logprobs), ("text", result.logprobs)):
            if logprobs is None:
                continue
            yield f"log-probabilities (ranks) of {whose} {number}"
            for place, entries in enumerate(logprobs[:SHOWN_LOGPROBS], 1):
                if entries is not None:
                    spelt = (
                        f"{spelled(token, tokenizer)} {one.logprob:.4f} ({one.rank})"
                        for token, one in entries.items()
                    )
                    yield f"  token {place}: {', '.join(spelt)}"
            if len(logprobs) > SHOWN_LOGPROBS:
                yield f"  and {len(logprobs) - SHOWN_LOGPROBS} further tokens"


def _table(report: Generated, *, ascii_box: bool) -> Table:
    """Compare the runs.

    Tokens and steps are those of decoding, summed over the prompts: the first token of a prompt
    comes from the step that reads the prompt, which counts as neither.
    """
    runs = [report.run] + ([report.run_without_mtp] if report.run_without_mtp is not None else [])
    stats = [run.acceptance for run in runs]
    table = Table(box=box.ASCII if ascii_box else box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("with MTP", "without MTP") if report.max_draft_len else ("without MTP",):
        if len(table.columns) <= len(runs):
            table.add_column(name, justify="right")
    table.add_row("tokens per second", *(f"{run.tokens_per_second:.1f}" for run in runs))
    firsts = "first token" if len(report.prompts) == 1 else "first token of each prompt"
    table.add_row(f"tokens after the {firsts}", *(str(each.emitted) for each in stats))
    table.add_row("decode steps for them", *(str(each.steps) for each in stats))
    if report.max_draft_len:
        synthetic = report.label is not None and report.label.is_drawn
        what = "synthetic acceptance" if synthetic else "acceptance length"
        lengths = [f"{each.acceptance_length:.2f}" for each in stats]
        table.add_row(f"tokens per decode step, {what}", *lengths)
        rates = " / ".join(f"{share:.0%}" for share in stats[0].per_position)
        positions = " / ".join(str(1 + position) for position in range(report.max_draft_len))
        table.add_row(f"acceptance rate at position {positions}", rates)
    return table


def comparison_lines(report: Generated) -> list[str]:
    """Return the result of the comparison with non-speculative decoding, and its differences."""
    comparison = report.comparison
    if comparison is None:
        return []
    what = "decoding without MTP" if report.max_draft_len else "target-only decoding"
    title = f"identical to {what}:"
    if report.label is not None:
        return [
            f"{title} not promised by {report.label.name} acceptance; {comparison.num_equal} of "
            f"{comparison.num_tokens} tokens agree up to the first difference of each prompt"
        ]
    if comparison.differences:
        found = [_describe(difference, report.tokenizer) for difference in comparison.differences]
        return [f"{title} NO", *found]
    ties = f", {comparison.num_ties} rounding ties" if comparison.num_ties else ""
    return [f"{title} yes ({comparison.num_tokens} tokens{ties})"]


def without_executor_lines(report: Generated, plain: PlainRun) -> list[str]:
    """Return a summary of decoding with the same drafts without the executor, and its differences
    from non-speculative decoding."""
    results, found = report.run.results, plain.comparison
    if found is None:
        same = same_texts(results, plain.results, report.dtype)
    else:
        same = same_as_target_only(len(found.differences), found.num_ties)
    differences = [] if found is None else found.differences
    return [
        without_executor_line(plain.results, same, [results]),
        *(_describe(difference, report.tokenizer) for difference in differences),
    ]


def without_executor_line(
    alike: Sequence[PromptResult], same: str, runs: Iterable[Sequence[PromptResult]]
) -> str:
    """Return a summary of the first prompts, decoded without the executor."""
    count = len(alike)
    lengths = [f"{merged(results[:count]).acceptance_length:.2f}" for results in (alike, *runs)]
    which = "prompt 1" if count == 1 else f"prompts 1-{count}"
    by_executor = ", ".join(dict.fromkeys(lengths[1:]))
    return (
        f"{which} without the executor: {same}, accepted {lengths[0]} (by the executor "
        f"{by_executor})"
    )


def same_as_target_only(num_differences: int, num_ties: int) -> str:
    """Describe the comparison with non-speculative decoding."""
    ties = f", {num_ties} rounding ties" if num_ties else ""
    if num_differences:
        return f"another text of {num_differences} than target-only decoding{ties}"
    return f"the text of target-only decoding{ties}"


def same_texts(results: Sequence[PromptResult], alike: Sequence[PromptResult], dtype: str) -> str:
    """Describe the comparison of sampled outputs that differ from non-speculative decoding."""
    others = len(alike) - _num_equal_texts(results, alike)
    if not others:
        return "the executor's text"
    why = "" if dtype == "float32" else f", as rounding in {dtype} may cause"
    return f"another text of {others} than the executor{why}"


def _num_equal_texts(results: Sequence[PromptResult], alike: Sequence[PromptResult]) -> int:
    return sum(a.token_ids == b.token_ids for a, b in zip(alike, results, strict=False))


def _describe(difference: Difference, tokenizer: Tokenizer | None) -> str:
    ours = spelled(difference.token, tokenizer)
    theirs = spelled(difference.expected, tokenizer)
    return (
        f"  prompt {difference.prompt}, token {difference.position}: {ours}, "
        f"target-only decoding has {theirs}"
    )


def spelled(token: int | None, tokenizer: Tokenizer | None) -> str:
    """Return a token's id and text; None is the end of the output."""
    if token is None:
        return "the end"
    if tokenizer is None:
        return str(token)
    return f"{token} {tokenizer.decode([token], skip_special_tokens=False)!r}"


# --- JSON ---


def as_report(found: Generated) -> Report:
    """Return the results in the form of every command."""
    is_mtp, plain = found.max_draft_len > 0, found.run_without_executor
    comparison = None
    if found.comparison is not None:
        comparison = {
            "identical": not found.comparison.differences,
            "expected_identical": found.label is None,
            **asdict(found.comparison),
        }
    alike = None
    if plain is not None:
        verdict = None if plain.comparison is None else asdict(plain.comparison)
        alike = {
            **compared_acceptance(found.run.results, plain.results),
            "num_ties": verdict and verdict["num_ties"],
            "differences": verdict and verdict["differences"],
        }
    is_compared = found.comparison is not None and found.label is None
    return Report(
        command="generate",
        ran={
            "config": found.config.model_dump(mode="json"),
            "device": found.device,
            "dtype": found.dtype,
            "max_draft_len": found.max_draft_len,
            "label": as_json(found.label),
            "run": _as_json_run(found.run, is_mtp=is_mtp),
            "run_without_mtp": found.run_without_mtp
            and _as_json_run(found.run_without_mtp, is_mtp=False),
            "comparison": comparison,
            "without_executor": alike,
        },
        identical=found.exit_code == OK if is_compared else None,
        results=[
            {"prompt": prompt, **as_json(result)} | ({} if is_mtp else {"acceptance": None})
            for prompt, result in zip(found.prompts, found.run.results, strict=True)
        ],
    )


def _as_json_run(run: BatchRun, *, is_mtp: bool) -> dict[str, Any]:
    return {
        "num_tokens": run.num_tokens,
        "num_steps": run.num_steps,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "acceptance": as_json(run.acceptance) if is_mtp else None,
    }


def compared_acceptance(
    results: Sequence[PromptResult], alike: Sequence[PromptResult]
) -> dict[str, Any]:
    """Return the comparison with the same drafts without the executor, for JSON."""
    return {
        "num_prompts": len(alike),
        "num_equal_texts": _num_equal_texts(results, alike),
        "acceptance_length": merged(alike).acceptance_length,
        "acceptance_length_of_executor": merged(results[: len(alike)]).acceptance_length,
    }
