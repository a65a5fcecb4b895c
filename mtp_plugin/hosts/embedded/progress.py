"""Progress of loading and of batches of prompts, on standard error if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING

from mtp_plugin.hosts.embedded.py_executor import StepEvent

if TYPE_CHECKING:
    from rich.console import Console

REFRESH_SECONDS = 0.5
"""Between two updates of a bar, which take a millisecond; other steps only read the clock."""

Progress = Callable[[str], None]
"""Called with a line of text as loading goes on."""


@contextmanager
def loading_progress(on_progress: Progress | None) -> Iterator[Progress | None]:
    """Report progress of loading to the given function, else to a temporary line of the terminal.

    Yields None without a function and a terminal.
    """
    console = None if on_progress is not None else _terminal()
    if console is None:
        yield on_progress
        return
    from rich.text import Text

    with console.status("loading") as status:
        yield lambda line: status.update(Text(line))


@contextmanager
def batch_progress(
    num_prompts: int, use_tqdm: bool
) -> Iterator[Callable[[Sequence[StepEvent]], None]]:
    """Show results of steps in a bar if requested, for several prompts and on a terminal."""
    console = _terminal() if use_tqdm and num_prompts > 1 else None
    if console is None:
        yield lambda _: None
        return
    shown = _PromptBar(console, num_prompts)
    try:
        yield shown.add
    finally:
        shown.close()


class _PromptBar:
    """Finished prompts, their total, and tokens per second.

    No thread updates it, so that nothing runs next to the steps.
    """

    def __init__(self, console: Console, num_prompts: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]:.0f} tokens/s"),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=num_prompts, speed=0.0)
        self._ended = self._num_tokens = 0
        self._gone = False
        self._start = perf_counter()
        self._due = 0.0
        self._draw(self._bar.start)

    def add(self, events: Sequence[StepEvent]) -> None:
        """Count the results of a step, and show the counts if they are due."""
        for event in events:
            self._num_tokens += len(event.token_ids)
            self._ended += event.finish_reason is not None
        if perf_counter() >= self._due:
            self._draw(self._bar.refresh)

    def close(self) -> None:
        """Show the final counts, which stay on the terminal."""
        self._draw(self._bar.stop)

    def _draw(self, draw: Callable[[], None]) -> None:
        now = perf_counter()
        self._due = now + REFRESH_SECONDS
        if self._gone:
            return
        speed = self._num_tokens / (now - self._start) if self._num_tokens else 0.0
        try:
            self._bar.update(self._task, completed=self._ended, speed=speed)
            draw()
        except OSError:
            # a closed terminal must not end the run
            self._gone = True


def _terminal() -> Console | None:
    """Standard error as a terminal with cursor control; None: it is none."""
    stream = sys.stderr
    if stream is None or stream.closed or not stream.isatty():
        return None
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    return None if console.is_dumb_terminal or not console.is_terminal else console
