"""Runs a batch four ways: as configured, without drafts, and, through none of the executor, by
target-only decoding and with drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

from mtp_plugin.config import LLMConfig, MTPDecodingConfig
from mtp_plugin.errors import ExecutorError
from mtp_plugin.executor import LLM, LlmRequest, SamplingParams, StepEvent
from mtp_plugin.executor.models import LoadedModel
from mtp_plugin.infer import Continuation, SamplingRule, Thinking
from mtp_plugin.requests.detokenizer import Tokenizer
from mtp_plugin.requests.prompts import Prompt, place_of
from mtp_plugin.requests.seeds import ENGINE_SEED
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.thinking import NO_TOKEN, resolve_thinking_end
from mtp_plugin.requests.tokenizer import encode
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools.parity import (
    TIE_ULPS,
    Drafting,
    Oracle,
    TieRule,
    compare_with_continuations,
    judge_gap,
    speculate,
)
from mtp_plugin.tools.parity import Comparison as Verdict

WARM_UP_TOKENS = 4
PIECE = 16
"""Tokens that target-only decoding goes on by behind a tie, before it looks whether they agree."""

PLAINLY_SPECULATED = 4
"""Prompts that are decoded with drafts a second time, one by one."""

REDRAWING = ("rejection", "block")
"""Verifications that keep the distribution, and not the text of a seed."""

OnStep = Callable[[list[tuple[int, StepEvent]]], None]
"""Called with a step's events, each with the number of its prompt, counted from 0."""


@dataclass(frozen=True)
class Decoded:
    """One prompt's result."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    acceptance: AcceptanceStats
    number: int = 0
    """Of the request; decides its draws where it has no seed."""


@dataclass(frozen=True)
class BatchRun:
    """A batch that ran to its end."""

    results: list[Decoded]
    num_steps: int
    """Forward passes of the target, prompts included."""
    seconds: float
    """Spent in those, without what the display took."""
    num_preemptions: int = 0
    """Requests that had to start over."""

    @property
    def num_tokens(self) -> int:
        """Emitted tokens of all prompts."""
        return sum(len(result.token_ids) for result in self.results)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> AcceptanceStats:
        """Counts of all prompts."""
        return merged(self.results)


def run_batch(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, on_step: OnStep | None = None
) -> BatchRun:
    """Decode prompts as one batch, after a few untimed steps that warm the model up.

    Raises:
        RequestError: a prompt or an option that cannot be served; nothing was started.
        ExecutorError: a request failed.
    """
    requests = llm.make_requests(prompts, [params] * len(prompts))
    few = SamplingParams(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
    llm.generate(requests[0].get_tokens()[:WARM_UP_TOKENS], few)

    steps_before, preemptions_before = llm.executor.num_steps, llm.executor.num_preemptions
    numbers = {request.request_id: number for number, request in enumerate(requests)}
    for request in requests:
        llm.executor.enqueue(request)
    seconds = 0.0
    while llm.executor.has_work:
        start = perf_counter()
        events = llm.executor.step()
        seconds += perf_counter() - start
        if events and on_step is not None:
            on_step([(numbers[event.request_id], event) for event in events])
    return BatchRun(
        [_decoded(r, place_of(n, len(requests))) for n, r in enumerate(requests, 1)],
        llm.executor.num_steps - steps_before,
        seconds,
        llm.executor.num_preemptions - preemptions_before,
    )


def _decoded(request: LlmRequest, place: str) -> Decoded:
    reason = request.finish_reason
    if reason is None or reason is FinishReason.ERROR:
        raise ExecutorError(
            f"{place} failed after {len(request.output_token_ids)} tokens: {request.error}"
        )
    length = request.py_orig_prompt_len
    return Decoded(
        prompt_token_ids=request.get_tokens()[:length],
        token_ids=request.output_token_ids,
        text="" if request.text is None else request.text.full_text,
        finish_reason=reason,
        acceptance=request.py_acceptance,
        number=request.facts.number,
    )


def engine_seed_of(config: LLMConfig) -> int:
    """That requests without a seed draw with."""
    speculative = config.speculative_config
    return speculative.mtp.seed if isinstance(speculative, MTPDecodingConfig) else ENGINE_SEED


def thinking_of(config: LLMConfig, tokenizer: Tokenizer | None) -> Thinking | None:
    """The ids that budgets of thinking go by; None: nothing says them.

    Raises:
        ConfigError: see `resolve_thinking_end`.
    """
    has_ids = tokenizer is not None
    told = partial(encode, tokenizer, add_special_tokens=False) if has_ids else None
    end = resolve_thinking_end(config.speculative_config, told)
    if end is None:
        return None
    return Thinking(end.begin, end.end, None if end.end_token == NO_TOKEN else end.end_token)


def redraws(config: LLMConfig, params: SamplingParams) -> str | None:
    """The verification under which a drawn text is another than the target's own, as likely one;
    None: it is the target's own."""
    speculative = config.speculative_config
    if params.is_greedy or not isinstance(speculative, MTPDecodingConfig):
        return None
    presumed = params.verification or speculative.mtp.verifications[0]
    return presumed if presumed in REDRAWING else None


