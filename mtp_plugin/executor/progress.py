"""What goes on, on standard error where that is a terminal: loading, and batches of prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

REFRESH_SECONDS = 0.5
"""Between two pictures of a bar, which take a millisecond; a step in between costs a look at the
clock."""

Progress = Callable[[str], None]
"""Called with a line of text as loading goes on."""


class Gain(Protocol):
    """What a step gave a request."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens."""
        ...

    @property
    def finish_reason(self) -> object | None:
        """None: the request goes on."""
        ...


@contextmanager
def loading_told(on_progress: Progress | None) -> Iterator[Progress | None]:
    """Whom to tell how loading goes: who asked, else a line of the terminal that goes in the end.

    Gives None where there is no terminal either.
    """
    console = None if on_progress is not None else _terminal()
    if console is None:
        yield on_progress
        return
    from rich.text import Text

    with console.status("loading") as status:
        yield lambda line: status.update(Text(line))


@contextmanager
def prompts_told(num_prompts: int, use_tqdm: bool) -> Iterator[Callable[[Sequence[Gain]], None]]:
    """Whom to tell what steps gave: a bar where it is asked for, for several prompts and a
    terminal."""
    console = _terminal() if use_tqdm and num_prompts > 1 else None
    if console is None:
        yield _nobody
        return
    shown = _PromptBar(console, num_prompts)
    try:
        yield shown.add
    finally:
        shown.close()


def _nobody(_: Sequence[Gain]) -> None:
    pass


class _PromptBar:
    """Prompts that have ended, of how many, and tokens per second.

    No thread draws it, so that nothing runs beside the steps.
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

    def add(self, gains: Sequence[Gain]) -> None:
        """Count what a step gave; now and then, show it."""
        for gain in gains:
            self._num_tokens += len(gain.token_ids)
            self._ended += gain.finish_reason is not None
        if perf_counter() >= self._due:
            self._draw(self._bar.refresh)

    def close(self) -> None:
        """Show what there is in the end, and leave it there."""
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
            # a terminal that has gone must not end what it only watched
            self._gone = True


def _terminal() -> Console | None:
    """Standard error as a terminal that can be drawn on; None: it is none."""
    stream = sys.stderr
    if stream is None or stream.closed or not stream.isatty():
        return None
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    return None if console.is_dumb_terminal or not console.is_terminal else console
