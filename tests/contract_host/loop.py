"""The executor loop: schedule, prepare, forward, sample, update, hand out; at once or one step
later."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tests.contract_host.behaviours import ATTENTION_DP_DUMMY_ID, FinishReason, LlmRequestState
from tests.contract_host.engine import KV, SPEC, ModelEngine
from tests.contract_host.kv_cache import ResourceManager
from tests.contract_host.requests import Batch, LlmRequest, batch_of

SEQ_SLOTS = "seq_slot_manager"


@dataclass
class BatchState:
    """A launched batch whose results are not read yet."""

    batch: Batch
    state: Any
    draft_len: int


class PyExecutor:
    """Drives engine, sampler and managers.

    Args:
        overlap: a step is launched before the results of the last one are read.
        chunk_tokens: prompt tokens of a step at most, of all requests together; None: any number.
        pauses_at: numbers of iterations that pause the youngest request, as if blocks were short.
        late_frees: a finished request keeps its resources for one more iteration, while who takes
            its place is let in already.
        attention_dp: with nothing to do, a rank runs a dummy.
    """

    def __init__(
        self,
        engine: ModelEngine,
        managers: ResourceManager,
        *,
        overlap: bool,
        chunk_tokens: int | None = None,
        pauses_at: Collection[int] = (),
        late_frees: bool = False,
        attention_dp: bool = False,
        updates_before_sampling: bool | None = None,
        choose_draft_len: Callable[[int], int] | None = None,
    ) -> None:
        self.engine = engine
        self.sampler = engine.pieces.sampler
        self.managers = managers
        self.kv_cache = managers.get_resource_manager(KV)
        self.overlap = overlap
        self.chunk_tokens = chunk_tokens
        self.pauses_at = pauses_at
        self.late_frees = late_frees
        self.attention_dp = self._is_idle_rank = attention_dp
        self.updates_first = (
            engine.line.updates_before_sampling
            if updates_before_sampling is None
            else updates_before_sampling
        )
        self.choose_draft_len = choose_draft_len
        self.waiting: deque[LlmRequest] = deque()
        self.active: list[LlmRequest] = []
        self.previous: BatchState | None = None
        self.histogram: Counter[int] = Counter()  # emitted tokens of a generation's step
        self.num_accepted = self.num_verified = 0
        self.num_pauses = 0
        self.num_iterations = 0
        self.most_slots = 0
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
        for _ in range(max_steps):
            if not (self.waiting or self.active or self.previous):
                break
            self._is_idle_rank = False
            self.step()
            self._is_idle_rank = self.attention_dp
        else:
            raise AssertionError(f"not done after {max_steps} steps")
        for requests in self._to_free:
            for request in requests:
                self.managers.free_resources(request)
        self._to_free = [[]]

    def cancel(self, request: LlmRequest) -> None:
        """A user gives up; the request leaves with the next responses."""
        request.finish_by(FinishReason.CANCELLED, 0)
        if request in self.waiting:
            self.waiting.remove(request)

    def fail_all(self) -> None:
        """A step has failed: every request in the executor ends, and gives everything back."""
        self.previous = None
        for request in self.active:
            request.finish_by(FinishReason.CANCELLED, 0)
        self._respond()

    def step(self) -> None:
        batch = self._schedule()
        if self.overlap:
            self._overlap_step(batch)
        else:
            self._plain_step(batch)

    def _plain_step(self, batch: Batch) -> None:
        if batch.batch_size == 0:
            return
        launched = self._launch(batch, None)
        self._update_requests(launched)
        self._respond()
        self.managers.update_resources(batch)
        self._check_kv_tokens(launched.batch, in_flight=0)

    def _overlap_step(self, batch: Batch) -> None:
        previous, self.previous = self.previous, None
        if previous is None:
            if batch.batch_size > 0:
                self.previous = self._launch(batch, None)
            return
        if batch.batch_size > 0:
            self.previous = self._launch(batch, previous)
        if batch.batch_size == 0 or not self.updates_first:
            self._update_requests(previous)
        self._respond()
        self.managers.update_resources(previous.batch)
        in_flight = 0 if self.previous is None else 1 + self.previous.draft_len
        if self.previous is not None:
            self._check_kv_tokens(self.previous.batch, in_flight)

    def _launch(self, batch: Batch, previous: BatchState | None) -> BatchState:
        """Prepare, run and sample; the results before are read in between, as lines do."""
        draft_len = self._choose_draft_len(batch)
        self.managers.prepare_resources(batch)
        spec = self.managers.get_resource_manager(SPEC)
        self.most_slots = max(self.most_slots, len(spec.slot_manager.slot_mapping))
        device = None if previous is None else previous.state.device
        outputs = self.engine.forward(batch, self.managers, device, draft_len)
        if previous is not None and self.updates_first:
            self._update_requests(previous)
        launched = BatchState(batch, self._sample(batch, outputs), draft_len)
        self._update_request_states(batch)
        return launched

    # ---- pieces ----

    def _sample(self, batch: Batch, outputs: dict[str, Any]) -> Any:
        prefix_sum = [0]
        for _ in batch.context_requests:
            prefix_sum.append(prefix_sum[-1] + 1)
        state = self.sampler.sample_async(batch, outputs, prefix_sum)
        assert isinstance(state, self.sampler.SampleState)
        assert isinstance(state, self.engine.pieces.classes.state)
        if self.engine.line.is_newer:
            assert state.runtime_draft_len == outputs["next_draft_tokens"].shape[1]
        return state

    def _update_requests(self, launched: BatchState) -> None:
        going = LlmRequestState.GENERATION_IN_PROGRESS
        generations = launched.batch.generation_requests
        lengths = {
            request.request_id: request.get_num_tokens(0)
            for request in generations
            if request.state is going and not request.is_dummy
        }
        self.sampler.update_requests(launched.state, self.managers)
        for request in generations:
            if request.request_id in lengths:
                emitted = request.get_num_tokens(0) - lengths[request.request_id]
                self.histogram[emitted] += 1
                # newer hosts take these two for their figures
                self.num_accepted += request.py_num_accepted_draft_tokens
                self.num_verified += request.py_num_draft_tokens_verified
                request.py_num_draft_tokens_verified = 0

    def _update_request_states(self, batch: Batch) -> None:
        for request in batch.context_requests:
            if not request.is_finished:
                request.move_to_next_context_chunk()
                if request.context_remaining_length == 0:
                    request.state = LlmRequestState.GENERATION_IN_PROGRESS
        for request in [r for r in batch.all_requests() if r.is_attention_dp_dummy]:
            request.state = LlmRequestState.GENERATION_COMPLETE
            self.active.remove(request)
            self.managers.free_resources(request)

    def _respond(self) -> None:
        """Finished requests leave."""
        for request in [r for r in self.active if r.is_finished]:
            self.active.remove(request)
            self._to_free[-1].append(request)
        due = self._to_free.pop(0) if len(self._to_free) > self.late_frees else []
        for request in due:
            self.managers.free_resources(request)
        self._to_free.append([])

    def _check_kv_tokens(self, batch: Batch, in_flight: int) -> None:
        """A generation's cache holds all tokens but the last, and what a running step may add."""
        for request in batch.generation_requests:
            if request.state is LlmRequestState.GENERATION_IN_PROGRESS:
                held = self.kv_cache.num_tokens[request.request_id]
                known = request.get_num_tokens(0) - 1
                assert held == known + in_flight, (
                    f"request {request.request_id}: the cache holds {held} tokens, expected "
                    f"{known} and {in_flight} of a running step"
                )

    # ---- schedule ----

    def _choose_draft_len(self, batch: Batch) -> int:
        """Of the step; every generation's drafts are cut or filled up to it."""
        if self.choose_draft_len is None:
            return self.engine.max_draft_len
        chosen = self.choose_draft_len(batch.batch_size)
        for request in batch.generation_requests:
            drafts = request.py_draft_tokens[:chosen]
            request.py_draft_tokens = drafts + [0] * (chosen - len(drafts))
        return chosen

    def _schedule(self) -> Batch:
        """Generations first, oldest first; the youngest gives way where blocks are short."""
        if self._is_idle_rank and not (self.active or self.waiting):
            self._add_dummy()
        generations: list[LlmRequest] = []
        contexts: list[LlmRequest] = []
        paused: list[LlmRequest] = []
        self.num_iterations += 1
        if self.num_iterations in self.pauses_at and self.active:
            self._pause(self.active[-1], generations, paused)
        free = self.kv_cache.num_free_blocks
        step_tokens = 1 + self.engine.max_draft_len
        for request in list(self.active):
            if request.state is not LlmRequestState.GENERATION_IN_PROGRESS or request in paused:
                continue
            needed = self._missing(request, step_tokens)
            while needed > free and request not in paused:
                victim = self.active[-1]
                free += self._pause(victim, generations, paused)
            if request not in paused:
                free -= needed
                generations.append(request)
        budget = self.chunk_tokens
        for request in self.active:
            if request.state is LlmRequestState.CONTEXT_INIT and budget != 0:
                budget = self._add_chunk(request, budget, contexts)
        limit = self.engine.sizes.max_num_requests
        while self.waiting and len(self.active) < limit and budget != 0 and not paused:
            request = self.waiting[0]
            needed = self._missing(request, request.get_num_tokens(0) + step_tokens)
            if needed > free:
                break
            free -= needed
            self.active.append(self.waiting.popleft())
            budget = self._add_chunk(request, budget, contexts)
        return batch_of(self.engine.line, contexts, generations, paused)

    def _missing(self, request: LlmRequest, tokens: int) -> int:
        return 0 if request.is_dummy else int(self.kv_cache.missing_blocks(request, tokens))

    @staticmethod
    def _add_chunk(
        request: LlmRequest, budget: int | None, contexts: list[LlmRequest]
    ) -> int | None:
        left = request.context_remaining_length
        request.context_chunk_size = left if budget is None else min(left, budget)
        contexts.append(request)
        return None if budget is None else budget - request.context_chunk_size

    def _pause(
        self, victim: LlmRequest, generations: list[LlmRequest], paused: list[LlmRequest]
    ) -> int:
        """Back to the beginning, without resources; the number of blocks that it gave."""
        before = self.kv_cache.num_free_blocks
        self.active.remove(victim)
        if victim in generations:
            generations.remove(victim)
        self.managers.free_resources(victim)
        victim.pause()
        paused.append(victim)
        self.waiting.appendleft(victim)
        self.num_pauses += 1
        return int(self.kv_cache.num_free_blocks - before)

    def _add_dummy(self) -> None:
        dummies = self.kv_cache.add_dummy_requests(
            [ATTENTION_DP_DUMMY_ID], self.engine.max_draft_len
        )
        dummies[0].is_attention_dp_dummy = True
        spec = self.managers.get_resource_manager(SPEC)
        if spec is not None:
            spec.add_dummy_requests([ATTENTION_DP_DUMMY_ID])
        self.active.append(dummies[0])
