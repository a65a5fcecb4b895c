"""``mtp-plugin bench``: decoding speed with and without MTP, and acceptance of drafts.

Numbers of a batch size are reported only if its output with MTP is identical to that without.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from mtp_plugin.tools.report import Report
from mtp_plugin.tools.terminal.console import OutputConsole, can_show
from mtp_plugin.tools.terminal.decoding import BatchRun, merged, run_batch
from mtp_plugin.tools.terminal.parity import expect_same_text, make_prompts

TIMED_RUNS = 3
WARM_UP = 16
"""Output tokens per request of an untimed run before them."""


def result_of(
    batch_size: int,
    without_mtp: Sequence[BatchRun],
    with_mtp: Sequence[BatchRun],
    differences: list[str],
    num_ties: int,
) -> dict[str, Any]:
    """Return the result of a batch size; without numbers if the outputs differ.

    Args:
        num_ties: tokens that differ by no more than half-precision rounding explains.
    """
    entry: dict[str, Any] = {
        "batch_size": batch_size,
        "identical": not differences,
        "compared_tokens": sum(run.num_tokens for run in with_mtp),
        "ties": num_ties,
        "differences": differences,
    }
    if differences:
        return entry
    acceptance = merged([output for run in with_mtp for output in run.results])
    speeds = [
        statistics.median(run.tokens_per_second for run in runs) for runs in (without_mtp, with_mtp)
    ]
    return entry | {
        "output_tokens": with_mtp[0].num_tokens,
        "tokens_per_second_without_mtp": speeds[0],
        "tokens_per_second_with_mtp": speeds[1],
        "speed_up": speeds[1] / speeds[0],
        "acceptance_length": acceptance.acceptance_length,
        "acceptance_rate_per_position": acceptance.per_position,
    }


def show(report: Report, out: OutputConsole) -> None:
    """Print a table, the differences, and whether all outputs are identical."""
    table = Table(
        box=box.SIMPLE_HEAD if can_show("─", out.file) else box.ASCII,
        title="{dtype} on {device}, K = {max_draft_len}, greedy".format(**report.ran),
    )
    for name in ("batch", "tok/s without MTP", "with MTP", "speed-up", "acceptance length"):
        table.add_column(name, justify="right")
    table.add_column("rate per position")
    for result in report.results:
        numbers = ["differs"]
        if result["identical"]:
            numbers = [
                f"{result['tokens_per_second_without_mtp']:.1f}",
                f"{result['tokens_per_second_with_mtp']:.1f}",
                f"{result['speed_up']:.2f}",
                f"{result['acceptance_length']:.2f}",
                " ".join(f"{rate:.2f}" for rate in result["acceptance_rate_per_position"]),
            ]
        table.add_row(str(result["batch_size"]), *numbers)
    out.print(table)
    for result in report.results:
        for line in result["differences"]:
            out.write_line(f"difference: batch {result['batch_size']}, {line}", "bold red")
    tokens = sum(result["compared_tokens"] for result in report.results)
    ties = sum(result["ties"] for result in report.results)
    out.write_line(
        f"identical to decoding without MTP: {'yes' if report.identical else 'NO'} "
        f"({tokens} tokens; ties: {ties})",
        None if report.identical else "bold red",
    )


def run_bench(
    config: LLMConfig,
    texts: Sequence[str],
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    on_progress: Callable[[str], None],
) -> Report:
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
            results.append(result_of(size, without_mtp[size], with_mtp[size], differences, ties))
    ran = {
        "model": config.model,
        "device": str(oracle.device),
        "dtype": str(oracle.dtype).removeprefix("torch."),
        "max_draft_len": draft_len,
        "max_new_tokens": max_new_tokens,
        "timed_runs": TIMED_RUNS,
    }
    return Report("bench", ran, all(result["identical"] for result in results), results)


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
