"""No figure without a match: on the first call, on later ones, and on replays of a graph."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from integration.bench import measure
from integration.bench.machine import Ceilings
from integration.bench.measure import Bench, Outcome
from integration.bench.report import document, results_table
from integration.bench.targets import Target
from integration.bench.timing import Launches, Times
from tests.integration_bench.toys import RIGHT, Toy, double

CPU = torch.device("cpu")
CEILINGS = Ceilings(read=4000.0, copy=3900.0)
TIMES = ("graph_us", "eager_us", "gb_per_s", "floor_us", "share_of_ceiling", "launches", "target")


def no_time_in(outcome: Outcome) -> bool:
    results = outcome.as_dict(CEILINGS)
    table = results_table([outcome], CEILINGS)
    cells = [next(iter(column.cells)) for column in table.columns[2:]]
    return not outcome.matched and not any(name in results for name in TIMES) and not any(cells)


def failing_from(call: int):
    """A kernel that is right up to its n-th call."""
    made = 0

    def kernel(x, out, calls) -> None:
        nonlocal made
        made += 1
        double(x, out, calls)
        if made >= call:
            out += 1

    return SimpleNamespace(double=kernel)


def test_a_match_has_host_times() -> None:
    outcome = Bench(RIGHT, RIGHT, CPU, samples=3).measure(Toy().case())
    assert outcome.matched
    assert outcome.figures.graph is None
    assert outcome.figures.eager.samples == 3
    assert outcome.figures.num_sets == 2


@pytest.mark.parametrize("call", [1, 3], ids=["at-once", "while-timed"])
def test_a_wrong_result_has_no_figure(call: int) -> None:
    outcome = Bench(failing_from(call), RIGHT, CPU, samples=3).measure(Toy().case())
    assert outcome.mismatches == ["out"]
    assert outcome.problem == "differs from the reference: out"
    assert no_time_in(outcome)


def test_a_state_left_alone_has_no_figure() -> None:
    lazy = SimpleNamespace(double=lambda x, out, calls: out.copy_(2 * x))  # noqa: ARG005
    outcome = Bench(lazy, RIGHT, CPU, samples=3).measure(Toy().case())
    assert outcome.mismatches == ["calls"]
    assert no_time_in(outcome)


def test_an_error_has_no_figure() -> None:
    outcome = Bench(SimpleNamespace(), RIGHT, CPU, samples=3).measure(Toy().case())
    assert outcome.problem.startswith("AttributeError: ")
    assert no_time_in(outcome)


# --- a device that is not there: a graph replays the calls that were made while it was captured ---


class Played:
    """A graph of a toy's calls; ``broken``: the replay from which it does nothing."""

    def __init__(self, toy: Toy, broken: int | None) -> None:
        self.toy, self.broken, self.replays = toy, broken, 0

    def instantiate(self) -> None:
        self.calls, self.toy.recorded = self.toy.recorded, None

    def replay(self) -> None:
        self.replays += 1
        if self.broken is None or self.replays < self.broken:
            for call in self.calls:
                call()


@pytest.fixture
def on_device(monkeypatch):
    """Measure a toy as if there were a device on which a replay takes 120 us."""

    def measure_toy(toy: Toy, kernels=RIGHT, broken: int | None = None) -> Outcome:
        @contextmanager
        def graph(*_, **__):
            toy.recorded = []
            yield

        def time_on_device(call, samples, before):
            for _ in range(samples):
                before()
                call()
            return [120.0] * samples

        cuda = SimpleNamespace(
            Stream=lambda: SimpleNamespace(wait_stream=lambda _: None),
            current_stream=lambda: None,
            stream=lambda _: contextmanager(lambda: iter([None]))(),
            synchronize=lambda: None,
            empty_cache=lambda: None,
            CUDAGraph=lambda keep_graph: Played(toy, broken),  # noqa: ARG005
            graph=graph,
        )
        scrubber = SimpleNamespace(cache_bytes=24000, scrub=lambda: None)
        launches = Launches(3, 1, 0, "graph")
        monkeypatch.setattr(measure.torch, "cuda", cuda)
        monkeypatch.setattr(measure, "Scrubber", lambda _: scrubber)
        monkeypatch.setattr(measure, "time_on_device", time_on_device)
        monkeypatch.setattr(measure, "count_launches", lambda *_: launches)
        return Bench(kernels, RIGHT, torch.device("cuda"), samples=5).measure(toy.case())

    return measure_toy


def test_sets_fill_the_cache_twice_and_share_a_replay(on_device) -> None:
    outcome = on_device(Toy())
    assert outcome.problem is None
    assert outcome.figures.num_sets == 6  # 2 * 24000 bytes, 8000 each
    assert outcome.figures.graph == Times(20.0, 20.0, 20.0, 20.0, 5)
    results = outcome.as_dict(CEILINGS)
    assert results["gb_per_s"] == pytest.approx(0.4)
    assert results["floor_us"] == pytest.approx(0.002)
    assert results["share_of_ceiling"] == pytest.approx(1e-4)
    assert results["launches"]["kernels"] == 3
    assert "target" not in results


# the first gate is replay 1, two warm-ups and five samples follow, then the last gate
@pytest.mark.parametrize("broken", [1, 9], ids=["first-replay", "last-replay"])
def test_a_wrong_replay_has_no_figure(on_device, broken: int) -> None:
    outcome = on_device(Toy(), broken=broken)
    assert outcome.mismatches == ["calls", "out"]
    assert no_time_in(outcome)


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target(graph_us=20), True),
        (Target(graph_us=19), False),
        (Target(graph_us=20, eager_us=0), False),
        (Target(gb_per_s=0.3), True),
        (Target(gb_per_s=0.5), False),
    ],
)
def test_targets_are_listed_with_the_results(on_device, target: Target, met: bool) -> None:
    outcome = on_device(Toy(target))
    assert outcome.as_dict(CEILINGS)["target"]["met"] is met
    table = results_table([outcome], CEILINGS)
    cells = {column.header: next(iter(column.cells)) for column in table.columns}
    assert cells["graph us"] == "20.0"
    assert cells["target"] == str(target)
    assert cells["met"] == ("yes" if met else "NO")
    assert cells["launches"] == "3+1"
    results = document("ops", {}, "triton", CEILINGS, [outcome], complete=True)
    assert (results["benchmark"], results["targets"], results["targets_met"]) == (True, 1, int(met))


def test_times_have_quantiles_and_mean() -> None:
    assert Times.of([float(n) for n in range(10, -1, -1)]) == Times(5.0, 5.0, 2.0, 8.0, 11)
    assert Times.of([1.0, 1.0, 1.0, 1.0, 6.0]) == Times(1.0, 2.0, 1.0, 1.0, 5)
