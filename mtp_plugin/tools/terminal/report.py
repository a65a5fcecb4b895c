"""The results of ``generate`` and ``parity``: tables and lines, or a JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from mtp_plugin.hosts.embedded.models import LoadedModel
from mtp_plugin.requests.detokenizer import Tokenizer
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.metrics.alarms import repeats_itself
from mtp_plugin.tools.comparison import Outcome
from mtp_plugin.tools.parity import TIE_ULPS, Divergence, LogprobMismatch
from mtp_plugin.tools.report import Report, as_json
from mtp_plugin.tools.terminal.console import DIFFERENT, OK, OutputConsole, can_show
from mtp_plugin.tools.terminal.decoding import BatchRun, PromptResult, merged

SHOWN_LOGPROBS = 10
"""Number of tokens per prompt and output whose log-probabilities are printed."""
SHOWN_TIES = 10
SHOWN_MISMATCHES = 10
PROMPT_TAIL = 40
"""Characters of a prompt that are shown with a difference."""
BAD = "bold red"


@dataclass(frozen=True)
class ComparisonReport:
    """Outcomes of the cells of a grid; ``generate`` has one cell, and shows its speed.

    Args:
        runs: of ``generate``: the batch, and the same executor without drafts if that ran.
        prompts: of ``generate``.
    """

    command: str
    outcomes: list[Outcome]
    model: LoadedModel
    tokenizer: Tokenizer | None
    params: SamplingParams
    tie_ulps: float = TIE_ULPS
    runs: Sequence[BatchRun] = ()
    prompts: Sequence[str] = ()

    @property
    def plain(self) -> list[Outcome]:
        """The distinct outcomes with drafts but without the executor."""
        return list({id(o.plain): o.plain for o in self.outcomes if o.plain is not None}.values())

    @property
    def label(self) -> Label | None:
        """Note about the output; None: it is the target's own."""
        return self.outcomes[0].acceptance.label

    @property
    def exit_code(self) -> int:
        """`DIFFERENT` if an output is not identical to the reference."""
        found = (*self.outcomes, *self.plain)
        is_different = any(one.differences or one.mismatches for one in found)
        return DIFFERENT if is_different and self.label is None else OK

    @property
    def max_draft_len(self) -> int:
        """The draft length of ``generate``; 0: no drafts."""
        return self.outcomes[0].acceptance.max_draft_len

    @property
    def device(self) -> str:
        return str(next(self.model.lm_head.parameters()).device)

    @property
    def dtype(self) -> str:
        return str(next(self.model.lm_head.parameters()).dtype).removeprefix("torch.")

    # --- text ---

    def show(self, console: OutputConsole) -> None:
        """Print tables, differences and the verdict."""
        console.write_line("")
        if self.runs:
            self._show_generated(console)
        else:
            self._show_grid(console)

    def _show_generated(self, console: OutputConsole) -> None:
        (outcome,), is_right = self.outcomes, self.exit_code == OK
        for line in logprob_lines(outcome.results, self.tokenizer):
            console.write_line(line)
        if self.label is not None:
            console.write_line(str(self.label), "bold yellow")
        if headline := self._headline(outcome):
            style = "bold green" if is_right else BAD
            console.write_line(headline, style if self.label is None else "bold yellow")
        drafted = [each for each in self.runs[0].results if each.acceptance.num_drafted]
        if looping := sum(repeats_itself(each.token_ids) for each in drafted):
            what = "the output repeats itself" if looping == 1 else f"{looping} outputs repeat"
            console.write_line(
                f"note: {what}, which drafts predict too well: other outputs gain less; try "
                "--temperature 0.8 --top-p 0.95 --seed 7",
                "bold yellow",
            )
        console.print(self._speed_table(console))
        if outcome.plain is not None:
            console.write_line(
                self._plain_line(outcome.plain, [outcome]), "dim" if is_right else BAD
            )
            for number, found in outcome.plain.differences:
                console.write_line(f"  {self._described(number, found)}", BAD)
        for line in self._verdict_lines(outcome):
            console.write_line(line, None if is_right else BAD)

    def _headline(self, outcome: Outcome) -> str | None:
        """Return the speed-up and whether outputs are identical; None without a run without MTP."""
        run, *others = self.runs
        if not others or not others[0].tokens_per_second:
            return None
        speed = f"{run.tokens_per_second / others[0].tokens_per_second:.1f}x tokens per second"
        if self.label is not None:
            return f"{speed}, {self.label.name} acceptance"
        if outcome.verdicts is None:
            return speed
        if outcome.differences:
            return f"{speed}, output NOT identical"
        ties = f" up to {len(outcome.ties)} rounding ties" if outcome.ties else ""
        return f"{speed}, identical output{ties}"

    def _speed_table(self, console: OutputConsole) -> Table:
        """Compare the runs.

        Tokens and steps are those of decoding, summed over the prompts: the first token of a prompt
        comes from the step that reads the prompt, which counts as neither.
        """
        stats = [run.acceptance for run in self.runs]
        table = _table(console)
        table.add_column("")
        names = ("with MTP", "without MTP") if self.max_draft_len else ("without MTP",)
        for name, _ in zip(names, self.runs, strict=False):
            table.add_column(name, justify="right")
        table.add_row("tokens per second", *(f"{run.tokens_per_second:.1f}" for run in self.runs))
        firsts = "first token" if len(self.prompts) == 1 else "first token of each prompt"
        table.add_row(f"tokens after the {firsts}", *(str(each.emitted) for each in stats))
        table.add_row("decode steps for them", *(str(each.steps) for each in stats))
        if self.max_draft_len:
            synthetic = self.label is not None and self.label.is_drawn
            what = "synthetic acceptance" if synthetic else "acceptance length"
            lengths = [f"{each.acceptance_length:.2f}" for each in stats]
            table.add_row(f"tokens per decode step, {what}", *lengths)
            rates = " / ".join(f"{share:.0%}" for share in stats[0].per_position)
            positions = " / ".join(str(1 + position) for position in range(self.max_draft_len))
            table.add_row(f"acceptance rate at position {positions}", rates)
        return table

    def _verdict_lines(self, outcome: Outcome) -> list[str]:
        """Return the result of the comparison with non-speculative decoding, and differences."""
        if outcome.verdicts is None:
            return []
        what = "decoding without MTP" if self.max_draft_len else "target-only decoding"
        title = f"identical to {what}:"
        if self.label is not None:
            return [
                f"{title} not promised by {self.label.name} acceptance; {outcome.num_equal} of "
                f"{outcome.num_tokens} tokens agree up to the first difference of each prompt"
            ]
        if outcome.differences:
            found = [f"  {self._described(number, one)}" for number, one in outcome.differences]
            return [f"{title} NO", *found]
        ties = f", {len(outcome.ties)} rounding ties" if outcome.ties else ""
        return [f"{title} yes ({outcome.num_tokens} tokens{ties})"]

    def _show_grid(self, console: OutputConsole) -> None:
        console.print(self._grid_table(console))
        ties = [(outcome, *found) for outcome in self.outcomes for found in outcome.ties]
        lines = [f"tie: {self._measured(*found)}" for found in ties]
        _show_some(console, lines, SHOWN_TIES, "ties", "dim")
        differences = [(o, *found) for o in self.outcomes for found in o.differences]
        for outcome, number, found in differences:
            prompt = self._prompt(outcome.results[number - 1].prompt_token_ids)
            line = f"{self._measured(outcome, number, found)}, after {prompt}"
            console.write_line(f"difference: {line}", BAD)
        for plain in self.plain:
            outcomes = [outcome for outcome in self.outcomes if outcome.plain is plain]
            line = f"{plain.cell.drafts}, {self._plain_line(plain, outcomes)}"
            console.write_line(line, BAD if plain.differences else "dim")
            for number, found in plain.differences:
                line = self._measured(plain, number, found)
                console.write_line(f"difference without the executor: {line}", BAD)
        mismatches = [
            (outcome, *found) for outcome in self.outcomes for found in outcome.mismatches
        ]
        lines = [f"log-probability: {self._mismatch(*found)}" for found in mismatches]
        _show_some(console, lines, SHOWN_MISMATCHES, "log-probabilities", BAD)
        for outcome in self.outcomes:
            if outcome.logprobs is not None:
                count, gap = _compared(outcome)
                line = f"{count} log-probabilities: at most {gap:.2g} apart"
                console.write_line(f"{outcome.cell.label}, {line}", "dim")
        tokens = sum(outcome.num_tokens for outcome in self.outcomes)
        others = len(differences) + len(mismatches) + sum(len(p.differences) for p in self.plain)
        console.write_line(
            f"identical to decoding without MTP: {'NO' if others else 'yes'} ({tokens} tokens; "
            f"ties: {len(ties)}; differences: {others})",
            BAD if others else None,
        )

    def _grid_table(self, console: OutputConsole) -> Table:
        title = f"{self.dtype} on {self.device}"
        if self.dtype != "float32":
            title += f", ties up to {self.tie_ulps:g} ulps"
        table = _table(console, title)
        table.add_column("worker")
        for name in ("K", "batch", "prompts", "tokens", "equal", "ties", "differ", "accepted"):
            table.add_column(name, justify="right", no_wrap=True)
        for outcome in self.outcomes:
            entry = self._as_json_cell(outcome)
            accepted = entry["acceptance_length"]
            names = ("max_draft_len", "batch_size", "num_prompts", "num_tokens", "num_equal")
            counts = [str(entry[name]) for name in (*names, "num_ties", "num_differences")]
            table.add_row(entry["worker"], *counts, "" if accepted is None else f"{accepted:.2f}")
        return table

    def _plain_line(self, plain: Outcome, outcomes: Sequence[Outcome]) -> str:
        """Return a summary of the first prompts, decoded without the executor.

        Args:
            outcomes: of the executor, with such drafts.
        """
        alike = plain.results
        ties = f", {len(plain.ties)} rounding ties" if plain.ties else ""
        if plain.verdicts is None:
            num_others = len(alike) - _num_equal_texts(outcomes[0].results, alike)
            why = "" if self.dtype == "float32" else f", as rounding in {self.dtype} may cause"
            same = f"another text of {num_others} than the executor{why}"
            same = same if num_others else "the executor's text"
        elif plain.differences:
            same = f"another text of {len(plain.differences)} than target-only decoding{ties}"
        else:
            same = f"the text of target-only decoding{ties}"
        count = len(alike)
        runs = (alike, *(outcome.results[:count] for outcome in outcomes))
        accepted, *others = (f"{merged(results).acceptance_length:.2f}" for results in runs)
        which = "prompt 1" if count == 1 else f"prompts 1-{count}"
        return (
            f"{which} without the executor: {same}, accepted {accepted} (by the executor "
            f"{', '.join(dict.fromkeys(others))})"
        )

    def _described(self, number: int, found: Divergence) -> str:
        ours, theirs = (spelled(token, self.tokenizer) for token in (found.token, found.expected))
        place = f"prompt {number}, token {found.position + 1}"
        return f"{place}: {ours}, target-only decoding has {theirs}"

    def _measured(self, outcome: Outcome, number: int, found: Divergence) -> str:
        """Describe a difference of a cell with its gap."""
        line = f"{outcome.cell.label}, {self._described(number, found)}"
        if found.gap is None:
            return line
        what = "logits" if self.params.is_greedy else "scores"
        tie = f" where {found.tolerance:.4g} is a tie" if found.tolerance else ""
        return f"{line}, {what} {abs(found.gap):.4g} apart{tie}"

    def _mismatch(self, outcome: Outcome, number: int, one: LogprobMismatch) -> str:
        whose, reported = "prompt token" if one.in_prompt else "token", "nothing"
        if one.reported is not None:
            reported = f"{one.reported.logprob:.6g} ({one.reported.rank})"
        return (
            f"{outcome.cell.label}, prompt {number}, {whose} {one.position + 1}: {reported} of "
            f"{spelled(one.token, self.tokenizer)}, the target has {one.expected.logprob:.6g} "
            f"({one.expected.rank}), where {one.tolerance:.4g} is no gap"
        )

    def _prompt(self, ids: list[int]) -> str:
        if self.tokenizer is None:
            return f"prompt ids {ids[-8:]}"
        return repr(self.tokenizer.decode(ids, skip_special_tokens=False)[-PROMPT_TAIL:])

    # --- JSON ---

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        outcome = self.outcomes[0]
        ran: dict[str, Any] = {
            "config": outcome.cell.config.model_dump(mode="json"),
            "device": self.device,
            "dtype": self.dtype,
        }
        is_compared = all(one.verdicts is not None for one in self.outcomes)
        identical = self.exit_code == OK if is_compared and self.label is None else None
        if not self.runs:
            ran["sampling_params"] = self.params.requested_options()
            ran["tie_tolerance_ulps"] = self.tie_ulps
            results = [self._as_json_cell(outcome) for outcome in self.outcomes]
            return Report(self.command, ran, identical, results).as_dict()
        is_mtp, (run, *others) = self.max_draft_len > 0, self.runs
        comparison = {
            "identical": not outcome.differences,
            "expected_identical": self.label is None,
            "differences": _as_json_found(outcome, outcome.differences),
            "num_tokens": outcome.num_tokens,
            "num_equal": outcome.num_equal,
            "num_ties": len(outcome.ties),
        }
        ran |= {
            "max_draft_len": self.max_draft_len,
            "label": as_json(self.label),
            "run": _as_json_run(run, is_mtp=is_mtp),
            "run_without_mtp": _as_json_run(others[0], is_mtp=False) if others else None,
            "comparison": comparison if is_compared else None,
            "without_executor": _as_json_plain(outcome),
        }
        results = [
            {"prompt": prompt, **as_json(result)} | ({} if is_mtp else {"acceptance": None})
            for prompt, result in zip(self.prompts, run.results, strict=True)
        ]
        return Report(self.command, ran, identical, results).as_dict()

    def _as_json_cell(self, outcome: Outcome) -> dict[str, Any]:
        cell, logprobs = outcome.cell, None
        if outcome.logprobs is not None:
            count, gap = _compared(outcome)
            logprobs = {
                "num_values": count,
                "largest_gap": as_json(gap),
                "differences": [_as_json_mismatch(*found) for found in outcome.mismatches],
            }
        return {
            "worker": cell.worker,
            "max_draft_len": cell.k,
            "batch_size": cell.config.max_batch_size,
            "num_prompts": len(outcome.results),
            "num_tokens": outcome.num_tokens,
            "num_equal": outcome.num_equal - len(outcome.ties),
            "num_ties": len(outcome.ties),
            "num_differences": len(outcome.differences),
            "acceptance_length": outcome.acceptance.acceptance_length if cell.k else None,
            "ties": _as_json_found(outcome, outcome.ties),
            "differences": _as_json_found(outcome, outcome.differences),
            "without_executor": _as_json_plain(outcome),
            "logprobs": logprobs,
        }


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


