"""Scheduler: continuous batching, chunked prefill, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mtp_plugin.errors import ExecutorError, format_value
from mtp_plugin.hosts.embedded.kv_cache import BlockManager
from mtp_plugin.hosts.embedded.request import LlmRequest
from mtp_plugin.speculative.plugin import DraftPlan

ChunkPolicy = Callable[[LlmRequest, int], int]
"""(request, limit in tokens) -> chunk length, clamped to 1..limit."""


@dataclass
class ScheduledRequests:
    """The requests of one step, with TensorRT-LLM's names; contexts come first in the batch."""

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)
    paused_requests: list[LlmRequest] = field(default_factory=list)
    draft_len: int | None = None  # drafts that the step verifies and makes; None: not chosen yet
    num_tokens: int = 0  # share of the token budget that the step uses

    def all_requests(self) -> list[LlmRequest]:
        """Contexts, then generations."""
        return self.context_requests + self.generation_requests

    @property
    def batch_size(self) -> int:
        """R."""
        return len(self.context_requests) + len(self.generation_requests)

    @property
    def can_run_cuda_graph(self) -> bool:
        """Whether the batch is generation-only."""
        return not self.context_requests


def whole_budget(request: LlmRequest, limit: int) -> int:
    """Default chunk policy: as much of the prompt as fits."""
    return min(request.context_remaining_length, limit)


class Scheduler:
    """Schedules first come, first served, running requests before new ones.

    A generation request counts K+1 tokens of the budget whatever its drafts, a prompt chunk its
    tokens and the history rows that the draft layers read again. KV blocks are reserved here, by
    the plan's rule, so that no step can run out of them. If blocks are short, the youngest running
    request is preempted: its blocks are freed, and when there is room it recomputes its prompt and
    output.

    Args:
        plan: token and KV costs of the plugin.
        blocks: the KV blocks.
        max_batch_size: maximum number of requests per step.
        max_num_tokens: maximum number of target tokens per step, history rows included.
        chunk_policy: chooses the length of prompt chunks.
        chunking: False: a prompt is not split, except that of a preempted request.
    """

    def __init__(
        self,
        plan: DraftPlan,
        blocks: BlockManager,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        chunk_policy: ChunkPolicy = whole_budget,
        chunking: bool = True,
    ) -> None:
        self.plan = plan
        self.blocks = blocks
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.chunk_policy = chunk_policy
        self.chunking = chunking
        self.waiting: deque[LlmRequest] = deque()
        self.active: list[LlmRequest] = []  # oldest first

    def schedule(self, in_flight: set[int]) -> ScheduledRequests:
        """Choose the requests of the next step.

        Args:
            in_flight: ids of requests in a launched step whose results have not been read yet.
        """
        batch = ScheduledRequests()
        for request in list(self.active):
            # may have been paused for an older request
            if not request.is_generating:
                continue
            pending = request.request_id in in_flight
            if pending and request.get_num_tokens() + 1 >= request.max_length:
                continue  # the running step ends it
            rows = self.generation_rows(request, in_flight=pending)
            if self._reserve_or_pause(request, rows, batch):
                batch.generation_requests.append(request)
                batch.num_tokens += self.plan.step_rows
        prompts = [r for r in self.active if not r.is_generating and not r.is_finished]
        for request in prompts:
            if request not in batch.paused_requests:
                self._schedule_chunk(request, batch)
        self._admit(batch)
        return batch

    def generation_rows(self, request: LlmRequest, *, in_flight: bool) -> int:
        """Return the KV rows to reserve for a generation's next step, up to its maximum length."""
        rows = self.plan.rows_to_reserve(request.get_num_tokens() - 1, in_flight=in_flight)
        return min(rows, request.max_length)

    def prompt_rows(self, request: LlmRequest, end: int) -> int:
        """Return the KV rows to reserve for a prompt chunk that ends at ``end``."""
        return max(end, min(self.plan.prompt_rows_to_reserve(end), request.max_length))

    def remove(self, request: LlmRequest) -> None:
        """Remove a finished request."""
        if request in self.active:
            self.active.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _schedule_chunk(self, request: LlmRequest, batch: ScheduledRequests) -> bool:
        """Add the request's next prompt chunk to the batch; False if it does not fit."""
        start = request.context_current_position
        room = self.max_num_tokens - batch.num_tokens - self.plan.chunk_tokens(start, 0)
        if room < 1:
            return False
        chunk = self.chunk_policy(request, room)
        if not isinstance(chunk, int):
            raise ExecutorError(
                f"chunk_policy: expected a length from 1 to {room}, got {format_value(chunk)}"
            )
        chunk = min(max(chunk, 1), room, request.context_remaining_length)
        whole = chunk == request.context_remaining_length
        if not (self.chunking or whole or request.num_preemptions):
            return False
        if not self._reserve_or_pause(request, self.prompt_rows(request, start + chunk), batch):
            return False
        request.context_chunk_size = chunk
        batch.context_requests.append(request)
        batch.num_tokens += self.plan.chunk_tokens(start, chunk)
        return True

    def _reserve_or_pause(self, request: LlmRequest, rows: int, batch: ScheduledRequests) -> bool:
        """Reserve rows, pausing younger requests as needed; False if the request itself was
        paused."""
        while not self.blocks.try_reserve(request.request_id, rows):
            victim = self.active[-1]
            self._pause(victim, batch)
            if victim is request:
                return False
        return True

    def _pause(self, request: LlmRequest, batch: ScheduledRequests) -> None:
        self.active.remove(request)
        if request in batch.generation_requests:
            batch.generation_requests.remove(request)
            batch.num_tokens -= self.plan.step_rows
        elif request in batch.context_requests:
            batch.context_requests.remove(request)
            start, chunk = request.context_current_position, request.context_chunk_size
            batch.num_tokens -= self.plan.chunk_tokens(start, chunk)
        self.blocks.free_resources(request)
        request.pause()
        batch.paused_requests.append(request)
        self.waiting.appendleft(request)

    def _admit(self, batch: ScheduledRequests) -> None:
        """Start waiting requests while there is room; those paused in this step keep waiting."""
        while self.waiting and len(self.active) < self.max_batch_size:
            request = self.waiting[0]
            if request in batch.paused_requests:
                return
            budget = self.max_num_tokens - batch.num_tokens
            if not self.chunking and request.num_preemptions == 0:
                fits = self.plan.chunk_tokens(0, request.context_length) <= budget
            else:
                fits = budget >= 1
            # require room for the prompt and a first generation, else it would be paused at once
            rows = self.plan.rows_to_reserve(request.context_length, in_flight=True)
            needed = self.blocks.blocks_for(min(rows, request.max_length))
            if not fits or needed > self.blocks.num_free_blocks:
                return
            self.waiting.popleft()
            self.active.append(request)
            if not self._schedule_chunk(request, batch):
                # nothing was reserved for it: it stays first in the queue
                if request in self.active:
                    self.active.remove(request)
                    self.waiting.appendleft(request)
                return
