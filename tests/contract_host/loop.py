"""The executor loop: schedule, prepare, forward, sample, update, hand out; at once or one step
later."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tests.contract_host.behaviours import ATTENTION_DP_DUMMY_ID
from tests.contract_host.engine import SPEC, ModelEngine
from tests.contract_host.kv_cache import ResourceManager
from tests.contract_host.requests import (
    COMPLETE,
    CONTEXT_INIT,
    IN_PROGRESS,
    FinishReason,
    LlmRequest,
    make_batch,
)


@dataclass
class BatchState:
    """A launched batch whose results are not read yet."""

    batch: Any
    state: Any
    draft_len: int


class PyExecutor:
    """Drives engine, sampler and managers.

    Args:
        overlap: a step is launched before the results of the last one are read.
        chunk_tokens: prompt tokens of a step at most, of all requests together; None: any number.
        pauses_at: numbers of iterations that pause the youngest request, as if blocks were short.
        late_frees: a finished request keeps its resources for one more iteration, while the one
            that takes its place is admitted already.
        attention_dp: with nothing to do, a rank runs a dummy.
        updates_before_sampling: with overlap, results are read before the next step is sampled.
        choose_draft_len: of a step, by the size of the batch.
    """

    def __init__(
        self,
        engine: ModelEngine,
        managers: ResourceManager,
        *,
        overlap: bool,
        attention_dp: bool,
        chunk_tokens: int | None = None,
        pauses_at: Collection[int] = (),
        late_frees: bool = False,
        updates_before_sampling: bool = True,
        choose_draft_len: Callable[[int], int] | None = None,
    ) -> None:
        self.engine = engine
        self.sampler = engine.components.sampler
        self.managers = managers
        self.overlap = overlap
        self.chunk_tokens = chunk_tokens
        self.pauses_at = pauses_at
        self.late_frees = late_frees
        self.is_idle_rank = attention_dp
        self.updates_first = updates_before_sampling
        self.choose_draft_len = choose_draft_len
        self.waiting: deque[LlmRequest] = deque()
        self.active: list[LlmRequest] = []
        self.previous: BatchState | None = None
        self.histogram: Counter[int] = Counter()  # emitted tokens of a generation's step
        self.num_accepted = self.num_verified = 0
        self.num_iterations = self.num_pauses = self.most_slots = 0
        self._to_free: list[list[LlmRequest]] = [[]]

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per step of a generation."""
        return sum(n * count for n, count in self.histogram.items()) / self.histogram.total()

    def add(self, request: LlmRequest) -> None:
        """Take a request in; only newer lines ask the sampler about it."""
        if self.engine.line.is_newer:
            self.sampler.validate_request(request)
        self.waiting.append(request)

    def run(self, max_steps: int = 500) -> None:
        """Until nothing is left."""
        self.is_idle_rank = False
        while self.waiting or self.active or self.previous:
            assert self.num_iterations < max_steps, f"not done after {max_steps} steps"
            self.step()
        for requests in self._to_free:
            for request in requests:
                self.managers.free_resources(request)
        self._to_free = [[]]

    def fail_all(self) -> None:
        """A step has failed: every request in the executor ends, and gives everything back."""
        self.previous = None
        for request in self.active:
            request.finish_by(FinishReason.CANCELLED, 0)
        self._respond()

    def step(self) -> None:
        batch, previous = self._schedule(), self.previous
        self.previous = self._launch(batch, previous) if batch.all_requests() else None
        if not self.overlap:
            previous = self.previous
            self.previous = None
        if previous is None:
            return
        if not (self.overlap and self.updates_first and self.previous):
            self._update_requests(previous)
        self._respond()
        self.managers.update_resources(previous.batch)
        checked = self.previous or previous
        self._check_kv_tokens(checked.batch, 1 + checked.draft_len if self.previous else 0)

    def _launch(self, batch: Any, previous: BatchState | None) -> BatchState:
        """Prepare, run and sample; the results before are read in between, as lines do."""
        draft_len = self._choose_draft_len(batch)
        self.managers.prepare_resources(batch)
        slots = self.managers.get_resource_manager(SPEC).slot_manager.slot_mapping
        self.most_slots = max(self.most_slots, len(slots))
        device = None if previous is None else previous.state.device
        outputs = self.engine.forward(batch, self.managers, device, draft_len)
        if previous is not None and self.updates_first:
            self._update_requests(previous)
        launched = BatchState(batch, self._sample(batch, outputs), draft_len)
        for request in batch.context_requests:
            if not request.is_finished:
                request.move_to_next_context_chunk()
        for request in [r for r in batch.all_requests() if r.is_attention_dp_dummy]:
            request.state = COMPLETE
            self.active.remove(request)
            self.managers.free_resources(request)
        return launched

    # ---- results ----

    def _sample(self, batch: Any, outputs: dict[str, Any]) -> Any:
        prefix_sum = list(range(len(batch.context_requests) + 1))
        state = self.sampler.sample_async(batch, outputs, prefix_sum)
        assert isinstance(state, self.sampler.SampleState)
        assert isinstance(state, self.engine.components.classes.state)
        if self.engine.line.is_newer:
            assert state.runtime_draft_len == outputs["next_draft_tokens"].shape[1]
        return state

    def _update_requests(self, launched: BatchState) -> None:
        lengths = {
            request: request.get_num_tokens(0)
            for request in launched.batch.generation_requests
            if request.state is IN_PROGRESS and not request.is_dummy
        }
        self.sampler.update_requests(launched.state, self.managers)
        for request, length in lengths.items():
            self.histogram[request.get_num_tokens(0) - length] += 1
            # newer hosts take these two for their figures
            self.num_accepted += request.py_num_accepted_draft_tokens
            self.num_verified += request.py_num_draft_tokens_verified
            request.py_num_draft_tokens_verified = 0

    def _respond(self) -> None:
        """Finished requests leave."""
        for request in [r for r in self.active if r.is_finished]:
            self.active.remove(request)
            self._to_free[-1].append(request)
        due = self._to_free.pop(0) if len(self._to_free) > self.late_frees else []
        for request in due:
            self.managers.free_resources(request)
        self._to_free.append([])

    def _check_kv_tokens(self, batch: Any, in_flight: int) -> None:
        """A generation's cache holds all tokens but the last, and what a running step may add."""
        for request in batch.generation_requests:
            if request.state is IN_PROGRESS:
                held = self.engine.kv_cache.num_tokens[request.request_id]
                known = request.get_num_tokens(0) - 1
                assert held == known + in_flight, (
                    f"request {request.request_id}: the cache holds {held} tokens, expected "
                    f"{known} and {in_flight} of a running step"
                )

    # ---- schedule ----

    def _choose_draft_len(self, batch: Any) -> int:
        """Of the step; every generation's drafts are cut or filled up to it."""
        if self.choose_draft_len is None:
            return self.engine.max_draft_len
        chosen = self.choose_draft_len(len(batch.all_requests()))
        for request in batch.generation_requests:
            drafts = request.py_draft_tokens[:chosen]
            request.py_draft_tokens = drafts + [0] * (chosen - len(drafts))
        return chosen

    def _schedule(self) -> Any:
        """Generations first, oldest first; then chunks of prompts."""
        if self.is_idle_rank and not (self.active or self.waiting):
            self._add_dummy()
        self.num_iterations += 1
        is_short = self.num_iterations in self.pauses_at and bool(self.active)
        if is_short:
            self._pause(self.active[-1])
        generations = [request for request in self.active if request.state is IN_PROGRESS]
        contexts = [request for request in self.active if request.state is CONTEXT_INIT]
        while self.waiting and not is_short and self._has_room():
            self.active.append(self.waiting.popleft())
            contexts.append(self.active[-1])
        budget, chunks = self.chunk_tokens, list[LlmRequest]()
        for request in contexts:
            left = request.context_remaining_length
            request.context_chunk_size = left if budget is None else min(left, budget)
            budget = None if budget is None else budget - request.context_chunk_size
            if request.context_chunk_size > 0:
                chunks.append(request)
        return make_batch(self.engine.line.name, chunks, generations)

    def _has_room(self) -> bool:
        return len(self.active) < self.engine.sizes.max_num_requests

    def _pause(self, request: LlmRequest) -> None:
        """Back to the beginning, without resources."""
        self.active.remove(request)
        self.managers.free_resources(request)
        request.pause()
        self.waiting.appendleft(request)
        self.num_pauses += 1

    def _add_dummy(self) -> None:
        (dummy,) = self.engine.kv_cache.add_dummy_requests(
            [ATTENTION_DP_DUMMY_ID], self.engine.max_draft_len
        )
        dummy.is_attention_dp_dummy = True
        self.managers.get_resource_manager(SPEC).add_dummy_requests([ATTENTION_DP_DUMMY_ID])
        self.active.append(dummy)
