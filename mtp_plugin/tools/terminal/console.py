"""Where output goes: results to standard output, everything else to standard error."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text
from typing_extensions import override

from mtp_plugin.errors import MTPPluginError, one_line

OK = 0
DIFFERENT = 1
"""The output differs from non-speculative decoding, or ``doctor`` found a problem."""
REFUSED = 2
"""A config, checkpoint or request was refused."""
UNWRITABLE = 1
"""The output cannot be written, as on a full disk."""
INTERRUPTED = 130
BROKEN_PIPE = 141

_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))}
del _VISIBLE[ord("\n")], _VISIBLE[ord("\t")]


class OutputConsole(Console):
    """A console that exits if it cannot write: silently if the reader closed the pipe, else with an
    error line."""

    @override
    def on_broken_pipe(self) -> None:
        self._give_up()
        raise SystemExit(BROKEN_PIPE)

    @override
    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            self._give_up()
            if not self.stderr:
                why = error.strerror or error
                show_error(OSError(f"standard output cannot be written: {why}"))
            raise SystemExit(UNWRITABLE) from None

    def _give_up(self) -> None:
        """Discard all further output, including what Python flushes at exit."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())

    @property
    def has_colors(self) -> bool:
        """Whether the console shows colors."""
        return self.color_system is not None and not self.no_color

    def write(self, text: str, style: str | None = None) -> None:
        """Write text without wrapping; a terminal gets control characters as escapes."""
        if self.is_terminal:
            text = text.translate(_VISIBLE)
        # rich replaces tabs of a plain string by spaces
        segment = Segment(text, Style.parse(style) if style else None)
        self.print(Segments([segment]), end="", crop=False)

    def write_line(self, text: str, style: str | None = None) -> None:
        self.write(f"{text}\n", style)


def output() -> OutputConsole:
    """Return the console of standard output, for results."""
    return OutputConsole(highlight=False, soft_wrap=True)


def messages() -> OutputConsole:
    """Return the console of standard error, for progress, warnings and errors."""
    return OutputConsole(stderr=True, highlight=False, soft_wrap=True)


def run_to_the_end(command: Callable[[], None]) -> None:
    """Run a command; print the package's errors and exit with 2, or with 1 if the disk is full."""
    require_output()
    tolerate_odd_characters()
    try:
        command()
    except MTPPluginError as error:
        show_error(error)
        sys.exit(REFUSED)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        show_error(OSError(f"the output cannot be written: {error.strerror}"))
        # keep Python from flushing at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(UNWRITABLE)


def require_output() -> None:
    """Exit with an error if standard output is closed."""
    if sys.stdout is None:
        show_error(OSError("standard output is closed; redirect it to /dev/null to discard it"))
        raise SystemExit(UNWRITABLE)


def tolerate_odd_characters() -> None:
    """Write characters that the terminal cannot encode as escapes."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def show_error(error: Exception) -> None:
    """Print one ``error:`` line per line of the message."""
    console = messages()
    for line in str(error).splitlines() or [type(error).__name__]:
        console.write("error: ", "bold red")
        console.write_line(one_line(line))


def can_show(characters: str, stream: IO[str]) -> bool:
    """Return whether the stream can encode these characters."""
    try:
        characters.encode(getattr(stream, "encoding", None) or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def progress_bar(share: float, width: int = 20) -> str:
    """Return a bar with the share that is done, for a progress message."""
    done = min(width, int(width * share))
    return f"[{'#' * done}{'.' * (width - done)}] {share:4.0%}"


@contextmanager
def progress(console: OutputConsole) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress messages: a spinner in a terminal, else lines."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield console.write_line
        return
    with console.status("") as status:
        yield lambda text: status.update(Text(text))
