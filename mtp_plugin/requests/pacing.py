"""Limits how often progress is reported."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

PACE_SECONDS = 5.0


def paced(report: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes at most one line every `PACE_SECONDS` on to ``report``."""
    due = perf_counter() + PACE_SECONDS

    def pass_on(line: str) -> None:
        nonlocal due
        now = perf_counter()
        if now >= due:
            due = now + PACE_SECONDS
            report(line)

    return pass_on