def spelled(token: int | None, tokenizer: Tokenizer | None) -> str:
    """Return a token's id and text; None is the end of the output."""
    if token is None:
        return "the end"
    if tokenizer is None:
        return str(token)
    return f"{token} {tokenizer.decode([token], skip_special_tokens=False)!r}"


def _table(console: OutputConsole, title: str | None = None) -> Table:
    return Table(box=box.SIMPLE_HEAD if can_show("─━", console.file) else box.ASCII, title=title)


def _show_some(
    console: OutputConsole, lines: Sequence[str], most: int, what: str, style: str
) -> None:
    for line in lines[:most]:
        console.write_line(line, style)
    if len(lines) > most:
        console.write_line(f"and {len(lines) - most} further {what}", style)


def _compared(outcome: Outcome) -> tuple[int, float]:
    """Return the number of compared log-probabilities and the largest gap."""
    found = outcome.logprobs or ()
    return sum(one.num_values for one in found), max(
        (one.largest_gap for one in found), default=0.0
    )


def _num_equal_texts(results: Sequence[PromptResult], alike: Sequence[PromptResult]) -> int:
    return sum(a.token_ids == b.token_ids for a, b in zip(alike, results, strict=False))


def _as_json_run(run: BatchRun, *, is_mtp: bool) -> dict[str, Any]:
    return {
        "num_tokens": run.num_tokens,
        "num_steps": run.num_steps,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "acceptance": as_json(run.acceptance) if is_mtp else None,
    }


def _as_json_plain(outcome: Outcome) -> dict[str, Any] | None:
    """Return the comparison with the same drafts without the executor."""
    results, plain = outcome.results, outcome.plain
    if plain is None:
        return None
    alike, is_compared = plain.results, plain.verdicts is not None
    return {
        "num_prompts": len(alike),
        "num_equal_texts": _num_equal_texts(results, alike),
        "acceptance_length": merged(alike).acceptance_length,
        "acceptance_length_of_executor": merged(results[: len(alike)]).acceptance_length,
        "num_ties": len(plain.ties) if is_compared else None,
        "differences": _as_json_found(plain, plain.differences) if is_compared else None,
    }


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
            "gap": as_json(one.gap),
            "tie_tolerance": one.tolerance,
        }
        for number, one in found
    ]


def _as_json_mismatch(number: int, one: LogprobMismatch) -> dict[str, Any]:
    return {
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
