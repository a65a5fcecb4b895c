"""Benchmark cases, their input sets, and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from integration.bench.shapes import Shape
from integration.bench.targets import Target
from mtp_plugin.errors import MTPPluginError
from mtp_plugin.ops.backend import Backend

POISON = -777


class BenchmarkError(MTPPluginError, RuntimeError):
    """A benchmark cannot run here, or no case is selected."""


@dataclass(frozen=True)
class Trial:
    """One input set and the call on it."""

    run: Callable[[Backend], dict[str, torch.Tensor]]  # new tensors by name
    state: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  # changed in place, or must be restored
    approximate: frozenset[str] = frozenset()  # compared with a tolerance, the others exactly


@dataclass(frozen=True)
class Case:
    """One op or step at one shape."""

    name: str
    shape: Shape
    bytes_read: int  # lower bound of the call
    bytes_written: int
    prepare: Callable[[int], Trial]  # seed -> trial
    target: Target | None = None

    @property
    def label(self) -> str:
        """Name of the case, which ``--filter`` matches."""
        return f"{self.name}/{self.shape.label}"

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written


class InputSets:
    """The input sets of a case with the results of the reference."""

    def __init__(self, case: Case, count: int, reference: Backend) -> None:
        self.trials = [case.prepare(seed) for seed in range(count)]
        self._state = [tensor for trial in self.trials for tensor in trial.state.values()]
        self._initial = [tensor.clone() for tensor in self._state]
        self._expected: list[dict[str, torch.Tensor]] = []
        for trial in self.trials:
            results = trial.run(reference) | trial.state
            self._expected.append({name: value.clone() for name, value in results.items()})
        self.restore()

    def restore(self) -> None:
        """Restore every state that a call changes."""
        if self._state:
            torch._foreach_copy_(self._state, self._initial)

    def mismatches(self, results: list[dict[str, torch.Tensor]]) -> list[str]:
        """Return the names of results and states that differ from the reference."""
        wrong: set[str] = set()
        for trial, expected, result in zip(self.trials, self._expected, results, strict=True):
            actual = result | trial.state
            wrong |= expected.keys() ^ actual.keys()
            for name in expected.keys() & actual.keys():
                if not _same(expected[name], actual[name], name in trial.approximate):
                    wrong.add(name)
        return sorted(wrong)


def poison(results: list[dict[str, torch.Tensor]]) -> None:
    """Overwrite result tensors, to detect a replay that does not write one."""
    for result in results:
        for tensor in result.values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else POISON)


def _same(expected: torch.Tensor, actual: torch.Tensor, approximate: bool) -> bool:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    if approximate:
        return torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)
    return torch.equal(actual, expected)
