"""``mtp-plugin bench``: decoding speed with and without MTP, and acceptance of drafts.

Numbers of a batch size are reported only if its output with MTP is identical to that without.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich import box
from rich.table import Table

from mtp_plugin.config import LLMConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.tools.parity import (
    Divergence,
    Oracle,
    TieRule,
    compare_forced,
    first_difference,
    transformers_attention,
)
from mtp_plugin.tools.terminal.console import DIFFERENT, OK, OutputConsole, can_show
from mtp_plugin.tools.terminal.decoding import BatchRun, merged, run_batch
from mtp_plugin.tools.terminal.parity import expect_same_text, make_prompts
from mtp_plugin.tools.terminal.report import versions

TIMED_RUNS = 3
WARM_UP = 16
"""Output tokens per request of an untimed run before them."""


@dataclass(frozen=True)
class BatchResult:
    """The timed runs of one batch size, and the comparison of their outputs."""

    batch_size: int
    without_mtp: list[BatchRun]
    with_mtp: list[BatchRun]
    differences: list[str]
    num_ties: int
    """Tokens that differ by no more than half-precision rounding explains."""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON entry; without numbers if the outputs differ."""
        entry = {
            "batch_size": self.batch_size,
            "identical": not self.differences,
            "ties": self.num_ties,
            "differences": self.differences,
        }
        if self.differences:
            return entry
        acceptance = merged([output for run in self.with_mtp for output in run.results])
        speeds = [
            statistics.median(run.tokens_per_second for run in runs)
            for runs in (self.without_mtp, self.with_mtp)
        ]
        return entry | {
            "output_tokens": self.with_mtp[0].num_tokens,
            "tokens_per_second_without_mtp": speeds[0],
            "tokens_per_second_with_mtp": speeds[1],
            "speed_up": speeds[1] / speeds[0],
            "acceptance_length": acceptance.acceptance_length,
            "acceptance_rate_per_position": acceptance.per_position,
        }

    def row(self) -> list[str]:
        """Return the row of the table."""
        entry = self.as_dict()
        if self.differences:
            return [str(self.batch_size), "differs"]
        return [
            str(self.batch_size),
            f"{entry['tokens_per_second_without_mtp']:.1f}",
            f"{entry['tokens_per_second_with_mtp']:.1f}",
            f"{entry['speed_up']:.2f}",
            f"{entry['acceptance_length']:.2f}",
            " ".join(f"{rate:.2f}" for rate in entry["acceptance_rate_per_position"]),
        ]


@dataclass(frozen=True)
class BenchReport:
    """Results by batch size, and what ran."""

    ran: dict[str, Any]
    results: list[BatchResult]

    @property
    def exit_code(self) -> int:
        """`DIFFERENT` if any output differs."""
        return DIFFERENT if any(result.differences for result in self.results) else OK

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        results = [result.as_dict() for result in self.results]
        return {**self.ran, "versions": versions(), "results": results}

    def show(self, out: OutputConsole) -> None:
        """Print a table, the differences, and whether all outputs are identical."""
        table = Table(
            box=box.SIMPLE_HEAD if can_show("─", out.file) else box.ASCII,
            title="{dtype} on {device}, K = {max_draft_len}, greedy".format(**self.ran),
        )
        for name in ("batch", "tok/s without MTP", "with MTP", "speed-up", "acceptance length"):
            table.add_column(name, justify="right")
        table.add_column("rate per position")
        for result in self.results:
            table.add_row(*result.row())
        out.print(table)
        for result in self.results:
            for line in result.differences:
                out.write_line(f"difference: batch {result.batch_size}, {line}", "bold red")
        tokens = sum(run.num_tokens for result in self.results for run in result.with_mtp)
        ties = sum(result.num_ties for result in self.results)
        out.write_line(
            f"identical to decoding without MTP: {'NO' if self.exit_code else 'yes'} "
            f"({tokens} tokens; ties: {ties})",
            "bold red" if self.exit_code else None,
        )


