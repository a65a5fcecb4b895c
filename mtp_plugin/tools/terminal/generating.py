"""What ``generate`` runs: the batch as configured, and to compare, without drafts, by target-only
decoding and with drafts through none of the executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import OutOfMemoryError

from mtp_plugin.config import LLMConfig
from mtp_plugin.executor import LLM, SamplingParams
from mtp_plugin.executor.progress import batch_progress
from mtp_plugin.tools.parity import Drafting, transformers_attention
from mtp_plugin.tools.terminal.console import OutputConsole, progress
from mtp_plugin.tools.terminal.decoding import BatchRun, run_batch
from mtp_plugin.tools.terminal.plain_decoding import (
    Comparison,
    PlainDecoding,
    PlainRun,
    engine_seed_of,
    redraws,
    thinking_of,
)
from mtp_plugin.tools.terminal.report import Report
from mtp_plugin.tools.terminal.stream_view import StreamView


@dataclass(frozen=True)
class Asked:
    """What the command line asks for beside a config."""

    prompts: Sequence[str]
    params: SamplingParams
    marks: bool | None
    """Put accepted drafts between marks where the output has no colors; None: in a terminal."""
    compare: bool
    """Also without MTP: for the speed, and token by token for the text."""
    compare_drafts: bool
    """Also with drafts through none of the executor, for the tokens per step."""


def run_generate(
    settings: LLMConfig, asked: Asked, stream: OutputConsole | None, log: OutputConsole
) -> Report:
    """Run everything that is asked for.

    Args:
        stream: where texts appear while they are made; None: nowhere.
        log: told what is waited for, and what is left out.
    """
    with progress(log) as tell:
        llm = LLM(settings, on_progress=tell)
    model, tokenizer = llm.model, llm.tokenizer
    max_seq_len, draft_len = llm.max_seq_len, llm.pieces.plan.max_draft_len
    with llm:
        run = _run_shown(llm, asked, stream)
    # its KV cache goes before the next one is allocated
    del llm
    plain = PlainDecoding(
        model,
        run.params,
        max_seq_len,
        tokenizer,
        engine_seed=engine_seed_of(settings),
        thinking=thinking_of(settings, tokenizer),
    )
    run_without_mtp = None
    if asked.compare and draft_len:
        run_without_mtp = _run_without_mtp(settings, asked, plain, log)
    resolved = settings.resolve(model.facts.num_mtp_layers)
    drafting = _drafting(resolved, asked, plain, run) if asked.compare_drafts else None
    comparison = None
    if asked.compare:
        is_alike = isinstance(drafting, Drafting)
        comparison = _compare(plain, run, redraws(settings, asked.params), log, is_alike=is_alike)
    weight: Any = model.embed_tokens.weight
    return Report(
        config=resolved,
        max_draft_len=draft_len,
        device=str(weight.device),
        dtype=str(weight.dtype).removeprefix("torch."),
        prompts=list(asked.prompts),
        run=run,
        run_without_mtp=run_without_mtp,
        comparison=comparison,
        run_without_executor=_run_without_executor(plain, run, drafting, log),
        tokenizer=tokenizer,
    )


def _run_shown(llm: LLM, asked: Asked, stream: OutputConsole | None) -> BatchRun:
    if stream is None:
        return _run_told(llm, asked)
    view = StreamView(stream, asked.prompts, marks=asked.marks)
    try:
        return run_batch(llm, asked.prompts, asked.params, view.show)
    finally:
        view.close()


def _run_told(llm: LLM, asked: Asked) -> BatchRun:
    """With a bar for several prompts, which is drawn between the steps."""
    with batch_progress(len(asked.prompts), use_tqdm=True) as tell:
        return run_batch(
            llm, asked.prompts, asked.params, lambda events: tell([event for _, event in events])
        )


def _run_without_mtp(
    settings: LLMConfig, asked: Asked, plain: PlainDecoding, log: OutputConsole
) -> BatchRun | None:
    without_mtp = settings.model_copy(update={"speculative_config": None})
    has_budget = asked.params.thinking_token_budget is not None
    if has_budget and thinking_of(without_mtp, plain.tokenizer) != plain.thinking:
        log.write_line("not timed without MTP: only speculative_config names the ids of thinking")
        return None
    # no spinner, whose thread would take its share of the time that is measured
    log.write_line("decoding without MTP, for the speed")
    with LLM(without_mtp, model=plain.model, tokenizer=plain.tokenizer) as llm:
        # whose log-probabilities are raw, and nobody reads them
        params = replace(asked.params.without_drafts(), logprobs_mode=None)
        return _run_told(llm, replace(asked, params=params))


def _drafting(
    resolved: LLMConfig, asked: Asked, plain: PlainDecoding, run: BatchRun
) -> Drafting | str:
    """As the executor drafted; a text says why nothing else can."""
    drafting = Drafting.of(resolved, plain.model, asked.params)
    if isinstance(drafting, Drafting) and drafting.redraws and run.num_preemptions:
        redrawing = redraws(resolved, asked.params)
        return f"preempted {run.num_preemptions} times, after which {redrawing} redraws"
    return drafting


def _compare(
    plain: PlainDecoding,
    run: BatchRun,
    redrawing: str | None,
    log: OutputConsole,
    *,
    is_alike: bool,
) -> Comparison | None:
    """With target-only decoding.

    Args:
        redrawing: the verification that draws texts of its own; None: they are the target's.
        is_alike: whether the same drafts alone are compared.
    """
    if redrawing is not None:
        what = "compared with the same drafts alone" if is_alike else "not compared"
        log.write_line(f"{what}: {redrawing} verification draws texts of its own")
        return None
    with progress(log) as tell, transformers_attention(plain.model):
        tell("decoding without the executor, for the text")
        return plain.compare(run.results)


def _run_without_executor(
    plain: PlainDecoding, run: BatchRun, drafting: Drafting | str | None, log: OutputConsole
) -> PlainRun | None:
    if drafting is None:
        return None
    if isinstance(drafting, str):
        log.write_line(f"not decoded again: {drafting}")
        return None
    try:
        with progress(log) as tell, transformers_attention(plain.model):
            tell("decoding with the same drafts, without the executor")
            return plain.run_with_drafts(run.results, drafting)
    except OutOfMemoryError:
        log.write_line("not decoded again: out of memory")
        return None
