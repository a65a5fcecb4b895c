"""Run a batch of equal requests on an executor and time every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from integration.bench.case import BenchmarkError
from mtp_plugin.errors import expect
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.tools.check import PromptResult, decoded


@dataclass(frozen=True)
class Call:
    """One call of the executor."""

    start: float
    """Start time on the host's clock, in seconds."""
    seconds: float
    emitted: list[int]
    """Number of tokens per request that got any."""
    is_steady: bool
    """Whether every request of the batch was generating, and none was near its end."""


@dataclass(frozen=True)
class TimedStep:
    """A step, from its start to that of the next one."""

    seconds: float
    """Including the host's work between two calls of the executor."""
    emitted: list[int]
    is_steady: bool


@dataclass(frozen=True)
class Run:
    """Results of a finished batch."""

    results: list[PromptResult]
    steps: list[TimedStep]
    seconds: float
    first_tokens_seconds: float
    """Time until every request had its first token."""

    @property
    def token_ids(self) -> list[list[int]]:
        """Output tokens of each request."""
        return [result.token_ids for result in self.results]

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(len(tokens) for tokens in self.token_ids)

    @property
    def share_of_repeated_8_grams(self) -> float:
        """Share of repeated 8-grams; drafts of looping outputs are nearly always accepted."""
        grams = [
            [tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)] for tokens in self.token_ids
        ]
        total = sum(len(each) for each in grams)
        return 1 - sum(len(set(each)) for each in grams) / total if total else 0.0

    @property
    def steady(self) -> list[TimedStep]:
        """The steps that only generate."""
        return [step for step in self.steps if step.is_steady]


def steady_tokens(num_tokens: int, step_rows: int) -> int:
    """Return the number of output tokens of ``num_tokens`` up to which steps are whole.

    The running step and the next one must not truncate their drafts.
    """
    return num_tokens - 2 * step_rows


class Batch:
    """Requests of the same length, started together.

    Args:
        llm: an LLM that can run all of them at once.
        prompts: token ids.
        num_tokens: output tokens of each request; EOS tokens are ignored.
        params: options of each request, including the number of tokens; None: all are greedy.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[list[int]],
        num_tokens: int,
        params: Sequence[SamplingParams] | None = None,
    ) -> None:
        if params is None:
            greedy = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
            params = [greedy] * len(prompts)
        self._executor = llm.executor
        self._device = llm.device
        self.requests = llm.make_requests(prompts, params)
        self._emitted = {request.request_id: 0 for request in self.requests}
        self._num_started = 0
        self._most = 0  # largest number of output tokens of a request
        self._longest = steady_tokens(num_tokens, llm.pieces.plan.step_rows)

    def start(self) -> None:
        """Submit the requests."""
        for request in self.requests:
            self._executor.enqueue(request)

    @property
    def is_running(self) -> bool:
        """Whether requests are left."""
        return self._executor.has_work

    @property
    def all_started(self) -> bool:
        """Whether every request has its first token."""
        return self._num_started == len(self.requests)

    @property
    def is_steady(self) -> bool:
        """Whether every request is generating and the next step is whole."""
        return self.all_started and self._most <= self._longest

    def step(self) -> Call:
        """Run one step.

        Raises:
            BenchmarkError: a request failed.
        """
        steady = self.is_steady
        start = perf_counter()
        events = self._executor.step()
        seconds = perf_counter() - start
        emitted = []
        # part of the time of a step, so only the necessary work
        for event in events:
            if event.finish_reason is FinishReason.ERROR:
                raise BenchmarkError(f"request {event.request_id}: {self._error(event.request_id)}")
            count = len(event.token_ids)
            if count:
                before = self._emitted[event.request_id]
                self._num_started += not before
                self._emitted[event.request_id] = before + count
                self._most = max(self._most, before + count)
                emitted.append(count)
        return Call(start, seconds, emitted, steady)

    def _error(self, request_id: int) -> str | None:
        return next(each.error for each in self.requests if each.request_id == request_id)


def run_batch(
    llm: LLM,
    prompts: Sequence[list[int]],
    num_tokens: int,
    *,
    params: Sequence[SamplingParams] | None = None,
) -> Run:
    """Run a batch to its end; ``params`` as for `Batch`.

    Raises:
        BenchmarkError: a request failed or was preempted.
    """
    batch = Batch(llm, prompts, num_tokens, params)
    preemptions = llm.executor.num_preemptions
    synchronize(llm.device)
    calls: list[Call] = []
    first = 0.0
    start = perf_counter()
    batch.start()
    while batch.is_running:
        calls.append(batch.step())
        if not first and batch.all_started:
            first = perf_counter() - start
    synchronize(llm.device)
    end = perf_counter()
    preempted = llm.executor.num_preemptions - preemptions
    expect(
        preempted == 0, BenchmarkError, f"{preempted} requests were preempted: too few KV blocks"
    )
    results = [decoded(request, f"request {n}") for n, request in enumerate(batch.requests, 1)]
    return Run(results, timed_steps(calls, end), end - start, first)


def timed_steps(calls: Sequence[Call], end: float) -> list[TimedStep]:
    """The steps of a run that ended at ``end``, each with the time to the next one."""
    nexts = [*(call.start for call in calls[1:]), end]
    return [
        TimedStep(after - call.start, call.emitted, call.is_steady)
        for call, after in zip(calls, nexts, strict=True)
    ]


def synchronize(device: torch.device) -> None:
    """Wait until a device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