def run_bench(
    config: LLMConfig,
    texts: Sequence[str],
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    on_progress: Callable[[str], None],
) -> BenchReport:
    """Decode batches greedily with and without MTP, time them and compare the outputs.

    Args:
        config: with a `max_batch_size` of at least the largest batch size.
        texts: prompts; smaller or larger batches take the first ones, or also random parts of them.
        max_new_tokens: output tokens of each request; end-of-sequence tokens are ignored.

    Raises:
        ConfigError: the config has no drafts, or drafts that change the output by design.
        MTPPluginError: the checkpoint, config or a prompt cannot be run.
    """
    if config.speculative_config is None:
        raise ConfigError(
            "bench: expected MTP layers to draft with, got none; use a checkpoint with MTP layers "
            "and a config with speculative_config"
        )
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    expect_same_text("bench", config, params)
    with LLM(config, on_progress=on_progress) as llm:
        model, tokenizer = llm.model, llm.tokenizer
        draft_len, vocab = llm.pieces.plan.max_draft_len, model.facts.vocab_size
        prompts = {n: make_prompts(texts, tokenizer, vocab, n, seed=0) for n in batch_sizes}
        with_mtp = _time(llm, prompts, params, "with MTP", on_progress)
    # its KV cache is freed before the next one is allocated
    del llm
    config_without_mtp = config.model_copy(update={"speculative_config": None})
    with LLM(config_without_mtp, model=model, tokenizer=tokenizer) as llm:
        without_mtp = _time(llm, prompts, params, "without MTP", on_progress)
    del llm
    on_progress("comparing the outputs")
    results = []
    with transformers_attention(model):
        oracle = Oracle(model)
        for size in batch_sizes:
            reference, *others = without_mtp[size]
            found = [_compare(oracle, run, reference) for run in (*others, *with_mtp[size])]
            differences = list(dict.fromkeys(line for lines, _ in found for line in lines))
            ties = sum(num_ties for _, num_ties in found)
            results.append(BatchResult(size, without_mtp[size], with_mtp[size], differences, ties))
    ran = {
        "model": config.model,
        "device": str(oracle.device),
        "dtype": str(oracle.dtype).removeprefix("torch."),
        "max_draft_len": draft_len,
        "max_new_tokens": max_new_tokens,
        "timed_runs": TIMED_RUNS,
    }
    return BenchReport(ran, results)


def _time(
    llm: LLM,
    prompts: dict[int, list[list[int]]],
    params: SamplingParams,
    name: str,
    on_progress: Callable[[str], None],
) -> dict[int, list[BatchRun]]:
    runs = {}
    for size, batch in prompts.items():
        on_progress(f"decoding {name}, batch {size}")
        run_batch(llm, batch, replace(params, max_new_tokens=WARM_UP))
        runs[size] = [run_batch(llm, batch, params) for _ in range(TIMED_RUNS)]
    return runs


def _compare(oracle: Oracle, run: BatchRun, reference: BatchRun) -> tuple[list[str], int]:
    """Return (differences, number of ties) of a run's outputs, which have equal lengths."""
    rule = TieRule(oracle.dtype)
    differences, num_ties = [], 0
    for number, (ours, theirs) in enumerate(zip(run.results, reference.results, strict=True), 1):
        tokens, expected = ours.token_ids, theirs.token_ids
        start = first_difference(tokens, expected)
        if start is None:
            continue
        found = compare_forced(oracle, rule, ours.prompt_token_ids, tokens, start=start)
        num_ties += len(found.ties)
        other = found.difference
        if other is None and oracle.dtype is torch.float32:
            other = Divergence(start, tokens[start], expected[start])
        if other is not None:
            differences.append(
                f"request {number}, token {other.position + 1}: {other.token}, expected "
                f"{other.expected}"
            )
    return differences, num_ties
