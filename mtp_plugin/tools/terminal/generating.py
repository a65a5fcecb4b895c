"""The runs of ``generate``: the configured batch, and for comparison one without drafts,
non-speculative decoding, and decoding with drafts but without the executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import OutOfMemoryError

from mtp_plugin.config import LLMConfig
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.progress import batch_progress
from mtp_plugin.tools.parity import Drafting, transformers_attention
from mtp_plugin.tools.terminal.console import OutputConsole, progress
from mtp_plugin.tools.terminal.decoding import BatchRun, TokenLines, run_batch
from mtp_plugin.tools.terminal.plain_decoding import (
    BatchComparison,
    PlainDecoding,
    PlainRun,
    resampling_method,
    thinking_of,
)
from mtp_plugin.tools.terminal.report import Generated
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
) -> Generated:
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
    model, tokenizer = llm.model, llm.tokenizer
    max_seq_len, draft_len = llm.max_seq_len, llm.pieces.plan.max_draft_len
    with llm:
        run = _run_shown(llm, options, stream, log)
    # free its KV cache before the next one is allocated
    del llm
    plain = PlainDecoding(
        model,
        run.params,
        max_seq_len,
        tokenizer,
        engine_seed=settings.engine_seed,
        thinking=thinking_of(settings, tokenizer),
    )
    run_without_mtp = None
    if options.compare and draft_len:
        run_without_mtp = _run_without_mtp(settings, options, plain, log)
    resolved = settings.resolve(model.facts.num_mtp_layers)
    drafting = _drafting(resolved, options, plain, run) if options.compare_drafts else None
    comparison = None
    if options.compare:
        is_alike = isinstance(drafting, Drafting)
        comparison = _compare(
            plain, run, resampling_method(settings, options.params), log, is_alike=is_alike
        )
    weight: Any = model.embed_tokens.weight
    return Generated(
        config=resolved,
        max_draft_len=draft_len,
        device=str(weight.device),
        dtype=str(weight.dtype).removeprefix("torch."),
        prompts=list(options.prompts),
        run=run,
        run_without_mtp=run_without_mtp,
        comparison=comparison,
        run_without_executor=_run_without_executor(plain, run, drafting, log),
        tokenizer=tokenizer,
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
    settings: LLMConfig, options: GenerateOptions, plain: PlainDecoding, log: OutputConsole
) -> BatchRun | None:
    without_mtp = settings.model_copy(update={"speculative_config": None})
    has_budget = options.params.thinking_token_budget is not None
    if has_budget and thinking_of(without_mtp, plain.tokenizer) != plain.thinking:
        log.write_line("not timed without MTP: only speculative_config names the ids of thinking")
        return None
    # no spinner: its thread would disturb the measurement
    log.write_line("decoding without MTP, for the speed")
    with LLM(without_mtp, model=plain.model, tokenizer=plain.tokenizer) as llm:
        # log-probabilities of this run are not used
        params = replace(options.params.without_drafts(), logprobs_mode=None)
        return _run_with_progress(llm, replace(options, params=params), log, "decoding without MTP")


def _drafting(
    resolved: LLMConfig, options: GenerateOptions, plain: PlainDecoding, run: BatchRun
) -> Drafting | str:
    """Return the executor's draft settings, or why they cannot be reproduced."""
    drafting = Drafting.of(resolved, plain.model, options.params, plain.thinking)
    if isinstance(drafting, Drafting) and drafting.changes_output and run.num_preemptions:
        method = resampling_method(resolved, options.params)
        return f"preempted {run.num_preemptions} times, after which {method} samples anew"
    return drafting


def _compare(
    plain: PlainDecoding,
    run: BatchRun,
    resampling: str | None,
    log: OutputConsole,
    *,
    is_alike: bool,
) -> BatchComparison | None:
    """Compare with non-speculative decoding.

    Args:
        resampling: verification method whose sampled output differs by design, else None.
        is_alike: whether the output is compared with that of the same drafts.
    """
    if resampling is not None:
        what = "compared with the same drafts alone" if is_alike else "not compared"
        log.write_line(f"{what}: {resampling} verification samples other outputs")
        return None
    with progress(log) as show_progress, transformers_attention(plain.model):
        show_progress("decoding without the executor, for the text")
        return plain.compare(run.results, show_progress)


def _run_without_executor(
    plain: PlainDecoding, run: BatchRun, drafting: Drafting | str | None, log: OutputConsole
) -> PlainRun | None:
    if drafting is None:
        return None
    if isinstance(drafting, str):
        log.write_line(f"not decoded again: {drafting}")
        return None
    try:
        with progress(log) as show_progress, transformers_attention(plain.model):
            show_progress("decoding with the same drafts, without the executor")
            return plain.run_with_drafts(run.results, drafting)
    except OutOfMemoryError:
        log.write_line("not decoded again: out of memory")
        return None
