"""The executor loop: schedule, prepare, forward, sample, update, hand out; at once or one step
behind."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.contract_host.behaviours import ATTENTION_DP_DUMMY_ID, LlmRequestState
from tests.contract_host.engine import KV, SPEC, ModelEngine
from tests.contract_host.kv_cache import ResourceManager
from tests.contract_host.requests import Batch, LlmRequest, batch_of

SEQ_SLOTS = "seq_slot_manager"


@dataclass
class BatchState:
    """A launched batch whose results are not read yet."""

    batch: Batch
    state: Any


class PyExecutor:
    """Drives engine, sampler and managers.

    Args:
        overlap: a step is launched before the results of the last one are read.
        chunk_tokens: prompt tokens of a step at most, of all requests together; None: any number.
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
        self.late_frees = late_frees
        self.attention_dp = attention_dp
        line = engine.line
        self.updates_first = (
            line.updates_before_sampling
            if updates_before_sampling is None
            else updates_before_sampling
        )
        self.choose_draft_len = choose_draft_len
        self.waiting: deque[LlmRequest] = deque()
        self.active: list[LlmRequest] = []
        self.previous: BatchState | None = None
        self.histogram: Counter[int] = Counter()  # emitted tokens of a generation's step
        self.num_pauses = 0
        self.most_slots = 0
        self._to_free: list[list[LlmRequest]] = [[]]

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per step of a generation."""
        return sum(n * count for n, count in self.histogram.items()) / self.histogram.total()

    def add(self, request: LlmRequest) -> None:
        self.sampler.validate_request(request)
        self.waiting.append(request)

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is left."""
        for _ in range(max_steps):
            if not (self.waiting or self.active or self.previous):
                break
            self.step()
        else:
            raise AssertionError(f"not done after {max_steps} steps")
        for requests in self._to_free:
            for request in requests:
                self.managers.free_resources(request)
        self._to_free = [[]]

    def step(self) -> None:
        batch = self._schedule()
        if self.overlap:
            self._overlap_step(batch)
        else:
            self._plain_step(batch)

    def _plain_step(self, batch: Batch) -> None:
        if batch.batch_size == 0:
            return
        draft_len = self._draft_len(batch)
        self.managers.prepare_resources(batch)
        outputs = self.engine.forward(batch, self.managers, None, draft_len)
        state = self._sample(batch, outputs)
        self._update_request_states(batch)
        self._update_requests(state)
        self._respond(batch)
        self.managers.update_resources(batch)

    def _overlap_step(self, batch: Batch) -> None:
        previous, self.previous = self.previous, None
        outputs = None
        if batch.batch_size > 0:
            draft_len = self._draft_len(batch)
            self.managers.prepare_resources(batch)
            device = None if previous is None else previous.state.device
            outputs = self.engine.forward(batch, self.managers, device, draft_len)
        if previous is not None and self.updates_first:
            self._update_requests(previous.state, previous.batch)
        if outputs is not None:
            self.previous = BatchState(batch, self._sample(batch, outputs))
            self._update_request_states(batch)
        if previous is not None:
            if not self.updates_first:
                self._update_requests(previous.state, previous.batch)
            self._respond(previous.batch)
            self.managers.update_resources(previous.batch)

    # ---- pieces ----

    def _sample(self, batch: Batch, outputs: dict[str, Any]) -> Any:
        prefix_sum = [0]
        for _ in batch.context_requests:
            prefix_sum.append(prefix_sum[-1] + 1)
        extra = {}
        if self.engine.line.sampling_gets_managers:
            extra["resource_manager"] = self.managers
        state = self.sampler.sample_async(batch, outputs, prefix_sum, **extra)
        assert isinstance(state, self.sampler.SampleState)
        assert isinstance(state, self.engine.pieces.classes.state)
        return state

    def _update_requests(self, state: Any, batch: Batch | None = None) -> None:
        going = {LlmRequestState.GENERATION_IN_PROGRESS, LlmRequestState.GENERATION_TO_COMPLETE}
        listed = batch or self._batch
        before = {
            request.request_id: request.get_num_tokens(0)
            for request in listed.generation_requests
            if request.state in going and not request.is_dummy
        }
        self.sampler.update_requests(state, self.managers)
        for request in listed.generation_requests:
            if request.request_id in before:
                emitted = request.get_num_tokens(0) - before[request.request_id]
                self.histogram[emitted] += 1

    def _update_request_states(self, batch: Batch) -> None:
        self._batch = batch
        for request in batch.context_requests:
            if not request.is_finished:
                request.move_to_next_context_chunk()
                if request.context_remaining_length == 0:
                    request.state = LlmRequestState.GENERATION_IN_PROGRESS
        for request in [r for r in batch.all_requests() if r.is_attention_dp_dummy]:
            request.state = LlmRequestState.GENERATION_COMPLETE
            self.active.remove(request)
            self.managers.free_resources(request)

    def _respond(self, batch: Batch) -> None:
        """Finished requests leave."""
        for request in [r for r in self.active if r.is_finished]:
            self.active.remove(request)
            self._to_free[-1].append(request)
        due = self._to_free.pop(0) if len(self._to_free) > self.late_frees else []
        for request in due:
            self.managers.free_resources(request)
        self._to_free.append([])

    # ---- schedule ----

    def _draft_len(self, batch: Batch) -> int | None:
        """Of the step; every generation's drafts are cut or filled up to it."""
        if self.choose_draft_len is None:
            return None
        chosen = self.choose_draft_len(batch.batch_size)
        for request in batch.generation_requests:
            drafts = request.py_draft_tokens[:chosen]
            request.py_draft_tokens = drafts + [0] * (chosen - len(drafts))
        return chosen

    def _schedule(self) -> Batch:
        """Generations first, oldest first; the youngest gives way where blocks are short."""
        if self.attention_dp and not (self.active or self.waiting):
            self._add_dummy()
        generations: list[LlmRequest] = []
        contexts: list[LlmRequest] = []
        paused: list[LlmRequest] = []
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