# --- the comparison with target-only decoding ---


@dataclass(frozen=True)
class Difference:
    """The first token of a prompt that target-only decoding did not choose."""

    prompt: int
    """Counted from 1."""
    position: int
    """Of the emitted token, counted from 1."""
    token: int | None
    """What was emitted; None: the text had ended."""
    expected: int | None
    """What target-only decoding chose; None: it had ended."""


@dataclass(frozen=True)
class Comparison:
    """A batch beside target-only decoding of the same prompts."""

    differences: list[Difference]
    num_tokens: int
    """Compared tokens."""
    num_equal: int
    """Those before the first difference of their prompt."""
    num_ties: int
    """Tokens that differ by no more than half precision rounds; decoding went on from them."""


def compare_with_target_only_decoding(
    model: LoadedModel,
    results: Sequence[Decoded],
    params: SamplingParams,
    *,
    max_seq_len: int,
    tokenizer: Tokenizer | None,
    engine_seed: int = ENGINE_SEED,
    known: dict[tuple[int, ...], list[int]] | None = None,
    thinking: Thinking | None = None,
) -> Comparison:
    """Decode every prompt with the target alone, through none of the executor, and compare.

    The model must run with an attention of transformers' own.

    Args:
        known: see :func:`verdicts_of_target_only_decoding`.
        thinking: its ids, which a budget goes by.
    """
    verdicts = verdicts_of_target_only_decoding(
        model,
        results,
        params,
        max_seq_len=max_seq_len,
        tokenizer=tokenizer,
        engine_seed=engine_seed,
        known=known,
        thinking=thinking,
    )
    found = [(number, verdict.difference) for number, verdict in enumerate(verdicts, 1)]
    return Comparison(
        [
            Difference(number, other.position + 1, other.token, other.expected)
            for number, other in found
            if other is not None
        ],
        num_tokens=sum(len(result.token_ids) for result in results),
        num_equal=sum(verdict.num_equal for verdict in verdicts),
        num_ties=sum(len(verdict.ties) for verdict in verdicts),
    )


def verdicts_of_target_only_decoding(
    model: LoadedModel,
    results: Sequence[Decoded],
    params: SamplingParams,
    *,
    max_seq_len: int,
    tokenizer: Tokenizer | None,
    tie_ulps: float = TIE_ULPS,
    engine_seed: int = ENGINE_SEED,
    known: dict[tuple[int, ...], list[int]] | None = None,
    thinking: Thinking | None = None,
) -> list[Verdict]:
    """What target-only decoding says of each result; see :func:`compare_with_target_only_decoding`.

    Args:
        engine_seed: that requests without a seed drew with.
        known: target-only decoding of whole prompts, kept between calls with the same params and
            seed of the engine.
    """
    oracle = Oracle(model)
    rule = TieRule(oracle.dtype, tie_ulps)
    verdicts = []
    for result in results:
        limit = min(params.max_new_tokens, max_seq_len - len(result.prompt_token_ids))
        sampling = SamplingRule(
            params,
            result.prompt_token_ids,
            number=result.number,
            end_ids=oracle.end_ids,
            engine_seed=engine_seed,
            thinking=thinking,
        )
        plain = _TargetOnlyDecoding(oracle, result, sampling, limit, tokenizer, engine_seed, known)
        judge = judge_gap(oracle, rule, sampling, result.token_ids)
        verdicts.append(compare_with_continuations(result.token_ids, plain.continue_from, judge))
    return verdicts


