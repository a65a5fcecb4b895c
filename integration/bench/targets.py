"""Target times of kernels on one H200, at the reference sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """Upper bounds of medians in microseconds, or a lower bound of the bandwidth."""

    graph_us: float | None = None
    eager_us: float | None = None
    gb_per_s: float | None = None

    def met_by(self, graph_us: float, eager_us: float, gb_per_s: float) -> bool:
        """Whether every bound holds."""
        return (
            (self.graph_us is None or graph_us <= self.graph_us)
            and (self.eager_us is None or eager_us <= self.eager_us)
            and (self.gb_per_s is None or gb_per_s >= self.gb_per_s)
        )

    def __str__(self) -> str:
        parts = []
        if self.graph_us is not None:
            parts.append(f"<= {self.graph_us:g}")
        if self.eager_us is not None:
            parts.append(f"eager <= {self.eager_us:g}")
        if self.gb_per_s is not None:
            parts.append(f">= {self.gb_per_s:g} GB/s")
        return ", ".join(parts)


VANILLA_STEP = {1: 25, 8: 30, 64: 80, 256: 250}
EAGLE_STEP = {1: 22, 8: 26, 64: 75, 256: 240}
ACCEPT_STRICT = {1: 6, 8: 8, 64: 40, 256: 135}
ACCEPT_RELAXED = {1: 12, 8: 15, 64: 60, 256: 200}
DRAWS = {
    "top-k-top-p": {1: 12, 8: 17, 64: 50, 256: 175},
    "top-k-top-p-peaked": {1: 9, 8: 13, 64: 44, 256: 155},
    "top-p-peaked": {1: 10, 8: 15, 64: 47, 256: 155},
    "top-p": {1: 121, 8: 173, 64: 408, 256: 1275},
    "temperature": {1: 7, 8: 12, 64: 46, 256: 170},
    "many-top-k": {1: 121, 8: 173, 64: 408, 256: 1275},
    "top-k-top-p-logprobs": {1: 12, 8: 17, 64: 50, 256: 175},
    "temperature-logprobs": {1: 8, 8: 14, 64: 56, 256: 205},
    "top-k-penalties": {64: 65, 256: 235},
    "top-k-allowed": {64: 60, 256: 215},
}
"""By kind of request, including acceptance."""
VANILLA_FIRST_PASS = {1: 4, 8: 5, 64: 8, 256: 20}
MIXED_FIRST_PASS = Target(graph_us=90)
BOOKKEEPING = {256: Target(graph_us=3, eager_us=30)}
STATE_COPY = Target(gb_per_s=4100)


def graph_target(bounds: dict[int, int], batch: int) -> Target | None:
    """Return the limit for ``batch``, or None."""
    bound = bounds.get(batch)
    return None if bound is None else Target(graph_us=bound)


@dataclass(frozen=True)
class StepRatio:
    """Limit on the step time relative to another kind of requests in the same run."""

    over: str
    at_most: dict[int, float]
    """By batch size."""


STEP_TARGETS = {
    "sampled": StepRatio("greedy", {1: 1.015, 8: 1.015, 64: 1.02}),
    "sampled-logprob": StepRatio("sampled", dict.fromkeys((1, 8, 64), 1.01)),
    "sampled-top5": StepRatio("sampled", dict.fromkeys((1, 8, 64), 1.03)),
    "sampled-penalty": StepRatio("sampled", dict.fromkeys((1, 8, 64), 1.02)),
    "one-sampled": StepRatio("greedy", dict.fromkeys((8, 64), 1.01)),
}
"""Whole steps by kind of requests: `bench e2e --shape 8gb`, eagle, K = 3."""
