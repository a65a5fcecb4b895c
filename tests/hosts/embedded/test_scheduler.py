"""Who runs in a step: budget, chunks, blocks, preemption, order; and random schedules of it."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_plugin.hosts.embedded import LlmRequest, SamplingParams
from mtp_plugin.hosts.embedded.kv_cache import BlockManager
from mtp_plugin.hosts.embedded.scheduler import ScheduledRequests, Scheduler
from mtp_plugin.plugin import DraftPlan
from mtp_plugin.requests.states import FinishReason

EAGLE = DraftPlan(max_draft_len=3, num_draft_layers=1, loop_rows=2)
VANILLA = DraftPlan(max_draft_len=3, num_draft_layers=3, history_rows=3)
PLAIN = DraftPlan(max_draft_len=0)
PLANS = [pytest.param(p, id=n) for p, n in ((EAGLE, "eagle"), (VANILLA, "vanilla"), (PLAIN, "off"))]


def make(request_id: int, prompt: int, new: int = 20, max_seq_len: int = 1000) -> LlmRequest:
    params = SamplingParams(max_new_tokens=new)
    return LlmRequest(request_id, [0] * prompt, params, max_draft_len=3, max_seq_len=max_seq_len)


def scheduler(plan: DraftPlan = EAGLE, *, blocks: int = 100, block_size: int = 4, **options: Any):
    return Scheduler(
        plan,
        BlockManager(blocks, block_size),
        **{"max_batch_size": 8, "max_num_tokens": 64, **options},
    )


def waiting(of: Scheduler, *requests: LlmRequest) -> list[LlmRequest]:
    of.waiting.extend(requests)
    return list(requests)


def run(of: Scheduler, *requests: LlmRequest) -> ScheduledRequests:
    """One step that reads the scheduled chunks; ``requests`` are added before it."""
    waiting(of, *requests)
    batch = of.schedule(set())
    for request in batch.context_requests:
        request.move_to_next_context_chunk()
    return batch


def ids(requests: list[LlmRequest]) -> list[int]:
    return [request.request_id for request in requests]


# --- the rule for KV rows ---


@pytest.mark.parametrize(
    ("plan", "in_flight", "new", "limit", "rows"),
    [
        (EAGLE, False, 20, 1000, 10 + 4 + 2),
        (EAGLE, True, 20, 1000, 10 + 4 + 4 + 2),
        (EAGLE, True, 9, 1000, 20),  # no row past the full length
        (EAGLE, True, 8, 1000, 19),
        (EAGLE, True, 20, 13, 13),
        (VANILLA, False, 20, 1000, 10 + 4),
        (VANILLA, True, 20, 1000, 10 + 4 + 4),
        (PLAIN, False, 20, 1000, 10 + 1),
        (PLAIN, True, 20, 1000, 10 + 1 + 1),
    ],
)
def test_rows_of_a_generation(
    plan: DraftPlan, in_flight: bool, new: int, limit: int, rows: int
) -> None:
    """L rows are final; a step touches K+1, eagle K-1 more, a step in flight K+1 before that."""
    request = make(0, 11, new, max_seq_len=limit)  # the last token's row is not written: L = 10
    assert scheduler(plan).generation_rows(request, in_flight=in_flight) == rows


@pytest.mark.parametrize(
    ("plan", "new", "rows"), [(EAGLE, 20, 8), (EAGLE, 1, 7), (VANILLA, 20, 6), (PLAIN, 1, 6)]
)
def test_rows_of_a_prompt_chunk(plan: DraftPlan, new: int, rows: int) -> None:
    """Eagle's loop writes K-1 rows after the prompt, where the request is that long."""
    assert scheduler(plan).prompt_rows(make(0, 6, new), 6) == rows


# --- the token budget ---


def test_a_generation_costs_k_plus_one_whatever_its_drafts() -> None:
    """R16: requests without drafts still take K+1 rows of the step."""
    of = scheduler(EAGLE, max_num_tokens=16)
    first, second = make(0, 3), make(1, 3)
    run(of, first, second)
    assert first.py_draft_tokens == []
    batch = run(of, make(2, 50))
    assert ids(batch.generation_requests) == [0, 1]
    assert batch.context_requests[0].context_current_position == 16 - 2 * 4


# --- chunks ---


@pytest.mark.parametrize(
    ("answer", "chunks"), [(100, [16, 4]), (16, [16, 4]), (7, [7, 7, 6]), (0, [1] * 20)]
)
def test_chunk_policy_is_held_to_what_fits(answer: int, chunks: list[int]) -> None:
    of = scheduler(EAGLE, max_num_tokens=16, chunk_policy=lambda *_: answer)
    request = make(0, 20)
    of.waiting.append(request)
    positions = [0]
    while not request.is_generating:
        run(of)
        positions.append(request.context_current_position)
    assert [b - a for a, b in itertools.pairwise(positions)] == chunks


