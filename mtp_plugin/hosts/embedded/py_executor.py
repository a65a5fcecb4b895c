"""The executor loop: schedule, prepare, forward, sample, return results, with optional overlap."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mtp_plugin.errors import (
    ExecutorError,
    PluginError,
    RequestError,
    describe_error,
    format_value,
)
from mtp_plugin.hosts.embedded.model_engine import ModelEngine
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.hosts.embedded.resources import ResourceManagers
from mtp_plugin.hosts.embedded.scheduler import ScheduledRequests, Scheduler
from mtp_plugin.requests.detokenizer import Segment
from mtp_plugin.requests.logprobs import Logprobs, PromptLogprobs
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.speculative.host import Sampler
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats, Label
from mtp_plugin.speculative.step_output import StepResult

KERNEL_POLL_SECONDS = 0.01
"""Pause of a step in which every request waits for kernels that are being compiled."""


class StepEvent(NamedTuple):
    """Result of one step for one request: 0 to K+1 tokens and the newly visible text."""

    request_id: int
    token_ids: list[int]
    segments: list[Segment]
    finish_reason: FinishReason | None
    label: Label | None = None
    """Marks output of verification that is not lossless; None: the target's own output."""
    logprobs: Logprobs | None = None
    """For each of ``token_ids``, a mapping of ids to log-probabilities; None: not requested."""
    prompt_index: int = 0
    """Index of the prompt in its call."""
    prompt_logprobs: PromptLogprobs | None = None
    """In the request's first event, if requested; as in `RequestOutput`."""

    sample_index: int = 0
    """Index among the ``n`` sequences of the prompt."""
    stop_reason: int | str | None = None
    """The id of ``stop_token_ids`` or the stop string that ended the sequence, else None."""
    error: str | None = None
    """Why the sequence ended, if ``finish_reason`` is `FinishReason.ERROR`."""

    @property
    def text(self) -> str:
        """The newly visible text."""
        return "".join(segment.text for segment in self.segments)


@dataclass(frozen=True)
class _Launched:
    """A launched step whose results have not been read yet."""

    batch: ScheduledRequests
    state: Any
    epochs: dict[int, int]


