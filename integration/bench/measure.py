"""Measure a case: compare with the reference, then time it if the results match."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from integration.bench.case import Case, InputSets, poison
from integration.bench.machine import Ceilings
from integration.bench.timing import (
    Launches,
    Scrubber,
    Times,
    count_launches,
    time_on_device,
    time_on_host,
)
from mtp_plugin.ops.backend import Backend

MIN_SETS, MAX_SETS = 4, 64
"""Number of input sets: enough to fill the cache twice, within these bounds. A replay uses all of
them, which amortizes its launch."""
_SETS_ON_CPU = 2
_CALLS_PER_HOST_SAMPLE = 16


@dataclass(frozen=True)
class Figures:
    """The times of a case whose results matched."""

    num_sets: int
    eager: Times
    graph: Times | None = None  # None without a device
    launches: Launches | None = None


@dataclass(frozen=True)
class Outcome:
    """Results of a case, or the reason why there are none."""

    case: Case
    figures: Figures | None
    mismatches: list[str] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0

    @property
    def matched(self) -> bool:
        """Whether the results of every call match the reference."""
        return self.figures is not None

    @property
    def problem(self) -> str | None:
        """Why there are no results."""
        if self.matched:
            return None
        return self.error or f"differs from the reference: {', '.join(self.mismatches)}"

    @property
    def main_us(self) -> float | None:
        """The time that is compared with the byte floor."""
        if self.figures is None:
            return None
        return (self.figures.graph or self.figures.eager).median

    @property
    def gb_per_s(self) -> float | None:
        """The case's minimum bytes divided by its time."""
        return None if self.main_us is None else self.case.bytes_moved / 1000 / self.main_us

    @property
    def target_met(self) -> bool | None:
        """Whether the target is met; None without a target or without a device time."""
        figures, target = self.figures, self.case.target
        if figures is None or figures.graph is None or target is None or self.gb_per_s is None:
            return None
        return target.met_by(figures.graph.median, figures.eager.median, self.gb_per_s)

    def as_dict(self, ceilings: Ceilings | None) -> dict[str, Any]:
        """Return the JSON entry, without times unless the results match."""
        case = self.case
        described: dict[str, Any] = {
            "case": case.label,
            "name": case.name,
            "shape": asdict(case.shape),
            "bytes_read": case.bytes_read,
            "bytes_written": case.bytes_written,
            "matched": self.matched,
            "seconds": round(self.seconds, 2),
        }
        if self.figures is None:
            return described | {"mismatches": self.mismatches, "error": self.error}
        figures = self.figures
        described |= {
            "input_sets": figures.num_sets,
            "rotation_bytes": figures.num_sets * case.bytes_moved,
            "graph_us": None if figures.graph is None else asdict(figures.graph),
            "eager_us": asdict(figures.eager) | {"host_bound": True},
            "launches": None if figures.launches is None else asdict(figures.launches),
            "gb_per_s": self.gb_per_s,
        }
        if ceilings is not None and self.gb_per_s is not None:
            described["floor_us"] = floor_us(case, ceilings)
            described["share_of_ceiling"] = self.gb_per_s / ceilings.best
        if case.target is not None:
            described["target"] = asdict(case.target) | {"met": self.target_met}
        return described


def floor_us(case: Case, ceilings: Ceilings) -> float:
    """Return the time of the minimum bytes at the measured bandwidth."""
    return case.bytes_moved / 1000 / ceilings.best


class Bench:
    """Measure cases of one implementation against a reference.

    Args:
        samples: of each time.
    """

    def __init__(
        self, measured: Backend, reference: Backend, device: torch.device, *, samples: int
    ) -> None:
        self._measured = measured
        self._reference = reference
        self._device = device
        self._samples = samples
        self._scrubber = Scrubber(device) if device.type == "cuda" else None

    def measure(self, case: Case) -> Outcome:
        """Compare, then time; errors are part of the outcome."""
        start = time.perf_counter()
        try:
            if self._scrubber is not None:
                torch.cuda.empty_cache()
            outcome = self._measure(case)
        except Exception as error:  # a failed case must not stop the others
            outcome = Outcome(case, None, error=f"{type(error).__name__}: {error}")
        return Outcome(
            case,
            outcome.figures,
            outcome.mismatches,
            outcome.error,
            time.perf_counter() - start,
        )

    @torch.no_grad()
    def _measure(self, case: Case) -> Outcome:
        sets = InputSets(case, self._num_sets(case), self._reference)
        calls: list[Callable[[], dict[str, torch.Tensor]]] = [
            partial(trial.run, self._measured) for trial in sets.trials
        ]
        wrong = sets.mismatches([call() for call in calls])
        if wrong:
            return Outcome(case, None, wrong)
        synchronize = torch.cuda.synchronize if self._scrubber is not None else _nothing
        eager = time_on_host(
            calls[:_CALLS_PER_HOST_SAMPLE], self._samples, sets.restore, synchronize
        )
        figures = Figures(len(calls), Times.of(eager))
        if self._scrubber is None:
            sets.restore()
            wrong = sets.mismatches([call() for call in calls])
            return Outcome(case, None if wrong else figures, wrong)
        return self._measure_graph(case, sets, calls, figures, self._scrubber)

    def _measure_graph(
        self,
        case: Case,
        sets: InputSets,
        calls: list[Callable[[], dict[str, torch.Tensor]]],
        figures: Figures,
        scrubber: Scrubber,
    ) -> Outcome:
        """Capture all input sets in one graph, and compare its replays too."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, stream=stream):
            results = [call() for call in calls]
        launches = count_launches(graph, len(calls), calls[0])
        graph.instantiate()

        def replayed_wrongly() -> list[str]:
            sets.restore()
            poison(results)
            graph.replay()
            return sets.mismatches(results)

        def before() -> None:
            sets.restore()
            scrubber.scrub()

        wrong = replayed_wrongly()
        if wrong:
            return Outcome(case, None, wrong)
        time_on_device(graph.replay, 2, before)
        times = time_on_device(graph.replay, self._samples, before)
        wrong = replayed_wrongly()
        if wrong:
            return Outcome(case, None, wrong)
        per_call = [sample / len(calls) for sample in times]
        return Outcome(case, Figures(len(calls), figures.eager, Times.of(per_call), launches))

    def _num_sets(self, case: Case) -> int:
        if self._scrubber is None:
            return _SETS_ON_CPU
        wanted = -(-2 * self._scrubber.cache_bytes // max(case.bytes_moved, 1))
        return min(max(wanted, MIN_SETS), MAX_SETS)


def _nothing() -> None:
    pass