def test_unchunked_prompts_wait_for_a_step_that_holds_them() -> None:
    of = scheduler(EAGLE, max_num_tokens=16, chunking=False)
    run(of, make(0, 10))
    batch = run(of, make(1, 14), make(2, 2))
    assert ids(batch.generation_requests) == [0]
    assert batch.context_requests == []  # first come, first served: 2 does not overtake 1
    of.active[0].finish_by(FinishReason.LENGTH)
    of.remove(of.active[0])
    assert ids(run(of).context_requests) == [1, 2]


def test_an_unchunked_request_that_starts_over_may_be_cut() -> None:
    of = scheduler(EAGLE, max_num_tokens=16, chunking=False)
    request = make(0, 15)
    run(of, request)
    for _ in range(5):
        request.add_new_token(0)
    of._pause(request, ScheduledRequests())
    assert request.context_length == 20
    run(of)
    assert request.context_current_position == 16


# --- prompts while requests generate ---


def chunks_of(batch: ScheduledRequests) -> dict[int, int]:
    return {r.request_id: r.context_chunk_size for r in batch.context_requests}


def scheduled_chunks(of: Scheduler, *requests: LlmRequest) -> list[dict[int, int]]:
    """Chunks by request id of every step until all prompts are processed."""
    waiting(of, *requests)
    steps = []
    while of.waiting or not all(r.is_generating for r in of.active):
        batch = of.schedule(set())
        steps.append(chunks_of(batch))
        for request in batch.context_requests:
            request.move_to_next_context_chunk()
    return steps


# --- blocks run short ---


def busy(blocks: int) -> Scheduler:
    """Three generations that hold a block each and need two for their next step."""
    of = scheduler(EAGLE, blocks=blocks, block_size=8)
    run(of, *(make(i, 4, 40) for i in range(3)))
    assert ids(of.active) == [0, 1, 2]
    assert of.blocks.num_free_blocks == blocks - 3
    return of


def test_paused_requests_come_back_before_newer_ones() -> None:
    of = busy(blocks=5)
    waiting(of, make(9, 1, 1))
    of.schedule(set())
    for request in list(of.active):
        request.finish_by(FinishReason.LENGTH)
        of.blocks.free_resources(request)
        of.remove(request)
    assert ids(run(of).context_requests) == [2, 9]


def test_a_scheduled_chunk_gives_way_too() -> None:
    of = scheduler(EAGLE, blocks=4, block_size=8, chunk_policy=lambda *_: 8)
    old, young = make(0, 8, 40), make(1, 16, 40)
    run(of, old)
    of.active.append(young)
    young.context_chunk_size = 8
    of.blocks.reserve(1, 16)
    batch = ScheduledRequests(context_requests=[young], num_tokens=8)
    assert of._reserve_or_pause(old, 24, batch)
    assert (batch.context_requests, ids(batch.paused_requests)) == ([], [1])
    assert (young.context_chunk_size, batch.num_tokens) == (0, 0)


def test_paused_generation_returns_its_tokens_to_the_budget() -> None:
    """A prompt that pauses a younger generation leaves its K+1 tokens to the next prompt."""
    chunks = [1, 1, 9]
    of = scheduler(
        EAGLE,
        blocks=24,
        block_size=4,
        max_num_tokens=16,
        chunk_policy=lambda request, _: chunks[request.request_id],
    )
    run(of, make(0, 40), make(1, 40), make(2, 9))
    assert [request.is_generating for request in of.active] == [False, False, True]
    of.blocks.reserve(9, 4 * (of.blocks.num_free_blocks - 2))
    chunks = [8, 8, 9]
    batch = of.schedule(set())
    assert (ids(batch.paused_requests), batch.generation_requests) == ([2], [])
    assert ids(batch.context_requests) == [0, 1]
    assert [request.context_chunk_size for request in batch.context_requests] == [8, 8]
    assert batch.num_tokens == 16


@pytest.mark.parametrize(("blocks", "new", "admitted"), [(3, 40, 0), (4, 40, 1), (2, 2, 1)])
def test_admission_needs_room_for_a_first_generation(blocks: int, new: int, admitted: int) -> None:
    """Else the request would be paused as soon as it generates; a short one needs its length."""
    # 6 + (K+1) + (K+1) + (K-1) = 16 rows: four blocks
    assert run(scheduler(EAGLE, blocks=blocks), make(0, 6, new)).batch_size == admitted


def test_a_request_that_the_step_in_flight_ends_is_not_scheduled() -> None:
    of = scheduler(EAGLE)
    request = make(0, 4, 1)
    run(of, request)
    assert of.schedule({0}).batch_size == 0
    assert of.schedule(set()).batch_size == 1


# --- random schedules ---