class PyExecutor:
    """Drives a plugin's components in TensorRT-LLM's call order.

    Non-overlap loop: schedule, prepare_resources, forward, sample_async, update request states,
    update_requests, responses, update_resources. Overlap loop: forward(n) is launched before the
    results of step n-1 are read; update_requests(n-1) comes between forward(n) and sample_async(n);
    responses and update_resources(n-1) come after it.
    """

    def __init__(
        self,
        engine: ModelEngine,
        scheduler: Scheduler,
        sampler: Sampler,
        resources: ResourceManagers,
        *,
        overlap: bool,
    ) -> None:
        self.engine = engine
        self.scheduler = scheduler
        self.sampler = sampler
        self.resources = resources
        self.overlap = overlap
        self.acceptance = AcceptanceStats(
            engine.pieces.plan.max_draft_len, label=engine.pieces.label
        )
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = self.num_generation_tokens = 0
        self.num_steps_per_draft_len = [0] * (engine.pieces.plan.max_draft_len + 1)
        """Steps with generation requests by draft length."""
        self.num_finished: Counter[FinishReason] = Counter()
        self._requests: dict[int, LlmRequest] = {}
        self._waiting_for_kernels: list[LlmRequest] = []
        self._launched: _Launched | None = None
        self._closed = False

    # ---- requests ---------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step is running."""
        return bool(self._requests) or self._launched is not None

    @property
    def is_closed(self) -> bool:
        """Whether the executor was shut down."""
        return self._closed

    def enqueue(self, request: LlmRequest) -> None:
        """Add a request to the waiting queue.

        Raises:
            RequestError: the request can never run here, or is not an `LlmRequest`.
            ExecutorError: the executor was shut down.
        """
        if self._closed:
            raise ExecutorError("the executor was shut down")
        if not isinstance(request, LlmRequest):
            raise RequestError(f"enqueue: expected an LlmRequest, got {format_value(request)}")
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id}: the id is in use")
        self.check_fits(request)
        self._requests[request.request_id] = request
        if self.engine.is_compiling(request.sampling_kind):
            self._waiting_for_kernels.append(request)  # others go on
        else:
            self.scheduler.waiting.append(request)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their first step, or for blocks after a preemption."""
        return len(self.scheduler.waiting) + len(self._waiting_for_kernels)

    def find(self, request_id: int) -> LlmRequest | None:
        """Return the unfinished request of that id, or None."""
        return self._requests.get(request_id)

    def cancel(self, request_id: int) -> bool:
        """Cancel a request; the next step or :meth:`end_cancelled` returns its last event.

        Returns False if no unfinished request has this id.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_finished:
            return False
        request.finish_by(FinishReason.CANCELLED)
        return True

    def end_cancelled(self) -> list[StepEvent]:
        """Between two steps: return the events of cancelled requests and free their resources.

        If no request is left, the step in flight is dropped.
        """
        events = self._end_cancelled()
        if events and not self._requests:
            self._launched = None
        return events

    @property
    def can_capture(self) -> bool:
        """Whether CUDA graphs are to be captured, and the executor is idle."""
        return not self._closed and not self.has_work and self.engine.has_pending_graphs

    def capture_next(self) -> bool:
        """Capture one pending CUDA graph if the executor is idle; False: there was nothing to do.

        A capture takes tenths of a second, in which no request makes progress.
        """
        return self.can_capture and self.engine.capture_next()

    def shutdown(self) -> None:
        """Cancel every request and free all resources."""
        for request in list(self._requests.values()):
            request.finish_by(FinishReason.CANCELLED)
            self._terminate(request)
        self._launched = None
        self.resources.shutdown()
        self.engine.release()
        self._closed = True

    # ---- the loop ---------------------------------------------------------------------------

    def step(self) -> list[StepEvent]:
        """Run one iteration and return the events of the step whose results became known.

        Raises:
            Exception: an error of the target, the worker or the sampler; all requests have been
                ended with an error and their resources freed.
        """
        if self._closed:
            raise ExecutorError("the executor was shut down")
        try:
            return self._overlap_step() if self.overlap else self._plain_step()
        except BaseException as error:
            # BaseException: an interrupted step cannot be resumed either
            self._fail_all(f"a step failed: {describe_error(error)}")
            raise

    def _plain_step(self) -> list[StepEvent]:
        cancelled = self._end_cancelled()
        batch = self._schedule(in_flight=set())
        if batch.batch_size == 0:
            return cancelled
        self.resources.prepare_resources(batch)
        outputs = self.engine.forward(batch, None, set())
        state = self._sample(batch, outputs)
        results = self._update_requests(state)
        self.engine.pieces.finish_step(batch)
        self._fail_without_token(batch, results)
        events = self._responses(results)
        self.resources.update_resources(batch)
        return cancelled + events

    def _overlap_step(self) -> list[StepEvent]:
        previous = self._launched
        in_flight = self._in_flight(previous)
        cancelled = self._end_cancelled()
        batch = self._schedule(in_flight)
        outputs = None
        if batch.batch_size > 0:
            self.resources.prepare_resources(batch)
            device = previous.state.device if previous is not None else None
            outputs = self.engine.forward(batch, device, in_flight)
        results: Sequence[StepResult] = ()
        if previous is not None:
            results = self._update_requests(previous.state)
            self.engine.pieces.finish_step(previous.batch)
            self._fail_without_token(previous.batch, results, previous.epochs)
        self._launched = None
        if outputs is not None:
            state = self._sample(batch, outputs)
            epochs = {r.request_id: r.py_epoch for r in batch.all_requests()}
            self._launched = _Launched(batch, state, epochs)
        events = self._responses(results)
        if previous is not None:
            self.resources.update_resources(previous.batch)
        if not self._requests:
            self._launched = None  # all of its results would be dropped
        return cancelled + events

    def _schedule(self, in_flight: set[int]) -> ScheduledRequests:
        held = self._waiting_for_kernels
        is_compiling = self.engine.is_compiling
        self._waiting_for_kernels = [r for r in held if is_compiling(r.sampling_kind)]
        self.scheduler.waiting.extend(r for r in held if r not in self._waiting_for_kernels)
        batch = self.scheduler.schedule(in_flight)
        if self._waiting_for_kernels and batch.batch_size == 0 and not in_flight:
            time.sleep(KERNEL_POLL_SECONDS)
        for request in batch.paused_requests:
            self.num_preemptions += 1
            self.resources.free_resources(request)
        if batch.batch_size > 0:
            self.num_steps += 1
            batch.draft_len = self.engine.pieces.choose_draft_len(batch)
            if batch.generation_requests:
                self.num_steps_per_draft_len[batch.draft_len] += 1
        elif not in_flight and self.scheduler.waiting and not self.scheduler.active:
            # admission checks that every request fits alone: this would be a scheduler defect
            waiting = [r.request_id for r in self.scheduler.waiting]
            raise ExecutorError(f"no request can run, waiting: {waiting}")
        return batch

    @staticmethod
    def _in_flight(previous: _Launched | None) -> set[int]:
        """Return the ids of requests in the launched step whose result is still valid."""
        if previous is None:
            return set()
        return {
            r.request_id
            for r in previous.batch.all_requests()
            if previous.epochs[r.request_id] == r.py_epoch and not r.is_finished
        }

    def _sample(self, batch: ScheduledRequests, outputs: dict[str, Any]) -> Any:
        """Call ``sample_async``, check its result and update the request states."""
        state = self.sampler.sample_async(batch, outputs)
        if state is None or (self.overlap and getattr(state, "device", None) is None):
            given = format_value(state)
            raise PluginError(f"sampler: sample_async: expected a state with device, got {given}")
        for request in batch.context_requests:
            request.move_to_next_context_chunk()
        return state

    def _update_requests(self, state: Any) -> Sequence[StepResult]:
        """Call ``update_requests`` and check its result."""
        results: object = self.sampler.update_requests(state)
        if isinstance(results, Sequence) and all(isinstance(r, StepResult) for r in results):
            return results
        given = format_value(results)
        raise PluginError(f"sampler: update_requests: expected StepResults, got {given}")

    # ---- results ----------------------------------------------------------------------------

    @staticmethod
    def _fail_without_token(
        batch: ScheduledRequests,
        results: Sequence[StepResult],
        epochs: dict[int, int] | None = None,
    ) -> None:
        """End generations that got no token from their step: they would be scheduled forever.

        Args:
            epochs: each request's epoch when the step was launched; None: no request has been
                preempted since.
        """
        advanced = {result.request_id for result in results if result.token_ids}
        for request in batch.generation_requests:
            is_late = epochs is not None and epochs[request.request_id] != request.py_epoch
            if request.request_id not in advanced and not request.is_finished and not is_late:
                request.fail("the step gave the request no token: a defect of the plugin in use")

    def _responses(self, results: Sequence[StepResult]) -> list[StepEvent]:
        """Return the events of a step and free the resources of finished requests."""
        return [
            self._report(request, result.token_ids, result.logprobs)
            for result in results
            if (request := self._requests.get(result.request_id)) is not None
            and (result.token_ids or result.finish_reason is not None)
        ]

    def _end_cancelled(self) -> list[StepEvent]:
        """Return the events of requests that ended outside a step."""
        return [self._report(r, []) for r in list(self._requests.values()) if r.is_finished]

    def _report(
        self, request: LlmRequest, token_ids: list[int], logprobs: Logprobs | None = None
    ) -> StepEvent:
        if token_ids and request.first_token_time is None:
            request.first_token_time = time.monotonic()
            self.num_prompt_tokens += request.py_orig_prompt_len
        self.num_generation_tokens += len(token_ids)
        if request.logprobs is not None:
            logprobs = Logprobs() if logprobs is None else logprobs
            logprobs.decode = request.decode_token
            request.logprobs.extend(logprobs)
        text = request.text
        segments = text.drain(final=request.is_finished) if text is not None else []
        if request.is_finished:
            self._terminate(request)
        return StepEvent(
            request.request_id,
            token_ids,
            segments,
            request.finish_reason,
            request.py_acceptance.label,
            logprobs,
            request.prompt_index,
            request.first_prompt_logprobs(),
            request.sample_index,
            request.stop_reason,
            request.error,
        )

    def _terminate(self, request: LlmRequest) -> None:
        self.resources.free_resources(request)
        self.scheduler.remove(request)
        if request in self._waiting_for_kernels:
            self._waiting_for_kernels.remove(request)
        self.acceptance.merge(request.py_acceptance)
        request.finished_time = time.monotonic()
        if request.finish_reason is not None:
            self.num_finished[request.finish_reason] += 1
        del self._requests[request.request_id]

    def _fail_all(self, why: str) -> None:
        self._launched = None
        for request in list(self._requests.values()):
            request.fail(why)
            self._terminate(request)

    def check_fits(self, request: LlmRequest) -> None:
        """Refuse a request that this executor could never finish.

        Raises:
            RequestError: names the required and the available size.
        """
        plan, blocks = self.scheduler.plan, self.engine.blocks
        length = request.py_orig_prompt_len
        needed = blocks.blocks_for(request.max_length)
        if needed > blocks.num_blocks:
            raise RequestError(
                f"request {request.request_id}: {request.max_length} tokens (prompt and "
                f"max_new_tokens) need {needed} KV blocks, the cache has {blocks.num_blocks}"
            )
        budget = self.scheduler.max_num_tokens
        if not self.scheduler.chunking and length > budget:
            raise RequestError(
                f"request {request.request_id}: the prompt has {length} tokens, max_num_tokens is "
                f"{budget} and enable_chunked_prefill is false"
            )
        if budget < plan.chunk_tokens(plan.history_rows, 1):
            raise RequestError(
                f"request {request.request_id}: max_num_tokens {budget} cannot hold one prompt "
                f"token and {plan.history_rows} history rows"
            )
