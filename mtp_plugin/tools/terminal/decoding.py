"""Run a batch on an executor, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from mtp_plugin.errors import ExecutorError
from mtp_plugin.hosts.embedded import LLM, LlmRequest, SamplingParams, StepEvent
from mtp_plugin.requests.logprobs import TokenLogprobs
from mtp_plugin.requests.pacing import paced
from mtp_plugin.requests.prompts import Prompt, place_of
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats

WARM_UP_TOKENS = 4

OnStep = Callable[[list[tuple[int, StepEvent]]], None]
"""Called with a step's events, each with the number of its prompt, counted from 0."""


@dataclass(frozen=True)
class PromptResult:
    """Result of one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    acceptance: AcceptanceStats
    number: int = 0
    """Request number; determines the seed if the request has none."""
    logprobs: list[TokenLogprobs] | None = None
    """Of every output token; None: not requested."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Of every prompt token (None for the first); None: not requested."""


@dataclass(frozen=True)
class BatchRun:
    """Results of a finished batch."""

    results: list[PromptResult]
    params: SamplingParams
    """The options as admitted by the executor, with bad words as token ids."""
    num_steps: int
    """Forward passes of the target, prompts included."""
    seconds: float
    """Time of the steps, without the display."""
    num_preemptions: int = 0
    """Number of preempted requests."""

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


class TokenLines:
    """An `OnStep` that reports the number of output tokens every few seconds.

    Args:
        report: called with a line of text.
        what: how the line begins.
    """

    def __init__(self, report: Callable[[str], None], what: str) -> None:
        self._report = paced(report)
        self._what = what
        self._num_tokens = 0

    def __call__(self, events: list[tuple[int, StepEvent]]) -> None:
        self._num_tokens += sum(len(event.token_ids) for _, event in events)
        self._report(f"{self._what}: {self._num_tokens} tokens")


def run_batch(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    on_step: OnStep | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> BatchRun:
    """Decode prompts as one batch, after a few untimed warm-up steps.

    Args:
        report: called with a line before the warm-up, which may compile kernels.

    Raises:
        RequestError: a prompt or an option is not supported; nothing was started.
        ExecutorError: a request failed.
    """
    requests = llm.make_requests(prompts, [params] * len(prompts))
    report("warming up")
    few = SamplingParams(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
    llm.generate(requests[0].get_tokens()[:WARM_UP_TOKENS], few)

    return run_requests(llm, requests, on_step)


def run_requests(
    llm: LLM, requests: Sequence[LlmRequest], on_step: OnStep | None = None
) -> BatchRun:
    """Decode requests as one batch.

    Raises:
        ExecutorError: a request failed.
    """
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
        [decoded(r, place_of(n, len(requests))) for n, r in enumerate(requests, 1)],
        requests[0].params,
        llm.executor.num_steps - steps_before,
        seconds,
        llm.executor.num_preemptions - preemptions_before,
    )


def decoded(request: LlmRequest, place: str) -> PromptResult:
    """Return the result of a finished request; ``place`` names it in an error.

    Raises:
        ExecutorError: it failed.
    """
    reason = request.finish_reason
    if reason is None or reason is FinishReason.ERROR:
        raise ExecutorError(
            f"{place} failed after {len(request.output_token_ids)} tokens: {request.error}"
        )
    length = request.py_orig_prompt_len
    return PromptResult(
        prompt_token_ids=request.get_tokens()[:length],
        token_ids=request.output_token_ids,
        text="" if request.text is None else request.text.full_text,
        finish_reason=reason,
        acceptance=request.py_acceptance,
        number=request.facts.number,
        logprobs=None if request.logprobs is None else list(request.logprobs),
        prompt_logprobs=None if request.prompt_logprobs is None else list(request.prompt_logprobs),
    )


def merged(results: Sequence[PromptResult]) -> AcceptanceStats:
    """Return the sum of the acceptance statistics."""
    total = AcceptanceStats(results[0].acceptance.max_draft_len)
    for result in results:
        total.merge(result.acceptance)
    return total
