"""Steps in graphs: what is replayed, what runs eagerly, and that neither shows.

Without a GPU the graphs are substitutes that launch their step again (`replays.EagerReplays`).
"""

from __future__ import annotations

import dataclasses
import gc
import random
import threading
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from mtp_plugin.errors import ConfigError, ExecutorError, MetadataError, RequestError
from mtp_plugin.hosts.embedded import (
    SamplingParams,
    engine,
    row_table,
)
from mtp_plugin.hosts.embedded.cuda_graphs import CAPTURE_AT_STEP
from mtp_plugin.hosts.embedded.row_table import Row, RowTable, StepShape
from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.requests.stopping import MAX_STOP_IDS
from mtp_plugin.speculative.drafting.attention_loop import DraftLoop
from mtp_plugin.speculative.drafting.trace_check import DeferredCheck
from tests.hosts.embedded.conftest import (
    VOCAB,
    WORKERS,
    assert_drained,
    assert_idle,
    pads_batches,
    run_steps,
    wait_until,
)
from tests.hosts.embedded.replays import EagerReplays, WatchedGraphs

K = 3


def greedy(num_tokens: int = 16, **options) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": num_tokens, "ignore_eos": True, **options})


def never_emitted(texts: list[list[int]], count: int) -> tuple[int, ...]:
    absent = sorted(set(range(VOCAB)) - {token for text in texts for token in text})
    assert len(absent) >= count
    return tuple(absent[:count])


@pytest.fixture
def graphed(harness, monkeypatch):
    """Executors of ``harness`` whose steps run in graphs, by default of 1 and 8 requests."""
    pads_batches(harness)

    def build(sizes=(1, 8), padding: bool = True, capture="all", **options) -> WatchedGraphs:
        graphs = {
            "batch_sizes": list(sizes),
            "enable_padding": padding,
            "capture": capture,
            "prompt_tokens": [],
        }
        return WatchedGraphs(harness.llm(cuda_graph_config=graphs, **options), monkeypatch)

    return build


# --- text ---


SAMPLED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize(
    ("requested", "graph"),
    [
        ([{}, {}], SamplingKind.GREEDY),
        ([SAMPLED, {}], SamplingKind.SAMPLED),
        ([SAMPLED, {**SAMPLED, "logprobs": 0}], SamplingKind.SAMPLED),
        ([{"logprobs": 2}, {}], SamplingKind.SAMPLED),
        ([{"repetition_penalty": 1.1}, {}], SamplingKind.PROCESSED),
    ],
    ids=["greedy", "one-draws", "logprobs", "logprobs-alone", "one-penalty"],
)
def test_batches_run_in_the_graph_of_what_they_ask_for(graphed, prompts, requested, graph):
    """Three of every size and draft length: who is greedy never pays for what others may ask."""
    watched = graphed(sizes=(2,))
    kinds = [shape.sampling_kind for shape in watched.captured.shapes]
    assert Counter(kinds) == dict.fromkeys(SamplingKind, 1)
    watched.generate(prompts[:2], [greedy(**options) for options in requested])
    replayed = {shape.sampling_kind for shape in watched.replayed}
    assert replayed == {graph}
    assert not watched.eager_generations


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r02_graphs_change_no_statistics(graphed, harness, prompts, vanilla):
    """R02: with and without graphs, alone and together: the same drafts are accepted."""
    recorded = []
    for batch in ([prompts[5]], prompts):
        without = harness.llm(vanilla=vanilla, cuda_graph_config=None)
        eager = without.generate(batch, greedy(24))
        watched = graphed(vanilla=vanilla)
        replayed = watched.llm.generate(batch, greedy(24))
        assert watched.replayed
        assert [o.token_ids for o in replayed] == [o.token_ids for o in eager]
        assert [o.acceptance for o in replayed] == [o.acceptance for o in eager]
        assert watched.llm.executor.acceptance == without.executor.acceptance
        recorded.append(replayed)
    assert recorded[0][0].acceptance == recorded[1][5].acceptance
    assert sum(o.acceptance.emitted - o.acceptance.steps for o in recorded[1]) > 8


