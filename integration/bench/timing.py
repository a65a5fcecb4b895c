"""Times of a call: replays of a CUDA graph, and calls from the host."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_HEAD_START_CYCLES = 4_000_000
"""Cycles of about two milliseconds, in which the host enqueues the timed calls."""
_NODE_KINDS = {0: "kernels", 1: "copies", 2: "memsets"}


@dataclass(frozen=True)
class Times:
    """Times of one call, in the unit of the samples."""

    median: float
    mean: float
    p20: float
    p80: float
    samples: int

    @staticmethod
    def of(samples: list[float]) -> Times:
        """Compute from the samples."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Times(
            median=statistics.median(ordered),
            mean=statistics.fmean(ordered),
            p20=ordered[round(0.2 * last)],
            p80=ordered[round(0.8 * last)],
            samples=len(ordered),
        )


@dataclass(frozen=True)
class Launches:
    """Device work of one call."""

    kernels: float
    copies: float
    memsets: float
    source: str  # how launches were counted


class Scrubber:
    """Evict the L2 cache by reading a buffer of several times its size."""

    def __init__(self, device: torch.device) -> None:
        self.cache_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._buffer = torch.ones(self.cache_bytes, device=device)  # four bytes each
        self._sink = torch.empty((), device=device)

    def scrub(self) -> None:
        torch.amax(self._buffer, dim=0, out=self._sink)


def time_on_device(
    call: Callable[[], object], samples: int, before: Callable[[], object] | None = None
) -> list[float]:
    """Return the microseconds of each of ``samples`` calls; ``before`` runs untimed before each."""
    marks = []
    for _ in range(samples):
        if before is not None:
            before()
        # the device waits, so that the timed call is enqueued before it starts
        torch.cuda._sleep(_HEAD_START_CYCLES)
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 for start, end in marks]


def time_on_host(
    calls: Sequence[Callable[[], object]],
    samples: int,
    before: Callable[[], object],
    synchronize: Callable[[], object],
) -> list[float]:
    """Return the microseconds per call from the host; each sample has ``calls`` calls in a row."""
    times = []
    for _ in range(samples):
        before()
        synchronize()
        start = time.perf_counter()
        for call in calls:
            call()
        synchronize()
        times.append((time.perf_counter() - start) * 1e6 / len(calls))
    return times


def count_launches(
    graph: torch.cuda.CUDAGraph, calls: int, call: Callable[[], object]
) -> Launches | None:
    """Return the launches per call: nodes of a ``graph`` of ``calls`` calls, else those that the
    profiler reports; None if neither is available."""
    try:
        counts, source = _count_nodes(graph.raw_cuda_graph()), "graph"
    except (AttributeError, OSError, RuntimeError):
        try:
            counts, source, calls = _profile(call), "profiler", 1
        except RuntimeError:
            return None
    return Launches(
        kernels=counts["kernels"] / calls,
        copies=counts["copies"] / calls,
        memsets=counts["memsets"] / calls,
        source=source,
    )


def _count_nodes(graph: int) -> Counter[str]:
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p(graph)
    size = ctypes.c_size_t(0)
    _check(driver.cuGraphGetNodes(handle, None, ctypes.byref(size)))
    nodes = (ctypes.c_void_p * size.value)()
    _check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(size)))
    counts: Counter[str] = Counter()
    for node in nodes:
        kind = ctypes.c_int(-1)
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        counts[_NODE_KINDS.get(kind.value, "others")] += 1
    return counts


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"the CUDA driver answered {status}")


def _profile(call: Callable[[], object]) -> Counter[str]:
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    for event in profile.events() or ():
        if event.device_type.name == "CUDA":
            kinds = {"Memcpy": "copies", "Memset": "memsets"}
            counts[kinds.get(event.name[:6], "kernels")] += 1
    return counts
