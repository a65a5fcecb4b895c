"""Time of a step's kernels on the GPU, by a trace of vLLM's profiler."""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from integration.vllm.load import Request, run_batch

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
NUM_NAMES = 40


def profiler_config(folder: Path) -> dict[str, Any]:
    """Return ``profiler_config`` of an engine whose steps `trace_steps` traces. The profiler starts
    with the first trace; steps before it run as without it."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(folder.resolve()),
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
    }


def trace_steps(
    llm: Any, *, requests: list[Request], num_steps: int, folder: Path
) -> dict[str, Any] | None:
    """Run a batch, trace some of its steps and return `kernel_times`; runs in the engine's process.
    None also if the profiler, which has failed once in thirty traces, wrote no file.

    Args:
        folder: the one of `profiler_config`; the trace is read and removed.
    """
    for left in folder.glob("*.pt.trace.json"):  # of a run that failed
        left.unlink()
    run_batch(llm, requests=requests, num_traced=num_steps)
    path = next(folder.glob("*.pt.trace.json"), None)
    if path is None:
        return None
    events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    path.unlink()
    return kernel_times(events, len(requests))


def kernel_times(events: list[dict[str, Any]], batch: int) -> dict[str, Any] | None:
    """Return medians over the traced steps in which ``batch`` requests generate; None: the trace
    has no kernels, as on a CPU.

    A step lasts from its first kernel to the first kernel of the next one. ``kernel_ms``: time in
    which a kernel runs, several at a time count once. ``idle_us``: time without kernels, copies and
    fills; the profiler makes it longer. ``launches``: of kernels, those of a graph count once.
    ``names``: [name, count, microseconds] per step.

    Raises:
        ValueError: there are kernels, but no such steps.
    """
    events = [event for event in events if event.get("ph") == "X"]
    work = sorted((e for e in events if e.get("cat") in WORK), key=lambda e: e["ts"])
    kernels = [e for e in work if e["cat"] == "kernel"]
    if not kernels:
        return None
    first = {e["args"]["correlation"]: e["ts"] for e in reversed(kernels)}
    launches = sorted(
        (e["ts"], first[e["args"]["correlation"]])
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and e["args"].get("correlation") in first
    )
    begins = []
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith("execute_"):
            end = event["ts"] + event["dur"]
            own = launches[bisect_left(launches, (event["ts"],)) : bisect_left(launches, (end,))]
            if own:
                generates = event["name"].startswith(f"execute_context_0(0)_generation_{batch}(")
                begins.append((min(kernel for _, kernel in own), generates))
    steps = [(begin, end) for (begin, found), (end, _) in pairwise(sorted(begins)) if found]
    if not steps:
        raise ValueError(
            f"trace: expected steps in which {batch} requests generate, got {len(kernels)} kernels "
            f"and {len(begins)} other steps"
        )
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    lasted, by_kernels, idle, launched = [], [], [], []
    for begin, end in steps:
        inside = work[bisect_left(work, begin, key=_begin) : bisect_left(work, end, key=_begin)]
        run = [e for e in inside if e["cat"] == "kernel"]
        lasted.append(end - begin)
        by_kernels.append(_union(run))
        idle.append(end - begin - _union(inside))
        launched.append(len({event["args"]["correlation"] for event in run}))
        for event in run:
            spent[event["name"]] += event["dur"]
            count[event["name"]] += 1
    return {
        "steps": len(steps),
        "kernels": round(count.total() / len(steps)),
        "launches": statistics.median(launched),
        "kernel_ms": round(statistics.median(by_kernels) / 1000, 3),
        "idle_us": round(statistics.median(idle), 1),
        "traced_step_ms": round(statistics.median(lasted) / 1000, 3),
        "names": [
            [name, round(count[name] / len(steps), 2), round(us / len(steps), 2)]
            for name, us in spent.most_common(NUM_NAMES)
        ],
    }


def _begin(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _union(events: list[dict[str, Any]]) -> float:
    """Return the time in which at least one of the events runs; they are sorted by their begin."""
    total, last = 0.0, float("-inf")
    for event in events:
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(event["ts"], last))
        last = max(last, end)
    return total