@pytest.mark.parametrize("vanilla", WORKERS)
def test_r11_slots_and_blocks_are_reused_while_their_last_step_runs(graphed, target, vanilla):
    """R11: requests end while the next step runs with their slot and blocks, which the next
    request gets at once; some are cancelled, some paused."""
    rng = random.Random(4)
    watched = graphed(
        sizes=(1, 2, 3),
        vanilla=vanilla,
        max_batch_size=3,
        max_seq_len=32,
        kv_cache_config={"tokens_per_block": 4, "max_tokens": 36},
        kv_fill=float("nan"),
    )
    executor, handed_out = watched.llm.executor, []
    add_slot = watched.llm.seq_slots.slots.add_slot

    def note(request_id):
        handed_out.append((add_slot(request_id), request_id))
        return handed_out[-1][0]

    watched.llm.seq_slots.slots.add_slot = note
    texts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 3, 6, 9)]
    requested = []
    for _ in range(20):
        prompt = rng.choice(texts)
        request = watched.llm.make_request(prompt, greedy(rng.randint(1, 16)))
        executor.enqueue(request)
        requested.append((prompt, request))
        for _ in range(rng.randint(0, 3)):
            executor.step()
        if rng.random() < 0.15:
            executor.cancel(rng.choice(requested)[1].request_id)
    run_steps(watched.llm)
    for prompt, request in requested:
        want = target.greedy(prompt, request.params.max_new_tokens)
        output = request.output_token_ids
        assert output == (want if len(output) == len(want) else want[: len(output)])
        assert len(output) == len(want) or request.finish_reason.name == "CANCELLED"
    assert len({i for slot, i in handed_out if slot == 0}) > 5
    assert executor.num_preemptions > 0
    assert watched.replayed
    assert_drained(watched.llm)


# --- what falls back ---


@pytest.mark.parametrize(
    ("sizes", "padding", "eager", "replayed"),
    [((1, 2), True, {3, 4, 5}, {1, 2}), ((2, 4), False, {1, 3, 5}, {2, 4})],
    ids=["above-the-largest", "without-padding"],
)
def test_batches_without_a_graph_run_eagerly(
    graphed, target, prompts, sizes, padding, eager, replayed
):
    watched = graphed(sizes=sizes, padding=padding)
    tokens = (4, 8, 12, 16, 20)
    want = [target.greedy(p, n) for p, n in zip(prompts, tokens, strict=False)]
    assert watched.generate(prompts[:5], [greedy(n) for n in tokens]) == want
    assert {shape.num_generations for shape in watched.eager_generations} == eager
    assert {shape.num_generations for shape in watched.replayed} == replayed


def test_more_stop_ids_than_a_slot_holds_run_in_graphs(graphed, target, prompts):
    """Nothing on the device reads them: the sampler stops the request."""
    watched = graphed()
    few = prompts[:3]
    free = [target.greedy(p, 16) for p in few]
    stop = free[0][6]
    stops = (*never_emitted(free, MAX_STOP_IDS), stop)
    params = greedy(stop_token_ids=stops)
    assert watched.generate(few, params) == [target.greedy(p, 16, stop=stops) for p in few]
    mixed = [params, greedy(), greedy()]
    want = [target.greedy(few[0], 16, stop=stops), *free[1:]]
    assert watched.generate(few, mixed) == want
    assert watched.replayed
    assert not watched.eager_generations
    # held back they would have to be known there
    with pytest.raises(RequestError, match="33 ids that end the text"):
        watched.generate(few, greedy(stop_token_ids=stops, min_tokens=4))


