"""Compare an engine with the reference: outputs, ties, log-probabilities and drafts.

The engine decodes a batch in each cell of a grid (worker, draft length, batch size); ``generate``
has one cell. The reference decodes the same requests one at a time, without the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from mtp_plugin.config import LLMConfig, MTPDecodingConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import LLM
from mtp_plugin.hosts.embedded.models import LoadedModel
from mtp_plugin.infer import Continuation, SamplingRule, Thinking, decode
from mtp_plugin.infer.decoding import LogprobsMode
from mtp_plugin.requests.detokenizer import Tokenizer
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.pacing import paced
from mtp_plugin.requests.prompts import place_of
from mtp_plugin.requests.seeds import ENGINE_SEED
from mtp_plugin.requests.thinking import NO_TOKEN, resolve_thinking_end
from mtp_plugin.requests.tokenizer import encode
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats, num_decided_drafts
from mtp_plugin.speculative.verification import label_of
from mtp_plugin.tools.cells import Cell
from mtp_plugin.tools.parity import (
    TIE_ULPS,
    Comparison,
    Divergence,
    Drafting,
    LogprobComparison,
    LogprobMismatch,
    Oracle,
    TieRule,
    compare_logprobs,
    compare_with_continuations,
    measure_gap,
    transformers_attention,
)
from mtp_plugin.tools.terminal.decoding import BatchRun, PromptResult, merged, run_batch
from mtp_plugin.verifications import METHODS

CHUNK_LEN = 16
"""Number of tokens that the reference decodes after a tie before the next comparison."""
REPEATED_PROMPTS = 4
"""Number of prompts that are decoded again with drafts, one by one."""
RANDOM_PROMPTS = 8
LONGEST_RANDOM_PROMPT = 48

KnownTexts = dict[tuple[int, ...], list[int]]
"""Outputs of non-speculative decoding by (request number, prompt ids)."""
Report = Callable[[str], None]


def _ignore(_: str) -> None:
    pass


# --- the reference ---


@dataclass(frozen=True)
class PlainDecoding:
    """Decode what an executor decoded, one prompt at a time, without the executor.

    The model must run under `transformers_attention`.
    """

    model: LoadedModel
    params: SamplingParams
    max_seq_len: int
    tokenizer: Tokenizer | None
    engine_seed: int = ENGINE_SEED
    """Seed of requests without one."""
    thinking: Thinking | None = None
    """The thinking tags, for thinking budgets."""
    known: KnownTexts = field(default_factory=dict)
    """Cache of outputs; may be shared only with the same params and engine seed."""

    def verdicts(
        self, results: Sequence[PromptResult], tie_ulps: float = TIE_ULPS, report: Report = _ignore
    ) -> list[Comparison]:
        """Return the comparison of each result with non-speculative decoding.

        Args:
            report: called with lines about progress.
        """
        report = paced(report)
        oracle = Oracle(self.model)
        rule = TieRule(oracle.dtype, tie_ulps)
        verdicts = []
        for place, result in enumerate(results, 1):
            measure = measure_gap(oracle, rule, self._rule_of(result), result.token_ids)
            on_token = partial(_report_tokens, report, place_of(place, len(results)))
            continue_from = partial(self._continue_from, result, on_token)
            verdicts.append(compare_with_continuations(result.token_ids, continue_from, measure))
        return verdicts

    def logprobs(
        self, results: Sequence[PromptResult], mode: LogprobsMode, tie_ulps: float = TIE_ULPS
    ) -> list[LogprobComparison]:
        """Return the comparison of each result's log-probabilities with the target's.

        Args:
            mode: whether those of output tokens are raw or processed.
        """
        oracle = Oracle(self.model)
        rule = TieRule(oracle.dtype, tie_ulps)
        return [
            compare_logprobs(
                oracle,
                rule,
                self._rule_of(result),
                result.token_ids,
                logprobs=result.logprobs,
                prompt_logprobs=result.prompt_logprobs,
                mode=mode,
            )
            for result in results
        ]

    def with_drafts(
        self, results: Sequence[PromptResult], drafting: Drafting
    ) -> list[PromptResult]:
        """Decode the first prompts with the executor's draft settings."""
        found = []
        for result in results[:REPEATED_PROMPTS]:
            text = Continuation(result.prompt_token_ids, **self._options(result, self.max_seq_len))
            ran = drafting.decode(self.model, text)
            stats = AcceptanceStats(drafting.num_drafts)
            steps = list(zip(ran.emitted, ran.drafted, strict=True))
            for place, (emitted, drafted) in enumerate(steps):
                if place:  # after the prefill
                    ends = place == len(steps) - 1
                    stats.record(emitted, num_decided_drafts(emitted, drafted, ends=ends))
            found.append(
                replace(
                    result,
                    token_ids=ran.decoded.token_ids,
                    text=ran.decoded.text or "",
                    finish_reason=ran.decoded.finish_reason,
                    acceptance=stats,
                )
            )
        return found

    def _options(self, result: PromptResult, max_seq_len: int) -> dict[str, Any]:
        """Return the arguments of `Continuation` that determine the output."""
        return {
            "params": replace(self.params, logprobs=None, prompt_logprobs=None, logprobs_mode=None),
            "number": result.number,
            "end_ids": self.model.facts.eos_token_ids,
            "thinking": self.thinking,
            "max_seq_len": max_seq_len,
            "tokenizer": self.tokenizer,
            "engine_seed": self.engine_seed,
        }

    def _rule_of(self, result: PromptResult) -> SamplingRule:
        return SamplingRule(
            self.params,
            result.prompt_token_ids,
            number=result.number,
            end_ids=self.model.facts.eos_token_ids,
            engine_seed=self.engine_seed,
            thinking=self.thinking,
        )

    def _continue_from(
        self, result: PromptResult, on_token: Callable[[int], None], emitted: list[int]
    ) -> list[int]:
        """Return ``emitted`` continued by non-speculative decoding, up to the length limit."""
        prompt = result.prompt_token_ids
        limit = self.max_seq_len - len(prompt)
        if self.params.max_new_tokens is not None:
            limit = min(self.params.max_new_tokens, limit)

        def go_on(tokens: list[int], upto: int) -> list[int]:
            options = self._options(result, len(prompt) + upto)
            target = self.model.target
            return decode(target, prompt, emitted=tokens, on_token=on_token, **options).token_ids

        if not emitted:
            key = (result.number, *prompt)
            if key not in self.known:
                self.known[key] = go_on([], limit)
            return self.known[key]
        # decode in small parts after a tie, since another tie makes the rest useless
        tokens = emitted
        while True:
            upto = min(len(tokens) + CHUNK_LEN, limit)
            tokens = go_on(tokens, upto)
            if len(tokens) < upto or upto == limit or tokens != result.token_ids[: len(tokens)]:
                return tokens