@dataclass
class Host:
    """Runs a scheduler as the executor does, with random acceptance instead of a model."""

    scheduler: Scheduler
    overlap: bool
    rng: random.Random
    seen: list[int] = field(default_factory=list)
    """Ids in the order of their first chunk."""
    launched: list[tuple[LlmRequest, int, int]] = field(default_factory=list)
    """(request, epoch, emitted tokens) of the step whose result is not known yet."""

    def step(self) -> ScheduledRequests:
        in_flight = {
            r.request_id: count
            for r, epoch, count in self.launched
            if r.py_epoch == epoch and not r.is_finished
        }
        active = list(self.scheduler.active)
        batch = self.scheduler.schedule(set(in_flight))
        self.check(batch, active, in_flight)
        launched, self.launched = self.launched, [self.launch(r) for r in batch.all_requests()]
        for request in batch.context_requests:
            request.move_to_next_context_chunk()
        self.receive(launched if self.overlap else self.launched)
        if not self.overlap:
            self.launched = []
        return batch

    def launch(self, request: LlmRequest) -> tuple[LlmRequest, int, int]:
        if request.is_generating:
            emitted = self.rng.randint(1, self.scheduler.plan.step_rows)
        else:
            emitted = int(request.is_last_context_chunk)
        return request, request.py_epoch, emitted

    def receive(self, results: list[tuple[LlmRequest, int, int]]) -> None:
        for request, epoch, emitted in results:
            for _ in range(emitted if request.py_epoch == epoch else 0):
                if request.is_finished:
                    break
                request.add_new_token(0)
                if request.get_num_tokens() == request.max_length:
                    self.finish(request, FinishReason.LENGTH)

    def finish(self, request: LlmRequest, reason: FinishReason) -> None:
        request.finish_by(reason)
        self.scheduler.blocks.free_resources(request)
        self.scheduler.remove(request)

    def check(
        self, batch: ScheduledRequests, active: list[LlmRequest], in_flight: dict[int, int]
    ) -> None:
        of, plan, blocks = self.scheduler, self.scheduler.plan, self.scheduler.blocks
        assert batch.batch_size <= len(of.active) <= of.max_batch_size
        assert len(set(ids(batch.all_requests()))) == batch.batch_size
        cost = plan.step_rows * len(batch.generation_requests)
        for request in batch.context_requests:
            assert 1 <= request.context_chunk_size <= request.context_remaining_length
            start = request.context_current_position
            cost += request.context_chunk_size + min(plan.history_rows, start)
            end = start + request.context_chunk_size
            touched = min(end + plan.loop_rows, request.max_length)
            assert blocks.reserved_rows(request.request_id) >= touched
            if start == 0 and not request.num_preemptions:
                self.seen.append(request.request_id)
        assert cost == batch.num_tokens <= of.max_num_tokens
        for request in batch.generation_requests:
            # the device knows the tokens in flight; the rows that it touches must be there
            pending = in_flight.get(request.request_id, 0)
            length = request.get_num_tokens() - 1 + pending
            touched = min(length + plan.step_rows + plan.loop_rows, request.max_length)
            assert blocks.reserved_rows(request.request_id) >= touched
        # the youngest was preempted, none was admitted
        kept = [r for r in active if r not in batch.paused_requests]
        assert active == kept + batch.paused_requests[::-1]
        if batch.paused_requests:
            assert of.active == kept
            assert not any(r in batch.all_requests() for r in batch.paused_requests)
        held = [b for r in of.active for b in blocks.table(r.request_id)]
        assert len(held) == len(set(held)) == blocks.num_blocks - blocks.num_free_blocks


arrivals = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 10), st.booleans()),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100)
@given(
    arrivals,
    st.sampled_from([EAGLE, VANILLA, PLAIN]),
    st.integers(1, 4),
    st.integers(0, 30),
    st.integers(1, 8),
    st.integers(0, 20),
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 1000),
)
def test_random_schedules(
    wanted: list[tuple[int, int, int, bool]],
    plan: DraftPlan,
    batch_size: int,
    spare_tokens: int,
    block_size: int,
    spare_blocks: int,
    chunks: list[int],
    overlap: bool,
    seed: int,
) -> None:
    """Budget and blocks hold in every step, everyone ends, in order of arrival they start."""
    rng = random.Random(seed)
    requests = [make(i, prompt, new) for i, (prompt, new, _, _) in enumerate(wanted)]
    longest = max(-(-request.max_length // block_size) for request in requests)
    blocks = BlockManager(longest + spare_blocks, block_size)
    of = Scheduler(
        plan,
        blocks,
        max_batch_size=batch_size,
        max_num_tokens=batch_size * plan.step_rows + spare_tokens,
        chunk_policy=lambda r, room: min(room, chunks[r.context_current_position % len(chunks)]),
    )
    host = Host(of, overlap, rng)
    arriving = sorted(range(len(wanted)), key=lambda i: (wanted[i][2], i))
    started = list(arriving)
    step = 0
    while arriving or of.active or of.waiting or host.launched:
        while arriving and wanted[arriving[0]][2] <= step:
            of.waiting.append(requests[arriving.pop(0)])
        host.step()
        for request, (_, _, arrives, aborts) in zip(requests, wanted, strict=True):
            live = request in of.active or request in of.waiting
            if aborts and live and step > arrives and rng.random() < 0.2:
                host.finish(request, FinishReason.CANCELLED)
        step += 1
        assert step < 3000, "somebody starves"
    assert all(request.is_finished for request in requests)
    assert blocks.num_free_blocks == blocks.num_blocks
    assert host.seen == [i for i in started if i in host.seen]