def test_every_draft_length_has_its_graphs(graphed, target):
    watched = graphed(
        sizes=(1, 2, 4, 8),
        speculative={"draft_len_schedule": {2: K, 4: 1}},
        mtp={"keep_warm": False},
        kv_fill=float("nan"),
    )
    # a batch that can use less than was chosen runs with that less
    lengths = {1: {0, 1, K}, 2: {0, 1, K}, 4: {0, 1}, 8: {0}}
    captured = {
        (s.num_generations, s.draft_len, bool(s.sampling_kind)) for s in watched.captured.shapes
    }
    assert captured == {(n, k, m) for n, ks in lengths.items() for k in ks for m in (False, True)}
    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 9))] for _ in range(9)]
    executor = watched.llm.executor
    requests = []
    for wave, num_tokens in ((prompts[:2], 30), (prompts[2:4], 8), (prompts[4:], 6)):
        for prompt in wave:
            request = watched.llm.make_request(prompt, greedy(num_tokens))
            executor.enqueue(request)
            requests.append((prompt, request))
        for _ in range(3):
            executor.step()
    run_steps(watched.llm)
    for prompt, request in requests:
        assert request.output_token_ids == target.greedy(prompt, request.params.max_new_tokens)
    assert {shape.draft_len for shape in watched.replayed} == {0, 1, K}
    assert not watched.eager_generations


# --- lazy capture ---

PENALTY = {"repetition_penalty": 1.1}


def test_graphs_of_logits_processing_are_captured_when_idle(graphed, harness, prompts):
    want = harness.llm(cuda_graph_config=None).generate(prompts[:3], greedy(**PENALTY))
    watched = graphed(capture="lazy")
    captured = watched.captured
    deferred = [StepShape((), size, K, SamplingKind.PROCESSED) for size in (8, 1)]
    first = captured.shapes[:4]
    assert [shape.num_generations for shape in first] == [8, 1, 8, 1]
    kinds = [SamplingKind.GREEDY] * 2 + [SamplingKind.SAMPLED] * 2
    assert [shape.sampling_kind for shape in first] == kinds
    watched.llm.capture_when_idle()
    assert wait_until(lambda: not captured.pending, seconds=120.0)  # compiles on a GPU
    assert wait_until(lambda: captured.shapes == [*first, *deferred])
    assert watched.generate(prompts[:3], greedy(**PENALTY)) == [o.token_ids for o in want]
    assert {shape.sampling_kind for shape in watched.replayed} == {SamplingKind.PROCESSED}
    assert not watched.eager_generations


def test_busy_executor_captures_at_the_fourth_step_of_a_shape(
    graphed, harness, prompts, monkeypatch
):
    monkeypatch.setattr(engine, "IDLE_SECONDS", 60.0)
    want = harness.llm(cuda_graph_config=None).generate(prompts[:2], greedy(**PENALTY))
    watched = graphed(sizes=(2,), capture="lazy")
    assert watched.generate(prompts[:2], greedy(**PENALTY)) == [o.token_ids for o in want]
    replayed = {shape for shape in watched.replayed if shape.sampling_kind.value == 2}
    assert replayed == {StepShape((), 2, K, SamplingKind.PROCESSED)}
    assert watched.eager_generations == [*replayed] * (CAPTURE_AT_STEP - 1)
    assert not watched.captured.pending


def test_graph_that_cannot_be_captured_later_leaves_the_step_eager(
    graphed, prompts, monkeypatch, caplog
):
    monkeypatch.setattr(engine, "IDLE_SECONDS", 60.0)
    watched = graphed(sizes=(1, 2), capture="lazy")

    def fail(_):
        raise ConfigError("cuda_graph_config: out of memory")

    monkeypatch.setattr(watched.captured, "capture", fail)
    assert all(map(len, watched.generate(prompts[:2], greedy(**PENALTY))))
    assert watched.captured.pending == []
    assert not any(shape.sampling_kind is SamplingKind.PROCESSED for shape in watched.replayed)
    (record,) = [r for r in caplog.records if r.name == "mtp_plugin.hosts.embedded.cuda_graphs"]
    assert record.getMessage() == (
        "ConfigError: cuda_graph_config: out of memory; steps of this shape, and of 1 shapes that "
        "were not captured yet, run eagerly"
    )


