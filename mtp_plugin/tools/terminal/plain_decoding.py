"""Decode the prompts of a batch again without the executor: non-speculatively and with drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mtp_plugin.config import LLMConfig, MTPDecodingConfig
from mtp_plugin.hosts.embedded.models import LoadedModel
from mtp_plugin.infer import Continuation, SamplingRule, Thinking
from mtp_plugin.infer.decoding import LogprobsMode
from mtp_plugin.infer.pacing import paced
from mtp_plugin.requests.detokenizer import Tokenizer
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.prompts import place_of
from mtp_plugin.requests.seeds import ENGINE_SEED
from mtp_plugin.requests.thinking import NO_TOKEN, resolve_thinking_end
from mtp_plugin.requests.tokenizer import encode
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats, num_decided_drafts
from mtp_plugin.tools.parity import (
    TIE_ULPS,
    Comparison,
    Drafting,
    LogprobComparison,
    Oracle,
    TieRule,
    compare_logprobs,
    compare_with_continuations,
    measure_gap,
    speculate,
)
from mtp_plugin.tools.terminal.decoding import PromptResult
from mtp_plugin.verifications import METHODS

CHUNK_LEN = 16
"""Number of tokens that the reference decodes after a tie before the next comparison."""

REPEATED_PROMPTS = 4
"""Number of prompts that are decoded again with drafts, one by one."""

KnownTexts = dict[tuple[int, ...], list[int]]
"""Outputs of non-speculative decoding by (request number, prompt ids)."""


@dataclass(frozen=True)
class Difference:
    """The first output token of a prompt that differs from non-speculative decoding."""

    prompt: int
    """Counted from 1."""
    position: int
    """Position in the output, counted from 1."""
    token: int | None
    """The output token; None: the output had ended."""
    expected: int | None
    """The token of non-speculative decoding; None: it had ended."""


@dataclass(frozen=True)
class BatchComparison:
    """A batch compared with non-speculative decoding of the same prompts."""

    differences: list[Difference]
    num_tokens: int
    """Number of compared tokens."""
    num_equal: int
    """Number of tokens before the first difference of their prompt."""
    num_ties: int
    """Number of tokens that differ only by half-precision rounding; the comparison continues from
    them."""


@dataclass(frozen=True)
class PlainRun:
    """The first prompts, decoded again with drafts and without the executor."""

    results: list[PromptResult]
    comparison: BatchComparison | None
    """Comparison with non-speculative decoding; None: sampled outputs differ by design."""


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

    def compare(
        self, results: Sequence[PromptResult], report: Callable[[str], None] = lambda _: None
    ) -> BatchComparison:
        """Compare results with non-speculative decoding.

        Args:
            report: called with lines about progress.
        """
        verdicts = self.verdicts(results, report=report)
        found = [(number, verdict.difference) for number, verdict in enumerate(verdicts, 1)]
        return BatchComparison(
            [
                Difference(number, other.position + 1, other.token, other.expected)
                for number, other in found
                if other is not None
            ],
            num_tokens=sum(len(result.token_ids) for result in results),
            num_equal=sum(verdict.num_equal for verdict in verdicts),
            num_ties=sum(len(verdict.ties) for verdict in verdicts),
        )

    def verdicts(
        self,
        results: Sequence[PromptResult],
        tie_ulps: float = TIE_ULPS,
        report: Callable[[str], None] = lambda _: None,
    ) -> list[Comparison]:
        """Return the comparison of each result with non-speculative decoding."""
        report = paced(report)
        oracle = Oracle(self.model)
        rule = TieRule(oracle.dtype, tie_ulps)
        verdicts = []
        for place, result in enumerate(results, 1):
            measure = measure_gap(oracle, rule, self._rule_of(result, oracle), result.token_ids)
            on_token = partial(_report_tokens, report, place_of(place, len(results)))
            continue_from = partial(self._continue_from, oracle, result, on_token)
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
                self._rule_of(result, oracle),
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
        """Decode the first prompts with drafts.

        Args:
            drafting: the executor's draft settings.
        """
        end_ids = Oracle(self.model).end_ids
        found = []
        for result in results[:REPEATED_PROMPTS]:
            text = Continuation(
                result.prompt_token_ids,
                self._text_params,
                number=result.number,
                end_ids=end_ids,
                thinking=self.thinking,
                max_seq_len=self.max_seq_len,
                tokenizer=self.tokenizer,
                engine_seed=self.engine_seed,
            )
            ran = speculate(self.model, text, drafting)
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

    def run_with_drafts(self, results: Sequence[PromptResult], drafting: Drafting) -> PlainRun:
        """Run :meth:`with_drafts`, and compare unless sampled outputs differ by design."""
        alike = self.with_drafts(results, drafting)
        return PlainRun(alike, None if drafting.changes_output else self.compare(alike))

    # ---- non-speculative decoding ---------------------------------------------------------------

    @property
    def _text_params(self) -> SamplingParams:
        """The options that determine the output."""
        return replace(self.params, logprobs=None, prompt_logprobs=None, logprobs_mode=None)

    def _rule_of(self, result: PromptResult, oracle: Oracle) -> SamplingRule:
        return SamplingRule(
            self.params,
            result.prompt_token_ids,
            number=result.number,
            end_ids=oracle.end_ids,
            engine_seed=self.engine_seed,
            thinking=self.thinking,
        )

    def _continue_from(
        self,
        oracle: Oracle,
        result: PromptResult,
        on_token: Callable[[int], None],
        emitted: list[int],
    ) -> list[int]:
        """Return ``emitted`` continued by non-speculative decoding, up to the length limit."""
        prompt = result.prompt_token_ids
        limit = self.max_seq_len - len(prompt)
        if self.params.max_new_tokens is not None:
            limit = min(self.params.max_new_tokens, limit)
        go_on = partial(
            oracle.continuation,
            prompt,
            params=self._text_params,
            number=result.number,
            engine_seed=self.engine_seed,
            tokenizer=self.tokenizer,
            thinking=self.thinking,
            on_token=on_token,
        )
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


def _report_tokens(report: Callable[[str], None], place: str, count: int) -> None:
    report(f"decoding without the executor: {place}, {count} tokens")


# --- settings of a config ---


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
