"""Compare what an executor decoded with the reference, `mtp_plugin.infer`: output tokens up to
rounding ties, log-probabilities, and drafts that are made again without the executor."""

from __future__ import annotations

import math
import platform
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from time import perf_counter
from typing import Any, NamedTuple

import torch

from mtp_plugin import __version__
from mtp_plugin.config import LLMConfig, MTPDecodingConfig
from mtp_plugin.config.draft_vocab import add_draft_ids, resolve_draft_vocab
from mtp_plugin.errors import ExecutorError
from mtp_plugin.hosts.embedded import LLM, LlmRequest, StepEvent
from mtp_plugin.hosts.embedded.models import LoadedModel
from mtp_plugin.infer import (
    Continuation,
    MTPDrafter,
    MTPTarget,
    Role,
    SamplingRule,
    Thinking,
    coupled,
    decode,
    rejection,
    speculative_decode,
)
from mtp_plugin.infer.logprobs import raw_logprobs, usable
from mtp_plugin.infer.speculation import Verify
from mtp_plugin.requests.detokenizer import Tokenizer
from mtp_plugin.requests.logprobs import TokenLogprobs
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.pacing import paced
from mtp_plugin.requests.prompts import place_of
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.requests.thinking import NO_TOKEN, resolve_thinking_end
from mtp_plugin.requests.tokenizer import encode
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats, num_decided_drafts
from mtp_plugin.speculative.verification import label_of
from mtp_plugin.verifications import METHODS

TIE_ULPS = 4.0
"""Another order of additions may change each of two logits by two units in the last place: half a
unit by its own rounding, the rest by the rounding of the hidden states."""
SAMPLED_GAP, LOGPROB_GAP = 1e-5, 1e-4
"""Ties in float32 too: gaps of noisy scores, as logarithms of the noise differ by device, and of
log-probabilities, as the order of additions differs."""
REPEATED_PROMPTS = 4
"""Number of prompts that are decoded again with drafts, one by one."""
RANDOM_PROMPTS, LONGEST_RANDOM_PROMPT = 8, 48

Report = Callable[[str], None]
OnStep = Callable[[list[tuple[int, StepEvent]]], None]
"""Called with a step's events, each with the number of its prompt, counted from 0."""
KnownTexts = dict[tuple[int, ...], list[int]]
"""Outputs of target-only decoding by (request number, prompt ids)."""


# --- what an executor decodes ---


