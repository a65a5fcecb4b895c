"""A case, its input sets, and the comparison that every figure has to pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from integration.bench.shapes import Shape
from integration.bench.targets import Target
from mtp_plugin.errors import MTPPluginError
from mtp_plugin.kernels.backend import Backend

POISON = -777


class BenchmarkError(MTPPluginError, RuntimeError):
    """A benchmark that cannot run here, or that no case was left for."""


@dataclass(frozen=True)
class Trial:
    """One input set, and the call on it."""

    run: Callable[[Backend], dict[str, torch.Tensor]]  # new tensors by name
    state: dict[str, torch.Tensor] = field(default_factory=dict)  # changed in place, or kept
    approximate: frozenset[str] = frozenset()  # probabilities; all else is compared exactly


@dataclass(frozen=True)
class Case:
    """One op or step at one shape."""

    name: str
    shape: Shape
    bytes_read: int  # the fewest that the call can do with
    bytes_written: int
    prepare: Callable[[int], Trial]  # from a seed
    target: Target | None = None

    @property
    def label(self) -> str:
        """The name that ``--filter`` looks at."""
        return f"{self.name}/{self.shape.label}"

    @property
    def bytes_moved(self) -> int:
        """Read and written."""
        return self.bytes_read + self.bytes_written


class InputSets:
    """The input sets of a case, each with what the reference makes of it."""

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
        """Put every state that a call changes back to where it was."""
        if self._state:
            torch._foreach_copy_(self._state, self._initial)

    def mismatches(self, results: list[dict[str, torch.Tensor]]) -> list[str]:
        """The names of what is not as the reference has it, given each set's new tensors."""
        wrong: set[str] = set()
        for trial, expected, result in zip(self.trials, self._expected, results, strict=True):
            actual = result | trial.state
            wrong |= expected.keys() ^ actual.keys()
            for name in expected.keys() & actual.keys():
                if not _same(expected[name], actual[name], name in trial.approximate):
                    wrong.add(name)
        return sorted(wrong)


def poison(results: list[dict[str, torch.Tensor]]) -> None:
    """Overwrite new tensors, so that a replay that leaves one unwritten is seen."""
    for result in results:
        for tensor in result.values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else POISON)


def _same(expected: torch.Tensor, actual: torch.Tensor, approximate: bool) -> bool:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    if approximate:
        return torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)
    return torch.equal(actual, expected)
