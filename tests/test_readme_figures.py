"""Figures in the README are those of the result files, which compared what they measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "integration" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
OPS_BATCHES, E2E_BATCHES = (1, 8, 64, 256), (1, 8, 64)


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def case(name: str, label: str) -> dict[str, Any]:
    return next(each for each in result(name)["cases"] if each["case"] == label)


def over_batches(batches: tuple[int, ...], value: Callable[[int], float], digits: int) -> str:
    return " / ".join(f"{value(batch):.{digits}f}" for batch in batches)


def microseconds(name: str, label: str) -> str:
    """In a CUDA graph, by batch size."""
    return over_batches(
        OPS_BATCHES, lambda batch: case(name, f"{label}/b{batch}")["graph_us"]["median"], 1
    )


def launches(name: str, label: str) -> str:
    return f"{case(name, f'{label}/b8')['launches']['kernels']:.0f}"


def milliseconds(name: str, label: str) -> str:
    """Of a step, by batch size."""
    return over_batches(
        E2E_BATCHES, lambda batch: case(name, f"{label}/b{batch}")["step_ms"]["median"], 2
    )


def over_off(name: str, label: str) -> str:
    """Of a step, as a multiple of one without MTP in the same file."""

    def ratio(batch: int) -> float:
        on, off = (case(name, f"{kind}/b{batch}")["step_ms"]["median"] for kind in (label, "off"))
        return on / off

    return over_batches(E2E_BATCHES, ratio, 2)


def speed_ups(name: str, label: str) -> str:
    """Tokens per second of generating steps over those without MTP."""
    return over_batches(
        E2E_BATCHES, lambda batch: case(name, f"{label}/b{batch}")["speed_up"]["steady"], 2
    )


KERNELS = {
    "whole step, vanilla (`chain: output`, exact window)": ("step", "step/vanilla"),
    "whole step, eagle": ("step", "step/eagle"),
    "whole step, vanilla, `target_shift`": ("step", "step/vanilla-target-shift"),
    "acceptance, strict": ("ops", "accept/strict"),
    "acceptance, relaxed, all requests thinking": ("ops", "accept/relaxed"),
    "history and draft inputs of generations": ("ops", "first-pass/vanilla"),
}
STEPS = {
    "K = 1": ("e2e-8gb", "eagle-k1"),
    "K = 3": ("e2e-8gb", "eagle-k3"),
    "K = 3, drafts among 32768 ids": ("e2e-8gb-draft-vocab", "eagle-k3"),
}


@pytest.mark.parametrize("row", KERNELS)
def test_kernels(row: str) -> None:
    name, label = KERNELS[row]
    assert f"| {row} | {microseconds(name, label)} | {launches(name, label)} |" in README


def test_steps_without_mtp() -> None:
    assert f"| MTP off | {milliseconds('e2e-8gb', 'off')} |" in README


@pytest.mark.parametrize("row", STEPS)
def test_steps(row: str) -> None:
    name, label = STEPS[row]
    cells = milliseconds(name, label), over_off(name, label), speed_ups(name, label)
    assert f"| {row} | {' | '.join(cells)} |" in README


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_result_was_compared(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["matched"] is True
    assert document["machine"]["package_tree"]