@dataclass(frozen=True)
class PromptResult:
    """Result of one prompt; ``number`` is the request's, on which the default seed depends."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    acceptance: AcceptanceStats
    number: int = 0
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None


@dataclass(frozen=True)
class BatchRun:
    """Results of a batch; ``params`` as admitted, ``seconds`` of the steps without the display."""

    results: list[PromptResult]
    params: SamplingParams
    num_steps: int
    seconds: float
    num_preemptions: int

    @property
    def num_tokens(self) -> int:
        """Output tokens of all prompts."""
        return sum(len(result.token_ids) for result in self.results)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the whole batch."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> AcceptanceStats:
        """Acceptance statistics of all prompts."""
        return merged(self.results)


def run_requests(
    llm: LLM, requests: Sequence[LlmRequest], on_step: OnStep | None = None
) -> BatchRun:
    """Decode requests as one batch.

    Raises:
        ExecutorError: a request failed.
    """
    executor, seconds = llm.executor, 0.0
    steps, preemptions = executor.num_steps, executor.num_preemptions
    numbers = {request.request_id: number for number, request in enumerate(requests)}
    for request in requests:
        executor.enqueue(request)
    while executor.has_work:
        start = perf_counter()
        events = executor.step()
        seconds += perf_counter() - start
        if events and on_step is not None:
            on_step([(numbers[event.request_id], event) for event in events])
    results = [decoded(each, place_of(n, len(requests))) for n, each in enumerate(requests, 1)]
    steps, preemptions = executor.num_steps - steps, executor.num_preemptions - preemptions
    return BatchRun(results, requests[0].params, steps, seconds, preemptions)


def decoded(request: LlmRequest, place: str) -> PromptResult:
    """Return the result of a finished request; ``place`` names it in an error.

    Raises:
        ExecutorError: it failed.
    """
    reason, tokens = request.finish_reason, request.output_token_ids
    if reason is None or reason is FinishReason.ERROR:
        raise ExecutorError(f"{place} failed after {len(tokens)} tokens: {request.error}")
    prompt = request.get_tokens()[: request.py_orig_prompt_len]
    text = "" if request.text is None else request.text.full_text
    return PromptResult(
        prompt,
        tokens,
        text,
        reason,
        request.py_acceptance,
        request.facts.number,
        None if request.logprobs is None else list(request.logprobs),
        None if request.prompt_logprobs is None else list(request.prompt_logprobs),
    )


def merged(results: Sequence[PromptResult]) -> AcceptanceStats:
    """Return the sum of the acceptance statistics."""
    total = AcceptanceStats(results[0].acceptance.max_draft_len)
    for result in results:
        total.merge(result.acceptance)
    return total


def make_prompts(
    texts: Sequence[str], tokenizer: Any, vocab_size: int, count: int | None, seed: int
) -> list[list[int]]:
    """Return prompts as token ids: the texts and random parts of them, or random ids."""
    rng = random.Random(seed)
    if tokenizer is None or not texts:
        lengths = (rng.randint(1, LONGEST_RANDOM_PROMPT) for _ in range(count or RANDOM_PROMPTS))
        return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    whole = [encode(tokenizer, text) for text in texts]
    prompts = whole[:count]
    while count is not None and len(prompts) < count:
        ids = rng.choice(whole)
        end = rng.randint(1, len(ids))
        prompts.append(ids[rng.randrange(end) : end])
    return prompts


# --- the reference ---


class Finding(NamedTuple):
    """A token or log-probability that differs from that of target-only decoding."""

    kind: str
    """`TOKEN`, `LOGPROB`, `PROMPT_LOGPROB`, or `DRAFTS` for a token of drafts made again."""
    prompt: int
    """Number of the prompt, from 1."""
    position: int
    """In the output (or prompt), from 1."""
    token: int | None
    """None: the output had ended."""
    expected: int | None
    """The token of target-only decoding; None: it had ended."""
    gap: float | None = None
    """Logit of the expected token minus that of the token, given the same output before them;
    sampled: of their scores (logits divided by the temperature) with noise. None: there are not two
    tokens."""
    tie_tolerance: float = 0.0
    is_tie: bool = False
    """Whether rounding explains the difference."""
    note: str = ""


TOKEN, DRAFTS = "token", "token without the executor"
LOGPROB, PROMPT_LOGPROB = "log-probability", "prompt log-probability"


def ulp(value: float, dtype: torch.dtype) -> float:
    """Return the distance between adjacent numbers of a dtype at a magnitude; 0.0 at infinity."""
    if not math.isfinite(value):
        return 0.0
    facts = torch.finfo(dtype)
    return float(2.0 ** (math.frexp(max(abs(value), facts.tiny))[1] - 1) * facts.eps)


def is_near_draw(
    rule: SamplingRule, row: torch.Tensor, output: Sequence[int], token: int, gap: float
) -> bool:
    """Whether ``token`` may be sampled after ``output`` if each score (logit of the row [V] divided
    by the temperature) is off by at most half of ``gap``.

    Each token with a higher noisy score must lead by at most ``gap``, or may be truncated then.
    """
    scores, params = rule.scaled(row, output), rule.params
    cuts = SamplingParams(top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    truncating = SamplingRule(replace(cuts, temperature=1.0), ())

    def may_be(each: int, *, kept: bool) -> bool:
        # what it may overtake, or what may overtake it, changes sides
        is_up = scores < scores[each] if kept else scores > scores[each] - gap
        is_up[each] = kept
        moved = scores + torch.where(is_up, gap / 2, -gap / 2)
        return bool(truncating.scores(moved, ())[each] > -torch.inf) is kept

    noisy = scores + rule.noise(output, len(scores))
    is_ahead = (rule.scores(row, output) > -torch.inf) & (noisy - noisy[token] > gap)
    others: list[int] = is_ahead.nonzero().flatten().tolist()
    return may_be(token, kept=True) and all(may_be(each, kept=False) for each in others)


def wrong_logprobs(
    reported: TokenLogprobs, values: torch.Tensor, token: int, num_top: int, tolerance: float
) -> dict[int, str]:
    """Compare the entry of a ``token`` with the target's log-probabilities [V].

    Returns:
        What is wrong with a log-probability or its rank, by token id; those within ``tolerance`` of
        each other may have each other's ranks.
    """
    order = values.sort(descending=True, stable=True).indices.tolist()
    wrong: dict[int, str] = {}
    for other, one in reported.items():
        value = float(values[other])
        ahead = int((values > value + 2 * tolerance).sum())
        alike = int((values >= value - 2 * tolerance).sum())
        is_near = math.isclose(one.logprob, value, rel_tol=0, abs_tol=tolerance)
        if not (is_near and ahead < one.rank <= alike):
            wrong[other] = f"{one.logprob:.6g} ({one.rank})"
    ranks = {one.rank for one in reported.values()}
    likely = [other for n, other in enumerate(order[:num_top], 1) if n not in ranks]
    lost = [token, *(each for each in likely if values[each] > -torch.inf)]
    wrong = {**dict.fromkeys((each for each in lost if each not in reported), "nothing"), **wrong}
    return {
        other: f"{got}, expected {float(values[other]):.6g} ({order.index(other) + 1})"
        for other, got in wrong.items()
    }


@contextmanager
def transformers_attention(model: LoadedModel) -> Iterator[None]:
    """Run the model with the attention of transformers, and restore its own on exit."""
    former: Any = model.target.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(former)


class Drafting(NamedTuple):
    """Draft and verification settings that depend on nothing but the request."""

    num_drafts: int
    verify: Verify
    options: dict[str, Any]
    """Of `MTPDrafter`."""


@dataclass(frozen=True)
class Reference:
    """Decodes requests one at a time, without the executor; ``known`` may be shared only with the
    same model, params and engine seed."""

    model: LoadedModel
    params: SamplingParams
    max_seq_len: int
    config: LLMConfig
    """Of the executor, resolved."""
    tokenizer: Tokenizer | None = None
    tie_ulps: float = TIE_ULPS
    known: KnownTexts = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and logits."""
        return next(self.model.lm_head.parameters()).dtype

    def compare(
        self, results: Sequence[PromptResult], report: Report = lambda _: None, kind: str = TOKEN
    ) -> tuple[int, list[Finding]]:
        """Compare each output with target-only decoding; after a tie that goes on from the output.

        Args:
            report: called with lines about progress.

        Returns:
            The number of tokens before the first differences that are no ties; ties, differences.
        """
        report, num_equal, found = paced(report), 0, list[Finding]()
        for number, result in enumerate(results, 1):
            what = f"decoding without the executor: {place_of(number, len(results))}"
            tokens, start = result.token_ids, 0
            while True:
                expected = self._continued(result, start, partial(_report, report, what))
                both = range(start, max(len(tokens), len(expected)))
                at = next((n for n in both if tokens[n : n + 1] != expected[n : n + 1]), None)
                if at is not None:
                    found.append(self.measure(result, expected, at, kind, number))
                    start = at + 1
                if at is None or not found[-1].is_tie:
                    num_equal += len(tokens) if at is None else at
                    break
        return num_equal, found

    def compare_logprobs(self, results: Sequence[PromptResult]) -> tuple[int, list[Finding]]:
        """Compare log-probabilities with the target's, each prompt and output in one forward pass;
        return also the number of compared ones."""
        count, found, params = 0, list[Finding](), self.params
        is_processed = logprobs_mode_of(self.config) == "processed"
        for number, result in enumerate(results, 1):
            prompt, rule = result.prompt_token_ids, self._rule(result)
            for kind, entries, before, ids, num_top in (
                (PROMPT_LOGPROB, result.prompt_logprobs, [], prompt, params.prompt_logprobs),
                (LOGPROB, result.logprobs, prompt, result.token_ids, params.logprobs),
            ):
                first = int(kind == PROMPT_LOGPROB)  # the first token of a prompt has none
                if entries is None or len(ids) <= first:
                    continue
                rows = self._logits([*before, *ids][:-1], len(ids) - first)
                for n, row in enumerate(rows, first):
                    values, logits, temperature = row, usable(row), 1.0
                    if is_processed and kind == LOGPROB:
                        values, logits = rule.scores(row, ids[:n]), rule.edited(row, ids[:n])
                        temperature = 1.0 if rule.is_greedy else rule.temperature
                    largest = float(logits.abs().nan_to_num(posinf=0.0).max())
                    tolerance = self._tolerance(largest, temperature, LOGPROB_GAP)
                    entry = (entries[n] if n < len(entries) else None) or {}
                    count += len(entry)
                    values = raw_logprobs(values)
                    wrong = wrong_logprobs(entry, values, ids[n], num_top or 0, tolerance)
                    found += [
                        Finding(kind, number, n + 1, token, token, None, tolerance, note=note)
                        for token, note in wrong.items()
                    ]
        return count, found

    def with_drafts(
        self, results: Sequence[PromptResult], drafting: Drafting
    ) -> list[PromptResult]:
        """Decode the first prompts with the executor's draft settings."""
        found, (num_drafts, verify, options) = [], drafting
        with transformers_attention(self.model):
            for result in results[:REPEATED_PROMPTS]:
                text = Continuation(result.prompt_token_ids, **self._options(result))
                target = MTPTarget(self.model)
                drafter = MTPDrafter(self.model, target, **options)
                ran = speculative_decode(
                    target, drafter, text, num_drafts=num_drafts, verify=verify
                )
                stats = AcceptanceStats(num_drafts)
                steps = list(zip(ran.emitted, ran.drafted, strict=True))
                for n, (emitted, drafted) in enumerate(steps[1:], 2):  # after the prefill
                    decided = num_decided_drafts(emitted, drafted, ends=n == len(steps))
                    stats.record(emitted, decided)
                tokens = ran.decoded.token_ids
                found.append(replace(result, token_ids=tokens, acceptance=stats))
        return found

    def drafting(self) -> Drafting | str:
        """Return the executor's draft settings, or why they cannot be reproduced.

        Raises:
            ConfigError: the draft vocabulary does not fit the model.
        """
        config = self.config.speculative_config
        if not isinstance(config, MTPDecodingConfig):
            return "no MTP layer drafts"
        params, mtp, facts = self.params, config.mtp, self.model.facts
        options = DecodingOptions.read(config, defer_thinking_end=True)
        label = label_of(options, params.requested_options())
        verification = params.verification or mtp.verifications[0]
        known: dict[str, Verify] = {"coupled": coupled, "rejection": rejection}
        verify = coupled if params.is_greedy else known.get(verification)
        if label is not None or verify is None:
            what = f"{verification} verification" if label is None else f"{label.name} acceptance"
            return f"{what} is not known without the executor"
        is_vanilla, chain = config.use_mtp_vanilla, mtp.chain or self.model.traits.chain
        if (
            config.draft_len_schedule
            or config.max_concurrency
            or config.acceptance_window
            or mtp.adaptive_draft_len
            or (is_vanilla and (chain == "target_shift" or mtp.draft_window != "exact"))
        ):
            return "drafts or their number depend on more than the text"
        ids = resolve_draft_vocab(mtp.draft_vocab, facts.vocab_size)
        if ids is not None:
            tags = thinking_of(self.config, self.tokenizer)
            more = () if tags is None else (tags.begin, *tags.end, tags.end_token)
            always = (*facts.eos_token_ids, *(each for each in more if each is not None))
            ids = add_draft_ids(ids, always, facts.vocab_size)
        roles = {"coupled": Role.TARGET, "plain": Role.DRAFT, "greedy": None}
        role = roles[params.draft_sampling or mtp.drafts_of(verification)]
        of_drafter = {"is_vanilla": is_vanilla, "chain": chain, "role": role, "vocab_ids": ids}
        return Drafting(config.draft_len, verify, of_drafter)

    def measure(
        self,
        result: PromptResult,
        expected: Sequence[int],
        at: int,
        kind: str = TOKEN,
        number: int = 1,
    ) -> Finding:
        """Return how an output differs from expected tokens at a position, counted from 0."""
        both, output, rule = (result.token_ids, expected), result.token_ids[:at], self._rule(result)
        ours, theirs = (each[at] if at < len(each) else None for each in both)
        if ours is None or theirs is None:
            return Finding(kind, number, at + 1, ours, theirs)
        row = self._logits([*result.prompt_token_ids, *output], 1)[0]
        values, what = rule.edited(row, output), "logits"
        highest = float(values[[ours, theirs]].max())
        tolerance = 0.0 if self.dtype is torch.float32 else self._tolerance(highest)
        if not rule.is_greedy:
            least = SAMPLED_GAP if self.tie_ulps else 0.0
            tolerance, what = self._tolerance(highest, rule.temperature, least), "scores"
            values = rule.scaled(row, output) + rule.noise(output, len(row))
        gap = float(values[theirs] - values[ours])
        is_tie = tolerance > 0 and (
            abs(gap) <= tolerance
            if rule.is_greedy
            else is_near_draw(rule, row, output, ours, tolerance)
        )
        note = f"{what} {abs(gap):.4g} apart"
        note += f" where {tolerance:.4g} is a tie" if tolerance else ""
        return Finding(kind, number, at + 1, ours, theirs, gap, tolerance, is_tie, note)

    def _tolerance(self, logit: float, temperature: float = 1.0, least: float = 0.0) -> float:
        return max(self.tie_ulps * ulp(logit, self.dtype) / temperature, least)

    def _options(self, result: PromptResult) -> dict[str, Any]:
        """Return the arguments of `Continuation` after the prompt."""
        return {
            "params": replace(self.params, logprobs=None, prompt_logprobs=None, logprobs_mode=None),
            "number": result.number,
            "end_ids": self.model.facts.eos_token_ids,
            "engine_seed": self.config.engine_seed,
            "thinking": thinking_of(self.config, self.tokenizer),
            "tokenizer": self.tokenizer,
            "max_seq_len": self.max_seq_len,
        }

    def _rule(self, result: PromptResult) -> SamplingRule:
        return Continuation(result.prompt_token_ids, **self._options(result)).rule

    @torch.inference_mode()
    def _logits(self, token_ids: Sequence[int], num_rows: int) -> torch.Tensor:
        """Return the logits [num_rows, V] float32 of the last ``num_rows`` tokens."""
        target: Any = self.model.target
        ids = torch.tensor([list(token_ids)], device=next(target.parameters()).device)
        with transformers_attention(self.model):
            states = target.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        # the unfused head, as in decoding
        logits: torch.Tensor = target.get_output_embeddings()(states[0, -num_rows:])
        return logits.float()

    def _continued(
        self, result: PromptResult, start: int, on_token: Callable[[int], None]
    ) -> list[int]:
        """Return the first ``start`` output tokens, continued by target-only decoding."""
        prompt, emitted = result.prompt_token_ids, result.token_ids[:start]
        key = (result.number, *prompt)
        if start or key not in self.known:
            options = {**self._options(result), "emitted": emitted, "on_token": on_token}
            with transformers_attention(self.model):
                tokens = decode(self.model.target, prompt, **options).token_ids
            if start:
                return tokens
            self.known[key] = tokens
        return self.known[key]


