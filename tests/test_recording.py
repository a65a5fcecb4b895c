"""Recordings of a terminal as SVG."""

from __future__ import annotations

import sys

import pytest

from integration.recording import LONGEST_PAUSE, SLOWDOWN, Chunk, chunks, playback, record, svg


def test_command_is_recorded_in_a_terminal() -> None:
    code = "import sys, os; print(sys.stdout.isatty(), os.get_terminal_size().columns)"
    assert "".join(text for _, text in record([sys.executable, "-c", code])) == "True 100\r\n"


def test_failed_command_is_not_recorded() -> None:
    with pytest.raises(SystemExit) as caught:
        record([sys.executable, "-c", "raise SystemExit(3)"])
    assert caught.value.code == 3


def test_playback_slows_down_and_shortens_pauses() -> None:
    first, second, third = (time for time, _ in playback([(5.0, "a"), (5.01, "b"), (9.0, "c")]))
    assert second - first == pytest.approx(0.01 * SLOWDOWN)
    assert third - second == pytest.approx(LONGEST_PAUSE)


def test_output_is_laid_out_on_a_grid_with_styles() -> None:
    output = [(1.0, "ab \x1b[32mcd\x1b[0m\r\n"), (2.0, "  e f   \x1b[1mg\x1b[0m")]
    assert chunks(output, "run") == [
        Chunk(0.0, 0, 0, "$ run", None, True),
        Chunk(1.0, 1, 0, "ab", None, False),
        Chunk(1.0, 1, 3, "cd", "green", False),
        Chunk(2.0, 2, 2, "e f", None, False),
        Chunk(2.0, 2, 8, "g", None, True),
    ]


def test_still_frame_ends_at_its_time() -> None:
    output = chunks([(1.0, "early\r\n"), (2.0, "<late>")], "run")
    assert "@keyframes" in svg(output, "title")
    assert "&lt;late&gt;" in svg(output, "title")
    assert "early" in svg(output, "title", until=1.5)
    assert "late" not in svg(output, "title", until=1.5)
