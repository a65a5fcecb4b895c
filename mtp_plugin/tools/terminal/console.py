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

from mtp_plugin.errors import MTPPluginError

OK = 0
DIFFERENT = 1
"""The text is not that of target-only decoding, or the doctor found a problem."""
REFUSED = 2
"""A named error: config, checkpoint or request."""
UNWRITABLE = 1
"""The output cannot be written, as on a full disk."""
INTERRUPTED = 130
BROKEN_PIPE = 141

_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))}
del _VISIBLE[ord("\n")], _VISIBLE[ord("\t")]


class OutputConsole(Console):
    """A console that ends the process when its output fails: quietly if the reader has closed it,
    with a line if it cannot be written."""

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
        """Write nothing more, nor what Python still holds when it ends."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())

    @property
    def has_colors(self) -> bool:
        """Whether styles can distinguish texts."""
        return self.color_system is not None and not self.no_color

    def write(self, text: str, style: str | None = None) -> None:
        """Write text as it is, unwrapped; a terminal gets control characters spelled out."""
        if self.is_terminal:
            text = text.translate(_VISIBLE)
        # a segment, since rich would turn the tabs of a string into spaces
        segment = Segment(text, Style.parse(style) if style else None)
        self.print(Segments([segment]), end="", crop=False)

    def write_line(self, text: str, style: str | None = None) -> None:
        """Write one line."""
        self.write(f"{text}\n", style)


def output() -> OutputConsole:
    """Standard output: results."""
    return OutputConsole(highlight=False, soft_wrap=True)


def messages() -> OutputConsole:
    """Standard error: progress, warnings and errors."""
    return OutputConsole(stderr=True, highlight=False, soft_wrap=True)


def run_to_the_end(command: Callable[[], None]) -> None:
    """Run a command line; named errors become one line each and exit code 2, as a full disk does
    with exit code 1."""
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
        # nothing more may be written when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(UNWRITABLE)


def require_output() -> None:
    """End the process where standard output is closed: what it has to say would be lost."""
    if sys.stdout is None:
        show_error(OSError("standard output is closed; redirect it to /dev/null to discard it"))
        raise SystemExit(UNWRITABLE)


def tolerate_odd_characters() -> None:
    """Let output that a terminal's encoding lacks appear spelled out instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def show_error(error: Exception) -> None:
    """One ``error:`` line per line of the message."""
    console = messages()
    for line in str(error).splitlines() or [type(error).__name__]:
        console.write("error: ", "bold red")
        console.write_line(line)


def can_show(characters: str, stream: IO[str]) -> bool:
    """Whether the stream's encoding has these characters."""
    try:
        characters.encode(getattr(stream, "encoding", None) or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


@contextmanager
def progress(console: OutputConsole) -> Iterator[Callable[[str], None]]:
    """A function to call with what goes on: a spinner in a terminal, else a line each."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield console.write_line
        return
    with console.status("") as status:
        yield lambda text: status.update(Text(text))
