"""Rows that rounding decided: tests count them, the run's summary reports them."""

from __future__ import annotations

import pytest

_counted: list[tuple[str, int, int]] = []


def count(what: str, differ: int, number: int) -> None:
    """Of ``number`` rows so many came out otherwise, each excused by its test."""
    _counted.append((what, differ, number))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Hand what was counted to the test's report, which goes to the run's first process."""
    item.user_properties.extend(("near ties", each) for each in _counted)
    _counted.clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Add up what the tests counted."""
    sums: dict[str, tuple[int, int]] = {}
    for report in terminalreporter.stats.get("", []):
        if getattr(report, "when", None) != "teardown":
            continue
        for name, value in report.user_properties:
            if name == "near ties":
                what, differ, number = value
                before = sums.get(what, (0, 0))
                sums[what] = (before[0] + differ, before[1] + number)
    if sums:
        terminalreporter.section("near ties")
    for what, (differ, number) in sorted(sums.items()):
        share = differ / number if number else 0.0
        terminalreporter.write_line(f"{what}: {differ} of {number} ({share:.3%})")
