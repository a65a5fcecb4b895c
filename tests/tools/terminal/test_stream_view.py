"""Texts while they are written."""

from __future__ import annotations

import io
from typing import Any

from mtp_plugin.hosts.embedded import StepEvent
from mtp_plugin.requests.detokenizer import Segment
from mtp_plugin.requests.states import FinishReason
from mtp_plugin.tools.terminal.console import OutputConsole
from mtp_plugin.tools.terminal.stream_view import StreamView


def event(*segments: tuple[str, bool], end: FinishReason | None = None) -> StepEvent:
    shown = [Segment(text, int(from_draft)) for text, from_draft in segments]
    return StepEvent(0, list(range(len(segments))), shown, end)


def plain_console(encoding: str = "utf-8", **options: Any) -> OutputConsole:
    return OutputConsole(
        file=io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline=""), **options
    )


def written(console: OutputConsole) -> str:
    console.file.flush()
    return console.file.buffer.getvalue().decode(console.file.encoding)


def test_the_first_unfinished_text_is_live_and_the_others_wait() -> None:
    console = plain_console()
    view = StreamView(console, ["p", "q", "r"], marks=True)
    length = FinishReason.LENGTH
    view.show([(0, event(("a", False))), (1, event(("x", False))), (2, event(("1", False)))])
    assert written(console).endswith("── prompt 1 of 3\np\n── output\na")
    view.show([(1, event(("y", True), ("z", False), end=length)), (2, event(("2", True)))])
    assert written(console).endswith("── output\na")
    view.show([(0, event(("b", True), end=FinishReason.END_ID))])
    assert written(console).split("── output\n", 1)[1] == (
        "a«b»\n── 2 tokens, finish reason: stop\n"
        "\n── prompt 2 of 3\nq\n── output\nx«y»z\n── 3 tokens, finish reason: length\n"
        "\n── prompt 3 of 3\nr\n── output\n1«2"
    )
    view.show([(2, event(("3", True), ("4", False)))])
    view.close()
    assert written(console).endswith("1«23»4\n")


def test_text_after_a_tag_that_is_left_out_is_on_a_new_line() -> None:
    """Tag 2 is a draft, a token of its own, and before a line break of the text."""
    console = plain_console()
    view = StreamView(console, ["p"], left_out={2})
    shown = [Segment("9.", 1), Segment("17", 3), Segment("6", 0)]
    view.show([(0, StepEvent(0, [7, 2, 8, 9], shown, None))])
    view.show([(0, StepEvent(0, [2], [], None)), (0, event(("x", False)))])
    view.show([(0, StepEvent(0, [2], [], None)), (0, event(("\ny", False)))])
    view.show([(0, event(end=FinishReason.LENGTH))])
    assert "output\n9.\n176\nx\ny\n── " in written(console)


def test_drafts_of_neighbouring_runs_share_a_mark() -> None:
    console = plain_console()
    view = StreamView(console, ["p"], marks=True)
    view.show([(0, event(("a", True)))])
    view.show([(0, event(("b", True)))])
    view.show([(0, event(end=FinishReason.LENGTH))])
    assert "\n«ab»\n" in written(console)


def test_marks_fit_the_encoding() -> None:
    console = plain_console("ascii")
    view = StreamView(console, ["p"], marks=True)
    view.show([(0, event(("a", True), end=FinishReason.LENGTH))])
    assert "-- output\n<<a>>\n-- 1 token, finish reason: length\n" in written(console)


def test_a_long_prompt_is_shown_by_its_end() -> None:
    console = plain_console()
    view = StreamView(console, ["x" * 5000 + "END"], marks=False)
    view.show([(0, event(("a", False)))])
    assert "\n..." in written(console)
    assert "xEND\n── output\na" in written(console)
    assert len(written(console)) < 1000


def test_a_terminal_gets_no_control_characters_of_the_model() -> None:
    console = plain_console(force_terminal=True, color_system=None)
    console.write("a\x1b[31mb\x07\tc\n\x9b")
    assert written(console) == "a\\x1b[31mb\\x07\tc\n\\x9b"


def test_a_pipe_gets_the_text_as_it_is() -> None:
    console = plain_console(force_terminal=False)
    console.write("a\x1b[31mb" + "x" * 300 + "[bold]")
    assert written(console) == "a\x1b[31mb" + "x" * 300 + "[bold]"


def test_marks_by_default_only_in_a_terminal() -> None:
    for is_terminal in (False, True):
        console = plain_console(force_terminal=is_terminal, color_system=None)
        StreamView(console, ["p"]).show([(0, event(("a", True)))])
        assert ("«a" in written(console)) is is_terminal
