"""What `integration.vllm.steps` reads in a trace and marks as busy, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from integration.figures import idle_group
from integration.vllm.kernel_times import kernel_times
from integration.vllm.steps import MOST_LOAD, load_of, ratio


def step(at: float, name: str) -> list[dict[str, Any]]:
    """Return the events of one step: a graph of two kernels and a third one on another stream that
    runs with the second, for 70 us, and a copy of 5 us; all begin 50 us after their launches."""

    def event(cat: str, ts: float, dur: float, name: str, **args: int) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "ts": ts, "dur": dur, "name": name, "args": args}

    graph, other = int(at) + 1, int(at) + 2
    return [
        event("user_annotation", at, 40, name),
        event("cuda_runtime", at + 10, 5, "cudaGraphLaunch", correlation=graph),
        event("cuda_driver", at + 45, 5, "cuLaunchKernelEx", correlation=other),
        event("kernel", at + 80, 30, "gemm", correlation=graph),
        event("kernel", at + 60, 20, "norm", correlation=graph),
        event("kernel", at + 95, 35, "gemm", correlation=other),
        event("gpu_memcpy", at + 150, 5, "copy"),
        {"ph": "s", "name": "a flow event without a category"},
    ]


def test_kernels_of_steps_in_which_all_requests_generate() -> None:
    generates = "execute_context_0(0)_generation_8(32)"
    names = [generates, generates, "execute_context_1(9)_generation_8(32)", generates]
    events = [each for n, name in enumerate(names) for each in step(200 * n, name)]
    found = kernel_times(events, 8)
    assert found == {
        "steps": 2,
        "kernels": 3,
        "launches": 2,
        "kernel_ms": 0.07,
        "idle_us": 125.0,
        "traced_step_ms": 0.2,
        "names": [["gemm", 2.0, 65.0], ["norm", 1.0, 20.0]],
    }
    with pytest.raises(ValueError, match="1 requests generate, got 12 kernels and 4 other steps"):
        kernel_times(events, 1)
    assert kernel_times([each for each in events if each.get("cat") != "kernel"], 8) is None


@pytest.mark.parametrize(("loads", "is_busy"), [([0.0, 0.02, 0.2], False), ([0.04, 0.2], True)])
def test_a_run_under_other_load_is_marked(loads: list[float], is_busy: bool) -> None:
    found = load_of(loads)
    assert found["busy"] == is_busy
    assert found["load"] == {
        "mean": pytest.approx(sum(loads) / len(loads), abs=5e-4),
        "most": max(loads),
        "limit": MOST_LOAD,
    }


def test_ratios_are_of_the_same_turn() -> None:
    assert ratio([2.0, 6.0, 12.0], [1.0, 2.0, 3.0]) == [3.0, 2.5, 3.5]


def test_no_headline_of_a_busy_or_failed_group() -> None:
    group = {"step_ms": {"greedy": {"vllm": [], "off": []}}, "matched": True, "busy": False}
    marks: list[dict[str, Any]] = [
        {"busy": True},
        {"matched": False},
        {"error": "engine off: ended"},
    ]
    groups = {str(number): group | mark for number, mark in enumerate(marks)}
    with pytest.raises(ValueError, match="no group of vllm, off is matched and not busy"):
        idle_group(groups, "vllm", "off")
    assert idle_group({**groups, "main": group}, "vllm", "off") is group
