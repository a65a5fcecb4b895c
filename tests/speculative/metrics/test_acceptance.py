"""Acceptance figures, worked out by hand."""

from __future__ import annotations

import pytest

from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats, Label


def recorded(*steps: tuple[int, int], max_draft_len: int = 3) -> AcceptanceStats:
    stats = AcceptanceStats(max_draft_len)
    for num_emitted, num_drafted in steps:
        stats.record(num_emitted, num_drafted)
    return stats


def test_nothing_recorded() -> None:
    stats = recorded()
    assert (stats.steps, stats.emitted, stats.acceptance_length) == (0, 0, 0.0)
    assert stats.per_position == [0.0, 0.0, 0.0]
    assert stats.acceptance_rate == 0.0


def test_figures() -> None:
    """Steps of 4, 2, 1 and 1 tokens with 3, 3, 3 and 0 drafts: 4 of 9 drafts were accepted."""
    stats = recorded((4, 3), (2, 3), (1, 3), (1, 0))
    assert stats.histogram == [0, 2, 1, 0, 1]
    assert (stats.steps, stats.emitted) == (4, 8)
    assert stats.acceptance_length == 2.0
    assert stats.per_position == [0.5, 0.25, 0.25]
    assert stats.acceptance_rate == pytest.approx(4 / 9)


def test_a_step_that_emitted_nothing_counts_as_a_step() -> None:
    stats = recorded((0, 3), (2, 3))
    assert (stats.steps, stats.emitted, stats.acceptance_length) == (2, 2, 1.0)
    assert stats.acceptance_rate == pytest.approx(1 / 6)
    assert stats.per_position == [0.5, 0.0, 0.0]


def test_merging_is_recording_both() -> None:
    one, other = [(4, 3), (1, 2)], [(2, 3)]
    merged = recorded(*one)
    merged.merge(recorded(*other))
    assert merged == recorded(*one, *other)


def test_a_whole_has_the_label_of_its_parts() -> None:
    total, part = AcceptanceStats(1), AcceptanceStats(1, label=Label("part", "", ""))
    assert total.label is None
    total.merge(part)
    assert total.label.name == "part"
    total.merge(AcceptanceStats(1))
    assert total.label.name == "part"
    relaxed = AcceptanceStats(1, label=Label("relaxed", "", ""))
    relaxed.merge(AcceptanceStats(1, label=Label("synthetic", "", "", is_drawn=True)))
    assert relaxed.label.is_drawn


def test_histograms_are_not_shared() -> None:
    first, second = AcceptanceStats(1), AcceptanceStats(1)
    first.record(2, 1)
    assert second.histogram == [0, 0, 0]


def test_without_drafts() -> None:
    stats = recorded((1, 0), (1, 0), max_draft_len=0)
    assert stats.acceptance_length == 1.0
    assert stats.per_position == []
    assert stats.acceptance_rate == 0.0