def _report(report: Report, what: str, count: int) -> None:
    report(f"{what}, {count} tokens")


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


def logprobs_mode_of(config: LLMConfig) -> str:
    """Return whether log-probabilities of output tokens are ``raw`` or ``processed``."""
    speculative = config.speculative_config
    return speculative.mtp.logprobs_mode if isinstance(speculative, MTPDecodingConfig) else "raw"


# --- everything about a run ---


class Checked(NamedTuple):
    """A run of an executor, compared with the reference."""

    config: LLMConfig
    device: str
    dtype: str
    run: BatchRun
    num_equal: int | None
    """Output tokens up to the first differences; None: not requested, or sampled outputs differ by
    design."""
    num_logprobs: int | None
    """Number of compared log-probabilities; None: not requested, or rounding may change them."""
    again: list[PromptResult] | None
    """The first prompts with the same drafts, without the executor; None: not requested, or the
    drafts depend on more than the request."""
    found: list[Finding]

    @property
    def is_promised(self) -> bool:
        """Whether the output is the target's own; a verification method may label it."""
        return self.run.acceptance.label is None

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs that was compared and is promised to be equal."""
        return not self.is_promised or all(each.is_tie for each in self.found)

    def only(self, *kinds: str, is_tie: bool = False) -> list[Finding]:
        """Return the differences, or the ties, of these kinds."""
        return [each for each in self.found if each.kind in kinds and each.is_tie is is_tie]


def check(
    reference: Reference,
    run: BatchRun,
    *,
    outputs: bool,
    drafts: bool,
    report: Report,
    note: Report,
) -> Checked:
    """Compare outputs with their log-probabilities, and drafts, each if requested and possible.

    Args:
        report: called with lines about progress.
        note: called with lines about what is not compared.
    """
    params, num_equal, num_logprobs, again, found = run.params, None, None, None, list[Finding]()
    config, given, resampling = reference.config, params.requested_options(), None
    speculative = config.speculative_config
    if isinstance(speculative, MTPDecodingConfig) and not params.is_greedy:
        presumed = params.verification or speculative.mtp.verifications[0]
        method = METHODS.get(presumed)  # None: a registered one, which has a label
        resampling = None if method is None or method.keeps_output else presumed
    drafting = reference.drafting() if drafts else ""
    if isinstance(drafting, Drafting) and drafting.verify is not coupled and run.num_preemptions:
        drafting = f"preempted {run.num_preemptions} times, after which {resampling} samples anew"
    if outputs and resampling is not None:
        is_alike = isinstance(drafting, Drafting)
        what = "compared with the same drafts alone" if is_alike else "not compared"
        note(f"{what}: {resampling} verification samples other outputs")
    elif outputs:
        report("decoding without the executor")
        num_equal, found = reference.compare(run.results, report)
    if outputs and given.keys() & {"logprobs", "prompt_logprobs"}:
        cuts = [name for name in ("top_k", "top_p", "min_p") if name in given]
        is_cut = params.logprobs is not None and logprobs_mode_of(config) == "processed" and cuts
        if is_cut and reference.dtype is not torch.float32:
            note(f"log-probabilities not compared: outside float32, rounding moves {cuts[0]}'s cut")
        else:
            num_logprobs, wrong = reference.compare_logprobs(run.results)
            found += wrong
    if isinstance(drafting, Drafting):
        report("decoding with the same drafts, without the executor")
        try:
            again = reference.with_drafts(run.results, drafting)
            if drafting.verify is coupled:
                found += reference.compare(again, report, DRAFTS)[1]
        except torch.OutOfMemoryError:
            note("not decoded again: out of memory")
    elif drafting:
        note(f"not decoded again: {drafting}")
    head = next(reference.model.lm_head.parameters())
    device, name = str(head.device), str(head.dtype).removeprefix("torch.")
    return Checked(config, device, name, run, num_equal, num_logprobs, again, found)


def reshaped(
    config: LLMConfig, *, k: int | None = None, batch: int | None = None, dtype: str | None = None
) -> LLMConfig:
    """Return a config with another draft length (0: no drafts), batch size or dtype.

    Raises:
        ConfigError: a value is not possible.
    """
    values, size = config.model_dump(), config.max_batch_size if batch is None else batch
    if k is not None:
        speculative = values["speculative_config"] or {"decoding_type": "MTP"}
        speculative |= {"max_draft_len": k, "draft_len_schedule": None}
        values["speculative_config"] = speculative if k else None
    graphs = values["cuda_graph_config"]
    if graphs is not None and size != config.max_batch_size:
        graphs |= {"batch_sizes": None, "max_batch_size": None}
    drafts = (values["speculative_config"] or {}).get("max_draft_len") or 1
    needed = max(config.max_num_tokens, size * (1 + drafts))
    values |= {"max_batch_size": size, "max_num_tokens": needed, "dtype": dtype or config.dtype}
    return LLMConfig.model_validate(values)


def document(
    kind: str, ran: Mapping[str, Any], identical: bool | None, results: Sequence[Any]
) -> dict[str, Any]:
    """Return the JSON document of a command that compares outputs with the reference.

    Args:
        ran: what ran: model, device, options.
        identical: whether all outputs are equal; None: not compared, or not promised.
    """
    found = {name: version(name) for name in ("torch", "transformers")}
    found = {"mtp_plugin": __version__, "python": platform.python_version(), **found}
    return {"kind": kind, "versions": found, **ran, "identical": identical, "results": results}
