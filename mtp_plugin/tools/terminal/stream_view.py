"""Stream the outputs of a batch to the console, with accepted drafts in color."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_plugin.hosts.embedded import StepEvent
from mtp_plugin.requests.detokenizer import Segment
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.tools.terminal.console import OutputConsole, can_show

DRAFT_STYLE = "green"
QUIET_STYLE = "dim"
PROMPT_TAIL = 600
"""Characters of a prompt that are shown."""


class StreamView:
    """Show the outputs of a batch one after another, in the order of the prompts.

    The first unfinished output is streamed. The others are buffered until those before them have
    finished.

    Args:
        console: where to write.
        prompts: shown above each output.
        marks: put accepted drafts between marks if the console has no colors; None: only in a
            terminal.
    """

    def __init__(
        self, console: OutputConsole, prompts: Sequence[str], *, marks: bool | None = None
    ) -> None:
        self._console = console
        self._prompts = prompts
        self._rule, opening, closing = "──", "«", "»"
        if not can_show(self._rule + opening + closing, console.file):
            self._rule, opening, closing = "--", "<<", ">>"
        marks = console.is_terminal if marks is None else marks
        self._marks = (opening, closing) if marks and not console.has_colors else ("", "")
        self._waiting: list[list[Segment]] = [[] for _ in prompts]
        self._num_tokens = [0] * len(prompts)
        self._endings: list[str | None] = [None] * len(prompts)
        self._current = 0
        self._started = False
        self._label: Label | None = None
        self._in_draft = False
        self._at_line_start = True
        self._explain()

    def show(self, events: Sequence[tuple[int, StepEvent]]) -> None:
        """Add a step's events, each with the index of its prompt."""
        for index, event in events:
            self._waiting[index] += event.segments
            self._num_tokens[index] += len(event.token_ids)
            self._label = self._label or event.label
            if event.finish_reason is not None:
                self._endings[index] = event.finish_reason.value
        self._flush()

    def close(self) -> None:
        """Finish the current line."""
        if self._current < len(self._prompts) and self._started:
            self._end_draft()
            self._end_line()

    def _explain(self) -> None:
        opening, closing = self._marks
        if self._console.has_colors:
            self._console.write("accepted drafts", DRAFT_STYLE)
            self._console.write_line(" are green", QUIET_STYLE)
        elif opening:
            self._console.write_line(f"{opening}accepted drafts{closing} are between marks")

    def _flush(self) -> None:
        while self._current < len(self._prompts):
            index = self._current
            if not self._started:
                self._start(index)
            for segment in self._waiting[index]:
                self._write(segment)
            self._waiting[index] = []
            ending = self._endings[index]
            if ending is None:
                return
            self._end_draft()
            self._end_line()
            count = self._num_tokens[index]
            self._title(f"{count} {'token' if count == 1 else 'tokens'}, finish reason: {ending}")
            self._current += 1
            self._started = False

    def _start(self, index: int) -> None:
        prompt = self._prompts[index]
        shown = prompt if len(prompt) <= PROMPT_TAIL else f"... {prompt[-PROMPT_TAIL:]}"
        self._console.write_line("")
        self._title(f"prompt {index + 1} of {len(self._prompts)}")
        self._write_text(shown, QUIET_STYLE)
        self._end_line()
        label = ""
        if self._label is not None:
            whose = ", not the model's" if self._label.is_drawn else ""
            label = f" ({self._label.name}{whose})"
        self._title(f"output{label}")
        self._started = True

    def _write(self, segment: Segment) -> None:
        if segment.from_draft and not self._in_draft:
            self._write_text(self._marks[0])
            self._in_draft = True
        elif not segment.from_draft:
            self._end_draft()
        self._write_text(segment.text, DRAFT_STYLE if segment.from_draft else None)

    def _end_draft(self) -> None:
        if self._in_draft:
            self._write_text(self._marks[1])
            self._in_draft = False

    def _write_text(self, text: str, style: str | None = None) -> None:
        if text:
            self._console.write(text, style)
            self._at_line_start = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            self._console.write_line("")
            self._at_line_start = True

    def _title(self, text: str) -> None:
        self._console.write_line(f"{self._rule} {text}", QUIET_STYLE)