def test_steps_without_speculating_requests_get_a_graph_when_they_need_it(
    graphed, target, prompts, monkeypatch
):
    monkeypatch.setattr(engine, "IDLE_SECONDS", 60.0)
    watched = graphed(sizes=(1, 2))
    planned = len(watched.captured.shapes)
    drafting, silent = greedy(), greedy(speculate=False)
    (output,) = watched.generate(prompts[:1], silent)
    assert output == target.greedy(prompts[0], 16)
    assert [shape.draft_len for shape in watched.eager_generations] == [0] * (CAPTURE_AT_STEP - 1)
    assert [shape.draft_len for shape in watched.replayed] == [0] * (16 - CAPTURE_AT_STEP)
    assert len(watched.captured.shapes) == planned + 1
    expected = [target.greedy(prompt, 16) for prompt in prompts[:2]]
    assert watched.generate(prompts[:2], [drafting, silent]) == expected
    assert {shape.draft_len for shape in watched.replayed} == {0, K}


def test_requests_come_before_the_next_capture(graphed, prompts, monkeypatch):
    watched = graphed(capture="lazy")
    monkeypatch.setattr(engine, "IDLE_SECONDS", 0.01)
    captured, captures = watched.captured, []
    is_capturing, may_end = threading.Event(), threading.Event()

    def capture(shape):
        captures.append(shape)
        is_capturing.set()
        may_end.wait(20)

    monkeypatch.setattr(captured, "capture", capture)
    watched.llm.capture_when_idle()
    assert is_capturing.wait(20)
    handle = watched.llm.submit(prompts[0], greedy(4))
    monkeypatch.setattr(engine, "IDLE_SECONDS", 60.0)
    may_end.set()
    assert len(handle.result().token_ids) == 4
    assert len(captures) == 1
    assert captured.pending
    monkeypatch.setattr(engine, "IDLE_SECONDS", 0.01)
    watched.llm.capture_when_idle()
    assert wait_until(lambda: len(captures) == 2)


class Compilation:
    """Of the kernels of pending graphs, which takes as long as a test wants."""

    is_done = False
    is_closed = False

    def wait(self) -> None:
        self.is_done = True

    def close(self) -> None:
        self.is_closed = True


def test_graphs_of_logits_processing_wait_for_their_kernels(graphed, monkeypatch):
    monkeypatch.setattr(engine, "IDLE_SECONDS", 0.001)
    watched = graphed(capture="lazy")
    captured, compilation, answers = watched.captured, Compilation(), []
    captured.defer(captured.pending, compilation)
    processed = [s for s in captured.pending if s.sampling_kind is SamplingKind.PROCESSED]
    capture_next = captured.capture_next
    monkeypatch.setattr(captured, "capture_next", lambda: answers.append(capture_next()))
    watched.llm.capture_when_idle()
    assert wait_until(lambda: answers.count(False) > 3)
    assert captured.pending == processed
    compilation.is_done = True
    assert wait_until(lambda: not captured.pending, seconds=120.0)  # compiles on a GPU


def test_requests_wait_for_their_kernels_and_others_go_on(graphed, target, prompts, monkeypatch):
    monkeypatch.setattr(engine, "IDLE_SECONDS", 60.0)
    watched = graphed(capture="lazy")
    compilation = Compilation()
    watched.captured.defer(watched.captured.pending, compilation)
    waits = watched.llm.submit(prompts[0], greedy(4, **PENALTY))
    left = watched.llm.submit(prompts[1], greedy(4, **PENALTY))
    assert watched.generate(prompts[2:4], greedy(6)) == [target.greedy(p, 6) for p in prompts[2:4]]
    assert not waits.is_finished
    assert watched.llm.executor.num_waiting == 2
    left.abort()
    assert left.result().finish_reason == "abort"
    assert watched.llm.executor.num_waiting == 1
    compilation.is_done = True
    without = [
        output.token_ids for output in watched.llm.generate([prompts[0]], greedy(4, **PENALTY))
    ]
    assert [waits.result().token_ids] == without
    assert_drained(watched.llm)


