"""The runs of ``generate``: one cell of the comparison, and the same executor without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtp_plugin.config import LLMConfig
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.progress import batch_progress
from mtp_plugin.tools.cells import Cell
from mtp_plugin.tools.comparison import Comparer, Decoded, thinking_of
from mtp_plugin.tools.terminal.console import OutputConsole, progress
from mtp_plugin.tools.terminal.decoding import BatchRun, TokenLines, run_batch
from mtp_plugin.tools.terminal.report import ComparisonReport
from mtp_plugin.tools.terminal.stream_view import StreamView


@dataclass(frozen=True)
class GenerateOptions:
    """Options of the command that are not part of the config."""

    prompts: Sequence[str]
    params: SamplingParams
    marks: bool | None
    """Mark accepted drafts if the output has no colors; None: only in a terminal."""
    compare: bool
    """Also decode without MTP, to compare speed and output."""
    compare_drafts: bool
    """Also decode with the same drafts without the executor, to compare tokens per step."""


def run_generate(
    settings: LLMConfig,
    options: GenerateOptions,
    stream: OutputConsole | None,
    log: OutputConsole,
    choices: Sequence[str] = (),
) -> ComparisonReport:
    """Run all requested decodings.

    Args:
        stream: where outputs are streamed; None: nowhere.
        log: receives progress, and what is skipped.
        choices: lines for ``log`` about choices in the config, written once the engine exists.
    """
    with progress(log) as show_progress:
        llm = LLM(settings, on_progress=show_progress)
    for choice in choices:
        log.write_line(choice)
    has_drafts = llm.pieces.plan.max_draft_len > 0
    with llm:
        run = _run_shown(llm, options, stream, log)
    cell = Cell(settings.resolve(llm.model.facts.num_mtp_layers))
    decoded = Decoded(cell, run, llm.model, llm.tokenizer, llm.max_seq_len)
    # free its KV cache before the next one is allocated
    del llm
    runs = [run]
    if options.compare and has_drafts:
        runs += _run_without_mtp(settings, options, decoded, log)
    with progress(log) as show_progress:
        comparer = Comparer(options.params, report=show_progress, note=log.write_line)
        outcome = comparer.compare(decoded, outputs=options.compare, drafts=options.compare_drafts)
    return ComparisonReport(
        "generate",
        [outcome],
        decoded.model,
        decoded.tokenizer,
        options.params,
        runs=runs,
        prompts=options.prompts,
    )


def _run_shown(
    llm: LLM, options: GenerateOptions, stream: OutputConsole | None, log: OutputConsole
) -> BatchRun:
    if stream is None:
        return _run_with_progress(llm, options, log, "decoding")
    log.write_line("warming up")
    view = StreamView(stream, options.prompts, marks=options.marks)
    try:
        return run_batch(llm, options.prompts, options.params, view.show)
    finally:
        view.close()


def _run_with_progress(
    llm: LLM, options: GenerateOptions, log: OutputConsole, what: str
) -> BatchRun:
    """Run with a progress bar if there are several prompts and a terminal, else with lines."""
    if len(options.prompts) == 1 or not log.is_terminal or log.is_dumb_terminal:
        lines = TokenLines(log.write_line, what)
        return run_batch(llm, options.prompts, options.params, lines, log.write_line)
    with batch_progress(len(options.prompts), use_tqdm=True) as show_progress:
        return run_batch(
            llm,
            options.prompts,
            options.params,
            lambda events: show_progress([event for _, event in events]),
        )


def _run_without_mtp(
    settings: LLMConfig, options: GenerateOptions, decoded: Decoded, log: OutputConsole
) -> list[BatchRun]:
    """Return the run, or nothing if it has not all options."""
    without_mtp = settings.model_copy(update={"speculative_config": None})
    tokenizer = decoded.tokenizer
    has_budget = options.params.thinking_token_budget is not None
    if has_budget and thinking_of(without_mtp, tokenizer) != thinking_of(settings, tokenizer):
        log.write_line("not timed without MTP: only speculative_config names the ids of thinking")
        return []
    # no spinner: its thread would disturb the measurement
    log.write_line("decoding without MTP, for the speed")
    with LLM(without_mtp, model=decoded.model, tokenizer=tokenizer) as llm:
        # log-probabilities of this run are not used
        params = replace(options.params.without_drafts(), logprobs_mode=None)
        options = replace(options, params=params)
        return [_run_with_progress(llm, options, log, "decoding without MTP")]
