"""Stream the outputs of a batch to the console, with accepted drafts in color."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mtp_plugin.hosts.embedded import StepEvent
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.tools.terminal.console import OutputConsole, can_show

DRAFT_STYLE, QUIET_STYLE = "green", "dim"
PROMPT_TAIL = 600
"""Characters of a prompt that are shown."""


class StreamView:
    """Show the outputs of a batch in the order of the prompts: the first unfinished one is
    streamed, the others wait until those before them have finished.

    Args:
        prompts: shown above each output.
        marks: put accepted drafts between marks if the console has no colors; None: only in a
            terminal.
        left_out: tokens without text, as thinking tags may be; the text after one is on a new line.
    """

    def __init__(
        self,
        console: OutputConsole,
        prompts: Sequence[str],
        *,
        marks: bool | None = None,
        left_out: Collection[int] = (),
    ) -> None:
        self._console, self._prompts, self._left_out = console, prompts, left_out
        is_wide = can_show("──«»", console.file)
        self._rule, opening, closing = ("──", "«", "»") if is_wide else ("--", "<<", ">>")
        marks = console.is_terminal if marks is None else marks
        self._marks = (opening, closing) if marks and not console.has_colors else ("", "")
        self._waiting: list[list[StepEvent]] = [[] for _ in prompts]
        self._current = self._num_tokens = 0
        self._label: Label | None = None
        self._started = self._in_draft = self._breaks = False
        self._at_line_start = True
        if console.has_colors:
            console.write("accepted drafts", DRAFT_STYLE)
            console.write_line(" are green", QUIET_STYLE)
        elif marks:
            console.write_line(f"{opening}accepted drafts{closing} are between marks")

    def show(self, events: Sequence[tuple[int, StepEvent]]) -> None:
        """Add a step's events, each with the index of its prompt."""
        for index, event in events:
            self._waiting[index].append(event)
            self._label = self._label or event.label
        while self._current < len(self._prompts):
            if not self._started:
                self._start()
            ending = None
            for event in self._waiting[self._current]:
                self._write_event(event)
                ending = event.finish_reason
            self._waiting[self._current] = []
            if ending is None:
                return
            self.close()
            count = f"{self._num_tokens} {'token' if self._num_tokens == 1 else 'tokens'}"
            self._title(f"{count}, finish reason: {ending.value}")
            self._current += 1

    def close(self) -> None:
        """Finish the current line."""
        if self._started:
            self._set_draft(False)
            self._end_line()
        self._started = False

    def _start(self) -> None:
        prompt = self._prompts[self._current]
        self._console.write_line("")
        self._title(f"prompt {self._current + 1} of {len(self._prompts)}")
        shown = prompt if len(prompt) <= PROMPT_TAIL else f"... {prompt[-PROMPT_TAIL:]}"
        self._write(shown, QUIET_STYLE)
        self._end_line()
        label = self._label
        whose = ", not the model's" if label is not None and label.is_drawn else ""
        self._title("output" if label is None else f"output ({label.name}{whose})")
        self._started, self._num_tokens, self._breaks = True, 0, False

    def _write_event(self, event: StepEvent) -> None:
        self._num_tokens += len(event.token_ids)
        tag = next((n for n, t in enumerate(event.token_ids, 1) if t in self._left_out), None)
        for segment in event.segments:
            # a step's drafts count from 1, then comes a token of the target
            if tag is not None and not 0 < segment.draft_position <= tag:
                self._breaks, tag = True, None
            if self._breaks and not segment.text.startswith("\n"):
                self._end_line()
            self._breaks = False
            self._set_draft(segment.from_draft)
            self._write(segment.text, DRAFT_STYLE if segment.from_draft else None)
        self._breaks = self._breaks or tag is not None

    def _set_draft(self, is_draft: bool) -> None:
        if is_draft is not self._in_draft:
            self._write(self._marks[0 if is_draft else 1])
            self._in_draft = is_draft

    def _write(self, text: str, style: str | None = None) -> None:
        if text:
            self._console.write(text, style)
            self._at_line_start = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            self._write("\n")

    def _title(self, text: str) -> None:
        self._console.write_line(f"{self._rule} {text}", QUIET_STYLE)
