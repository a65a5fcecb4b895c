"""Where a step's time goes: marks in order, also where a graph replays them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from integration.bench.e2e import phases
from integration.bench.e2e.phases import (
    ACCEPTANCE,
    HEAD,
    LAYERS,
    PHASES,
    TARGET,
    DeviceClock,
    GapClock,
    HostClock,
    watch,
)
from integration.random_models import random_model
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.models import LoadedModel, fuse


class Recorder:
    """A clock that keeps the names of its marks."""

    def __init__(self) -> None:
        self.marks: list[str | None] = []

    def mark(self, phase: str | None) -> None:
        self.marks.append(phase)

    def begin(self) -> None:
        pass

    def read(self) -> None:
        return None


def ticking(*times: float):
    following = iter(times)
    return lambda: next(following)


def test_each_phase_lasts_until_the_next_mark() -> None:
    clock = HostClock(ticking(1.0, 1.5, 1.6, 1.8, 1.9, 2.0))
    for phase in (TARGET, ACCEPTANCE, LAYERS, HEAD, ACCEPTANCE, None):
        clock.mark(phase)
    assert clock.read() == pytest.approx(
        {TARGET: 500, ACCEPTANCE: 200, LAYERS: 200, HEAD: 100}, abs=1e-6
    )


def test_the_latest_step_counts() -> None:
    clock = HostClock(ticking(0.0, 1.0, 2.0, 5.0, 6.0, 8.0))
    for _ in range(2):
        for phase in (TARGET, ACCEPTANCE, None):
            clock.mark(phase)
    assert clock.read() == pytest.approx({TARGET: 1000, ACCEPTANCE: 2000, LAYERS: 0, HEAD: 0})


@pytest.mark.parametrize("marks", [(), (TARGET,), (TARGET, ACCEPTANCE), (ACCEPTANCE, None)])
def test_no_whole_step_has_no_phases(marks: tuple[str | None, ...]) -> None:
    clock = HostClock()
    for phase in marks:
        clock.mark(phase)
    assert clock.read() is None


def test_a_step_begun_anew_forgets_the_one_before() -> None:
    clock = HostClock()
    for phase in (TARGET, None):
        clock.mark(phase)
    clock.begin()
    assert clock.read() is None


# --- hooks ---


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return random_model("glm4_moe", num_mtp_layers=3, vocab_size=64, dtype=torch.float32)


def decode(model: LoadedModel, clock: Recorder | HostClock, **speculative) -> int:
    """Decode a prompt of one token; returns the number of executor steps."""
    config = {"model": "random", "max_seq_len": 32, "speculative_config": speculative or None}
    with watch(model, clock), LLM(config, model=model) as llm:
        if isinstance(clock, Recorder):
            clock.marks.clear()  # the executor measures the KV cache when it is made
        llm.generate([[3]], SamplingParams(max_new_tokens=8, ignore_eos=True))
        return llm.executor.num_steps


DEPTH = [LAYERS, ACCEPTANCE, HEAD, ACCEPTANCE]


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(
    ("speculative", "step"),
    [
        ({}, [TARGET, ACCEPTANCE, None]),
        (
            {"decoding_type": "MTP", "max_draft_len": 2},
            [TARGET, ACCEPTANCE, *DEPTH * 2, None],
        ),
        (
            {"decoding_type": "MTP", "max_draft_len": 3, "use_mtp_vanilla": True},
            [TARGET, ACCEPTANCE, *DEPTH * 3, None],
        ),
    ],
    ids=["off", "eagle", "vanilla"],
)
def test_the_marks_of_a_step(speculative, step, fused: bool) -> None:
    small = random_model("glm4_moe", num_mtp_layers=3, vocab_size=64, dtype=torch.float32)
    clock = Recorder()
    steps = decode(fuse(small) if fused else small, clock, **speculative)
    assert clock.marks == step * steps


def test_after_it_nothing_is_marked(model: LoadedModel) -> None:
    clock = Recorder()
    decode(model, clock, decoding_type="MTP", max_draft_len=2)
    clock.marks.clear()
    assert "forward_target" not in vars(model)
    assert not any("shared_head" in vars(layer) for layer in model.mtp_layers)
    config = {
        "model": "random",
        "max_seq_len": 32,
        "speculative_config": {"decoding_type": "MTP", "max_draft_len": 2},
    }
    with LLM(config, model=model) as llm:
        llm.generate([[3]], SamplingParams(max_new_tokens=4))
    assert clock.marks == []


def test_phases_of_a_real_step_add_up_to_less_than_it_took(model: LoadedModel) -> None:
    clock = HostClock()
    decode(model, clock, decoding_type="MTP", max_draft_len=2)
    spent = clock.read()
    assert set(spent) == set(PHASES)
    assert all(value > 0 for value in spent.values())
    assert sum(spent.values()) < 1000


# --- a device that is not there: events know when they were recorded ---


class Stream:
    """The time of a device, and the events of the graph that is being captured."""

    def __init__(self) -> None:
        self.now = 0.0
        self.graph: list[FakeEvent] | None = None

    def replay(self, graph: list[FakeEvent]) -> None:
        for event in graph:
            event.at = self.now
            self.now += 1.0


class FakeEvent:
    stream: Stream

    def __init__(self, enable_timing: bool, external: bool = False) -> None:
        assert enable_timing
        self.external = external
        self.at: float | None = None

    def record(self) -> None:
        if self.stream.graph is not None:
            assert self.external, "an event that is read after a capture must be external"
            self.stream.graph.append(self)
            return
        self.at = self.stream.now
        self.stream.now += 1.0

    def elapsed_time(self, end: FakeEvent) -> float:
        if self.at is None or end.at is None:
            raise RuntimeError("invalid resource handle")
        return end.at - self.at


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    FakeEvent.stream = Stream()
    cuda = SimpleNamespace(
        Event=FakeEvent,
        is_current_stream_capturing=lambda: FakeEvent.stream.graph is not None,
    )
    monkeypatch.setattr(phases.torch, "cuda", cuda)
    return FakeEvent.stream


STEP = (TARGET, ACCEPTANCE, LAYERS, ACCEPTANCE, None)


def captured(clock: DeviceClock, stream: Stream) -> list[FakeEvent]:
    for phase in STEP:  # an eager step warms up
        clock.mark(phase)
    stream.graph = graph = []
    for phase in STEP:
        clock.mark(phase)
    stream.graph = None
    return graph


@pytest.mark.usefixtures("stream")
def test_an_eager_step_on_the_device() -> None:
    clock = DeviceClock()
    assert clock.read() is None
    clock.begin()
    for phase in STEP:
        clock.mark(phase)
    assert clock.read() == {TARGET: 1, ACCEPTANCE: 2, LAYERS: 1, HEAD: 0}


def test_a_replay_is_read_from_the_events_of_its_graph(stream: Stream) -> None:
    clock = DeviceClock()
    graphs = [captured(clock, stream) for _ in range(3)]
    clock.begin()
    assert clock.read() is None  # nothing was replayed yet
    stream.replay(graphs[1])
    spent = {TARGET: 1, ACCEPTANCE: 2, LAYERS: 1, HEAD: 0}
    assert clock.read() == spent
    clock.begin()
    assert clock.read() is None  # that was the step before
    stream.replay(graphs[2])
    graphs[2][1].at += 0.5
    assert clock.read() == {**spent, TARGET: 1.5, ACCEPTANCE: 1.5}


def test_an_eager_step_after_a_replay_counts(stream: Stream) -> None:
    clock = DeviceClock()
    graph = captured(clock, stream)
    clock.begin()
    stream.replay(graph)
    clock.begin()
    clock.mark(TARGET)
    stream.now += 5
    clock.mark(ACCEPTANCE)
    clock.mark(None)
    assert clock.read()[TARGET] == 6


def test_gaps_count_between_replays_that_do(stream: Stream) -> None:
    clock = GapClock()

    def replay(*, counts: bool) -> None:
        if counts:
            clock.count_next()
        with clock.around():
            stream.now += 100

    for counts, pause in ((False, 50), (True, 3), (True, 4), (False, 60), (True, 70), (False, 0)):
        replay(counts=counts)
        stream.now += pause
    assert clock.read() == [3 + 1]  # the mark itself takes one


@pytest.mark.gpu
def test_gaps_are_what_lies_between_replays() -> None:
    clock, x = GapClock(), torch.randn(2048, 2048, device="cuda")
    pauses = []
    for _ in range(6):
        clock.count_next()
        with clock.around():
            x @ x
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(3_000_000)
        end.record()
        pauses.append((begin, end))
    torch.cuda.synchronize()
    gaps = clock.read()
    assert len(gaps) == 5
    for gap, (begin, end) in zip(gaps, pauses, strict=False):
        assert gap == pytest.approx(begin.elapsed_time(end), abs=0.05)


@pytest.mark.gpu
def test_replays_record_their_events_anew() -> None:
    clock = DeviceClock()
    x = torch.randn(2048, 2048, device="cuda")

    def step() -> None:
        clock.mark(TARGET)
        for _ in range(8):
            x @ x
        clock.mark(ACCEPTANCE)
        x @ x
        clock.mark(None)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graphs = []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=side):
            step()
    for graph in (*graphs, *graphs):
        clock.begin()
        torch.cuda.synchronize()
        assert clock.read() is None
        graph.replay()
        torch.cuda.synchronize()
        spent = clock.read()
        assert spent[TARGET] > 3 * spent[ACCEPTANCE] > 0