class _TargetOnlyDecoding:
    """What target-only decoding makes of one result's prompt."""

    def __init__(
        self,
        oracle: Oracle,
        result: Decoded,
        sampling: SamplingRule,
        limit: int,
        tokenizer: Tokenizer | None,
        engine_seed: int,
        known: dict[tuple[int, ...], list[int]] | None,
    ) -> None:
        self._result = result
        self._limit = limit
        self._known = known
        self._continue = partial(
            oracle.continuation,
            params=sampling.params,
            number=result.number,
            engine_seed=engine_seed,
            tokenizer=tokenizer,
            thinking=sampling.thinking,
        )

    def continue_from(self, emitted: list[int]) -> list[int]:
        """``emitted`` and what target-only decoding adds, up to where the text has to end."""
        prompt, result = self._result.prompt_token_ids, self._result.token_ids
        if not emitted:
            return self._whole()
        # behind a tie piece by piece, since another one soon makes the rest worthless
        tokens = emitted
        while True:
            upto = min(len(tokens) + PIECE, self._limit)
            tokens = self._continue(prompt, tokens, upto)
            if len(tokens) < upto or upto == self._limit or tokens != result[: len(tokens)]:
                return tokens

    def _whole(self) -> list[int]:
        prompt = self._result.prompt_token_ids
        key = (self._result.number, *prompt)
        known = {} if self._known is None else self._known
        if key not in known:
            known[key] = self._continue(prompt, [], self._limit)
        return known[key]


# --- the comparison with speculative decoding ---


@dataclass(frozen=True)
class PlainRun:
    """The first prompts, drafted for and verified once more, through none of the executor."""

    results: list[Decoded]
    comparison: Comparison | None
    """With target-only decoding; None: drawn texts of their own, as those of the executor."""


def run_plainly(
    model: LoadedModel,
    results: Sequence[Decoded],
    params: SamplingParams,
    drafting: Drafting,
    *,
    known: dict[tuple[int, ...], list[int]],
    **of_all: Any,
) -> PlainRun:
    """Decode as :func:`speculate_plainly`, and compare as
    :func:`compare_with_target_only_decoding` where texts have to be its own."""
    alike = speculate_plainly(model, results, params, drafting, **of_all)
    if drafting.redraws:
        return PlainRun(alike, None)
    found = compare_with_target_only_decoding(model, alike, params, known=known, **of_all)
    return PlainRun(alike, found)


def speculate_plainly(
    model: LoadedModel,
    results: Sequence[Decoded],
    params: SamplingParams,
    drafting: Drafting,
    *,
    max_seq_len: int,
    tokenizer: Tokenizer | None,
    engine_seed: int = ENGINE_SEED,
    thinking: Thinking | None = None,
) -> list[Decoded]:
    """Decode the first of these prompts once more with drafts, through none of the executor, at its
    plainest; see :func:`compare_with_target_only_decoding`.

    Args:
        drafting: as the executor drafted for them.
    """
    end_ids = Oracle(model).end_ids
    found = []
    for result in results[:PLAINLY_SPECULATED]:
        text = Continuation(
            result.prompt_token_ids,
            params,
            number=result.number,
            end_ids=end_ids,
            thinking=thinking,
            max_seq_len=max_seq_len,
            tokenizer=tokenizer,
            engine_seed=engine_seed,
        )
        ran = speculate(model, text, drafting)
        stats = AcceptanceStats(drafting.num_drafts)
        for emitted in ran.emitted[1:]:  # behind the step that read the prompt
            stats.record(emitted, drafting.num_drafts)
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


def merged(results: Sequence[Decoded]) -> AcceptanceStats:
    """Counts of all prompts."""
    total = AcceptanceStats(results[0].acceptance.max_draft_len)
    for result in results:
        total.merge(result.acceptance)
    return total