def _report_tokens(report: Report, place: str, count: int) -> None:
    report(f"decoding without the executor: {place}, {count} tokens")


# --- a cell with the reference ---


@dataclass(frozen=True)
class Outcome:
    """Outputs of a cell, compared with the reference."""

    cell: Cell
    results: list[PromptResult]
    verdicts: list[Comparison] | None
    """Comparison per prompt; None: not compared, or sampled outputs differ by design."""
    plain: Outcome | None = None
    """The first prompts, decoded again with such drafts but without the executor; None: not
    requested, or the drafts depend on more than the request."""
    logprobs: list[LogprobComparison] | None = None
    """Comparison per prompt with the target's; None: not requested."""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens."""
        return sum(len(result.token_ids) for result in self.results)

    @property
    def num_equal(self) -> int:
        """Number of tokens before the first difference of their prompt, including ties."""
        return sum(verdict.num_equal for verdict in self.verdicts or ())

    @property
    def ties(self) -> list[tuple[int, Divergence]]:
        """(Prompt number from 1, difference that rounding explains)."""
        return [
            (n, tie) for n, verdict in enumerate(self.verdicts or (), 1) for tie in verdict.ties
        ]

    @property
    def differences(self) -> list[tuple[int, Divergence]]:
        """(Prompt number from 1, its first difference that is not a tie)."""
        verdicts = enumerate(self.verdicts or (), 1)
        return [(n, v.difference) for n, v in verdicts if v.difference is not None]

    @property
    def mismatches(self) -> list[tuple[int, LogprobMismatch]]:
        """(Prompt number from 1, log-probability that differs from the target's)."""
        return [
            (n, one) for n, found in enumerate(self.logprobs or (), 1) for one in found.mismatches
        ]

    @property
    def acceptance(self) -> AcceptanceStats:
        """Acceptance statistics of all prompts."""
        return merged(self.results)


@dataclass(frozen=True)
class Decoded:
    """What an executor decoded in a cell, and what decoding it again needs."""

    cell: Cell
    run: BatchRun
    model: LoadedModel
    tokenizer: Tokenizer | None
    max_seq_len: int


@dataclass
class Comparer:
    """Compares what executors with one model decoded with the reference.

    Args:
        params: the request options as given.
        report: called with lines about progress.
        note: called with lines about what is not compared.
    """

    params: SamplingParams
    tie_ulps: float = TIE_ULPS
    report: Report = _ignore
    note: Report = _ignore
    _known: dict[int, KnownTexts] = field(default_factory=dict)
    _alike: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    """What was decoded again with drafts, by worker and draft length."""

    def reference(self, decoded: Decoded) -> PlainDecoding:
        """Return the reference for what an executor decoded."""
        config = decoded.cell.config
        return PlainDecoding(
            decoded.model,
            decoded.run.params,
            decoded.max_seq_len,
            decoded.tokenizer,
            engine_seed=config.engine_seed,
            thinking=thinking_of(config, decoded.tokenizer),
            known=self._known.setdefault(config.engine_seed, {}),
        )

    def compare(
        self, decoded: Decoded, *, outputs: bool = True, drafts: bool = True, logprobs: bool = False
    ) -> Outcome:
        """Compare outputs, drafts and log-probabilities, each if requested and possible."""
        cell, run, plain = decoded.cell, decoded.run, self.reference(decoded)
        results, verdicts, alike, compared_logprobs = run.results, None, None, None
        drafting = self._drafting(cell.config, run, plain) if drafts else None
        resampling = resampling_method(cell.config, self.params)
        if outputs and resampling is not None:
            is_alike = isinstance(drafting, Drafting)
            what = "compared with the same drafts alone" if is_alike else "not compared"
            self.note(f"{what}: {resampling} verification samples other outputs")
        with transformers_attention(decoded.model):
            if outputs and resampling is None:
                self.report(f"{cell.label}: decoding without the executor")
                verdicts = plain.verdicts(results, self.tie_ulps, self.report)
            if isinstance(drafting, str):
                self.note(f"not decoded again: {drafting}")
            elif drafting is not None:
                alike = self._with_drafts(cell, results, plain, drafting)
            if logprobs:
                mode = logprobs_mode_of(cell.config)
                compared_logprobs = plain.logprobs(results, mode, self.tie_ulps)
        return Outcome(cell, results, verdicts, alike, compared_logprobs)

    def _drafting(self, config: LLMConfig, run: BatchRun, plain: PlainDecoding) -> Drafting | str:
        """Return the executor's draft settings, or why they cannot be reproduced."""
        drafting = Drafting.of(config, plain.model, self.params, plain.thinking)
        if isinstance(drafting, Drafting) and drafting.changes_output and run.num_preemptions:
            method = resampling_method(config, self.params)
            return f"preempted {run.num_preemptions} times, after which {method} samples anew"
        return drafting

    def _with_drafts(
        self, cell: Cell, results: list[PromptResult], plain: PlainDecoding, drafting: Drafting
    ) -> Outcome | None:
        key = (cell.worker, cell.k)
        if key not in self._alike:
            self.report(f"{cell.drafts}: decoding with the same drafts, without the executor")
            try:
                again = plain.with_drafts(results, drafting)
                verdicts = None if drafting.changes_output else plain.verdicts(again, self.tie_ulps)
            except torch.OutOfMemoryError:
                self.note("not decoded again: out of memory")
                return None
            self._alike[key] = Outcome(cell, again, verdicts)
        return self._alike[key]


def compare_grid(
    cells: Sequence[Cell],
    texts: Sequence[str],
    params: SamplingParams,
    *,
    num_prompts: int | None,
    seed: int,
    tie_ulps: float,
    on_progress: Report,
) -> tuple[list[Outcome], LoadedModel, Tokenizer | None]:
    """Decode the same prompts in all cells with one model, and compare each with the reference.

    Returns:
        The outcomes in the order of the cells, the model and its tokenizer.

    Raises:
        MTPPluginError: the checkpoint, config, a prompt or the tolerance is invalid.
    """
    TieRule(torch.float32, tie_ulps)  # validates the tolerance before weights are loaded
    for cell in cells:
        expect_same_text("parity", cell.config, params)
    model: Any = None
    tokenizer: Any = None
    prompts: list[list[int]] = []
    decoded: dict[int, Decoded] = {}
    # the cell with the most draft layers loads the model for all
    for index in sorted(range(len(cells)), key=lambda index: -cells[index].num_draft_layers):
        cell = cells[index]
        progress = on_progress if model is None else None
        with LLM(cell.config, model=model, tokenizer=tokenizer, on_progress=progress) as llm:
            model, tokenizer = llm.model, llm.tokenizer
            _expect_comparable(cell.config, params, Oracle(model).dtype)
            if not prompts:
                vocab = model.facts.vocab_size
                prompts = make_prompts(texts, tokenizer, vocab, num_prompts, seed)
            on_progress(f"{cell.label}: {len(prompts)} prompts")
            run = run_batch(llm, prompts, params)
            decoded[index] = Decoded(cell, run, model, tokenizer, llm.max_seq_len)
        # free its KV cache before the next one is allocated
        del llm
    comparer = Comparer(params, tie_ulps, on_progress)
    logprobs = not (params.logprobs is None and params.prompt_logprobs is None)
    outcomes = [comparer.compare(decoded[n], logprobs=logprobs) for n in range(len(cells))]
    return outcomes, model, tokenizer


# --- what may be compared ---


def expect_same_text(command: str, config: LLMConfig, params: SamplingParams) -> None:
    """Refuse a config or request whose output differs from non-speculative decoding by design.

    Args:
        command: name of the command for the message.

    Raises:
        ConfigError: the output would differ.
    """
    method = resampling_method(config, params)
    if method is not None:
        raise ConfigError(
            f"{command}: {method} verification samples other outputs by design; expected a "
            "config that verifies sampled tokens by coupled first, or greedy decoding"
        )
    speculative = config.speculative_config
    if not isinstance(speculative, MTPDecodingConfig):
        return
    label = label_of(
        DecodingOptions.read(speculative, defer_thinking_end=True), params.requested_options()
    )
    if label is not None:
        raise ConfigError(
            f"{command}: {label.name} acceptance changes the text by design; expected a config or "
            "a request with strict acceptance"
        )


def _expect_comparable(config: LLMConfig, params: SamplingParams, dtype: torch.dtype) -> None:
    """Check that rounding cannot change the truncation of processed log-probabilities.

    Raises:
        ConfigError: it may: the options truncate, and the dtype is not float32.
    """
    cuts = [name for name in ("top_k", "top_p", "min_p") if name in params.requested_options()]
    is_processed = params.logprobs is not None and logprobs_mode_of(config) == "processed"
    if is_processed and cuts and dtype is not torch.float32:
        raise ConfigError(
            f"parity: logprobs={params.logprobs} of what {cuts[0]} leaves: expected float32, got "
            f"{str(dtype).removeprefix('torch.')}, whose rounding may move the cut"
        )


def thinking_of(config: LLMConfig, tokenizer: Tokenizer | None) -> Thinking | None:
    """Return the thinking tags for thinking budgets; None if they are unknown.

    Raises:
        ConfigError: see `resolve_thinking_end`.
    """
    has_ids = tokenizer is not None
    encode_text = partial(encode, tokenizer, add_special_tokens=False) if has_ids else None
    end = resolve_thinking_end(config.speculative_config, encode_text)
    if end is None:
        return None
    return Thinking(end.begin, end.end, None if end.end_token == NO_TOKEN else end.end_token)


def logprobs_mode_of(config: LLMConfig) -> LogprobsMode:
    """Return whether log-probabilities of output tokens are raw or processed."""
    speculative = config.speculative_config
    return speculative.mtp.logprobs_mode if isinstance(speculative, MTPDecodingConfig) else "raw"


def resampling_method(config: LLMConfig, params: SamplingParams) -> str | None:
    """Return the verification method if it changes sampled output (not its distribution), else
    None."""
    speculative = config.speculative_config
    if params.is_greedy or not isinstance(speculative, MTPDecodingConfig):
        return None
    presumed = params.verification or speculative.mtp.verifications[0]
    method = METHODS.get(presumed)  # None: a registered one, which `label_of` covers
    return None if method is None or method.keeps_output else presumed


def make_prompts(
    texts: Sequence[str], tokenizer: Any, vocab_size: int, count: int | None, seed: int
) -> list[list[int]]:
    """Return prompts as token ids: the texts and random parts of them, or random ids."""
    rng = random.Random(seed)
    if tokenizer is None or not texts:
        return [
            [rng.randrange(vocab_size) for _ in range(rng.randint(1, LONGEST_RANDOM_PROMPT))]
            for _ in range(count or RANDOM_PROMPTS)
        ]
    whole = [encode(tokenizer, text) for text in texts]
    prompts = whole[:count]
    while count is not None and len(prompts) < count:
        ids = rng.choice(whole)
        end = rng.randint(1, len(ids))
        prompts.append(ids[rng.randrange(end) : end])
    return prompts
