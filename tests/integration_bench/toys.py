"""A case small enough to follow by eye: double ``x``, and count the calls in place."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from integration.bench.case import Case, Trial
from integration.bench.shapes import Shape
from integration.bench.targets import Target


@dataclass
class Toy:
    """Makes cases and remembers their calls, so that a graph can be played without a device."""

    target: Target | None = None

    def __post_init__(self) -> None:
        self.recorded: list[Any] | None = None  # calls while a graph is captured

    def case(self) -> Case:
        return Case("toy", Shape(batch=2), 4000, 4000, self.trial, self.target)

    def trial(self, seed: int) -> Trial:
        x = torch.arange(4) + seed
        calls = torch.zeros(1, dtype=torch.int64)

        def run(kernels: Any) -> dict[str, torch.Tensor]:
            out = torch.empty_like(x)
            if self.recorded is not None:
                self.recorded.append(lambda: kernels.double(x, out, calls))
            kernels.double(x, out, calls)
            return {"out": out}

        return Trial(run, {"calls": calls})


def double(x: torch.Tensor, out: torch.Tensor, calls: torch.Tensor) -> None:
    out.copy_(2 * x)
    calls += 1


RIGHT = SimpleNamespace(double=double)