def test_shutdown_ends_the_compilation(graphed):
    watched = graphed(capture="lazy")
    compilation = Compilation()
    watched.captured.defer(watched.captured.pending, compilation)
    watched.llm.shutdown()
    assert compilation.is_closed


def test_no_graph_is_captured_while_other_threads_may_use_the_device(graphed, monkeypatch):
    monkeypatch.setattr(engine, "IDLE_SECONDS", 0.001)
    watched = graphed(capture="lazy")
    watched.llm._engine.wake()
    pending = watched.captured.pending
    assert not wait_until(lambda: watched.captured.pending != pending, seconds=0.3)


def test_dropped_executor_is_freed_without_the_collector(graphed, prompts):
    """Objects that `gc_freeze` excludes from collection while another executor exists are freed."""
    watched = graphed()
    watched.generate(prompts[:1], greedy(4))
    assert_idle(watched.llm)
    llm = watched.llm
    parts = [weakref.ref(part) for part in (llm, llm.executor, llm.executor.engine)]
    if not isinstance(watched.captured, EagerReplays):  # these keep functions that launch steps
        parts.append(weakref.ref(llm.pools))
    del watched.captured.replay  # the watch
    watched.llm = watched.captured = None
    gc.collect()
    gc.disable()
    try:
        del llm
        assert wait_until(lambda: not any(part() for part in parts))
    finally:
        gc.enable()


def test_pending_graphs_keep_nothing_alive(graphed, prompts, monkeypatch):
    monkeypatch.setattr(engine, "IDLE_SECONDS", 60.0)
    watched = graphed(capture="lazy")
    watched.generate(prompts[:1], greedy(4))
    llm, thread = watched.llm, watched.llm._engine._thread
    del watched.captured.replay  # the watch
    watched.llm = watched.captured = None
    parts = [weakref.ref(part) for part in (llm, llm.executor, llm.pools)]
    del llm

    def has_ended() -> bool:
        gc.collect()  # while the thread is in its last step, it keeps the engine alive
        thread.join(0.1)
        return not thread.is_alive()

    assert wait_until(has_ended)
    gc.collect()
    assert [part() for part in parts] == [None] * 3


# --- set-up, failures and the end ---


def test_every_replay_verifies_its_deferred_checks(graphed, target, prompts):
    """Fields before and after the loop lie in the graph's memory; a replay writes both."""
    watched = graphed()
    before, after = torch.tensor([3, 4]), torch.tensor([3, 4])
    check = DeferredCheck("kv_lens_cuda", before, after)
    steps = watched.captured._steps
    steps.update(
        {shape: dataclasses.replace(step, checks=[check]) for shape, step in steps.items()}
    )
    assert watched.generate(prompts[:2], greedy(6)) == [target.greedy(p, 6) for p in prompts[:2]]
    after[1] = 5
    with pytest.raises(MetadataError, match=r"the draft loop left changes in: kv_lens_cuda"):
        watched.generate(prompts[:2], greedy(6))
    assert_drained(watched.llm)


@pytest.mark.parametrize(
    ("name", "capture"),
    [
        ("mtp_past_tokens_pool", "lazy"),
        ("a KV pool", "all"),
    ],
)
def test_pool_replaced_after_capture_is_refused(
    graphed, target, prompts, monkeypatch, name: str, capture: str
):
    monkeypatch.setattr(engine, "IDLE_SECONDS", 60.0)
    watched = graphed(vanilla=True, capture=capture)
    llm = watched.llm
    manager, pools = llm.pieces.manager, llm.executor.engine.pools
    if name == "a KV pool":
        owner, attribute = pools, "_layers"
        other = {layer: (k.clone(), v.clone()) for layer, (k, v) in pools._layers.items()}
    else:
        owner, attribute, other = manager, name, getattr(manager, name).clone()
    captured = getattr(owner, attribute)
    setattr(owner, attribute, other)
    # a later capture does not hide it
    assert watched.captured.capture_next() or capture == "all"
    with pytest.raises(ExecutorError, match=rf"^CUDA graphs: {name} was replaced after capture"):
        watched.generate(prompts[:2], greedy(6))
    assert_drained(llm)
    setattr(owner, attribute, captured)
    assert watched.generate(prompts[:2], greedy(6)) == [target.greedy(p, 6) for p in prompts[:2]]


def test_a_step_that_fails_poisons_nothing(graphed, target, prompts):
    watched = graphed(kv_fill=float("nan"))
    executor = watched.llm.executor
    replay, calls = watched.captured.replay, []

    def replay_and_fail(shape, rows):
        outputs = replay(shape, rows)
        calls.append(shape)
        if len(calls) in (3, 7):
            raise RuntimeError("made to fail after the launch")
        return outputs

    watched.captured.replay = replay_and_fail
    for _ in range(2):
        with pytest.raises(RuntimeError, match="made to fail"):
            watched.generate(prompts, greedy())
        assert_drained(watched.llm)
        assert not executor.has_work
    assert watched.generate(prompts, greedy()) == [target.greedy(p, 16) for p in prompts]


def test_shutdown_frees_graphs_and_kv(graphed, prompts):
    watched = graphed()
    watched.generate(prompts[:2], greedy(4))
    engine = watched.llm.executor.engine
    assert engine.pools.num_bytes() > 0
    watched.llm.shutdown()
    watched.llm.shutdown()
    assert engine.captured is None
    assert engine.pools.num_bytes() == 0


def test_what_graphs_need_of_a_plugin(harness):
    engine = harness.llm().executor.engine
    pieces = engine.pieces
    plain_sampler = SimpleNamespace(sample_async=print, update_requests=print)
    for name, without in (
        ("device_store", {"sampler": plain_sampler}),
        ("make_graph_metadata", {"make_graph_metadata": None}),
    ):
        engine.pieces = dataclasses.replace(pieces, **without)
        with pytest.raises(ConfigError, match=f"expected null with pieces that have no {name}"):
            engine.capture([StepShape((), 1, K)], lambda _: None)


def test_ones_that_a_graph_reads_are_kept():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lens = torch.zeros(3, dtype=torch.int16, device=device)
    address = DraftLoop._ones_like(lens).data_ptr()
    many = DraftLoop._ones_like(torch.zeros(500, dtype=torch.int16, device=device))
    assert many.tolist() == [1] * 500
    assert DraftLoop._ones_like(lens).tolist() == [1] * 3
    held = DraftLoop._ones[lens.device, torch.int16]
    assert address in [ones.data_ptr() for ones in held]


def test_rows_hold_nothing_of_the_request_before():
    """Both buffers in turn: a place goes from a long request to a short one, and to padding."""
    table = RowTable(1, step_rows=1, table_width=4, sentinel_block=9, device=torch.device("cpu"))
    for blocks in ([1, 2, 3, 4], [5, 6], [1, 2, 3, 4], [1, 2], [], [2, 1, 3], [2, 1]):
        rows = table.upload([Row(tokens=[0], length=1, blocks=blocks)])
        assert rows.block_table.tolist() == [blocks + [9] * (4 - len(blocks))]


def test_rows_wait_for_the_copy_of_their_buffer(monkeypatch):
    """A failed step's results are never read, so its copy may still run when its buffer's turn
    comes again."""
    log: list[str] = []

    class CopyEvent:
        def __init__(self) -> None:
            self.number = sum(entry.startswith("copy") for entry in log)
            log.append(f"copy {self.number}")

        def synchronize(self) -> None:
            values = [int(rows[0, 0]) for rows in table._host_rows]
            log.append(f"wait {self.number} {values}")

    monkeypatch.setattr(row_table, "copy_event", lambda _: CopyEvent())
    table = RowTable(
        2,
        step_rows=1,
        table_width=1,
        sentinel_block=0,
        device=torch.device("cpu"),
    )
    for number in range(1, 5):
        table.upload([Row(tokens=[number], length=1)])
    # nothing was written over before its copy was over
    assert log == ["copy 0", "copy 1", "wait 0 [2, 1]", "copy 2", "wait 1 [2, 3]", "copy 3"]
