"""Record a command in a terminal as an animated SVG.

``python -m integration.recording OUTPUT.svg --title TITLE -- COMMAND ...`` runs the command in a
pseudo-terminal of 100 columns. Standard output is recorded with timestamps and colors; standard
error (progress messages) is not. Playback slows the output down by `SLOWDOWN` and shortens every
pause to `LONGEST_PAUSE`. Without CSS animations the SVG shows the last frame.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

COLUMNS, ROWS = 100, 50
SLOWDOWN = 10.0
LONGEST_PAUSE, HOLD = 1.0, 8.0  # seconds
CHAR, LINE, MARGIN, BAR = 7.8, 17, 14, 30  # pixels
COLORS = {None: "#d7dae0", "green": "#7ee787", "dim": "#8b949e"}
_SGR = re.compile(r"\x1b\[([\d;]*)m")
_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


@dataclass(frozen=True)
class Chunk:
    """Characters of one style in one line, all written at the same time."""

    seconds: float
    row: int
    column: int
    text: str
    color: str | None
    bold: bool


def record(command: list[str]) -> list[tuple[float, str]]:
    """Run a command in a pseudo-terminal; return its output with the time of each read.

    Raises:
        SystemExit: with the command's exit code if it fails.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    start, reads = time.perf_counter(), list[tuple[float, bytes]]()
    process = subprocess.Popen(
        command, stdout=theirs, stderr=subprocess.DEVNULL, stdin=theirs, env=environment
    )
    os.close(theirs)
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as EIO
            break
        if not data:
            break
        reads.append((time.perf_counter() - start, data))
    if process.wait():
        sys.exit(process.returncode)
    return [(seconds, data.decode("utf-8", "replace")) for seconds, data in reads]


def playback(reads: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Slow the output down and shorten long pauses; the first output comes after half a second."""
    played, now, before = list[tuple[float, str]](), 0.5, None
    for seconds, text in reads:
        if before is not None:
            now += min((seconds - before) * SLOWDOWN, LONGEST_PAUSE)
        before = seconds
        played.append((now, text))
    return played


def chunks(reads: list[tuple[float, str]], command: str) -> list[Chunk]:
    """Lay the output out on the grid of the terminal, after a line with the command."""
    found = [Chunk(0.0, 0, 0, f"$ {command}", None, True)]
    row, column, color, bold = 1, 0, None, False
    for seconds, text in reads:
        for part in re.split(r"(\x1b\[[\d;?]*[A-Za-z]|\r?\n)", text):
            if sgr := _SGR.fullmatch(part):
                codes = sgr[1].split(";")
                color = "green" if "32" in codes else "dim" if "2" in codes else None
                bold = "1" in codes
            elif part in ("\n", "\r\n"):
                row, column = row + 1, 0
            elif part and not _ESCAPE.fullmatch(part):
                # runs of spaces separate chunks, since SVG collapses them
                for word in re.finditer(r"\S+(?: \S+)*", part.expandtabs(8)):
                    place = column + word.start()
                    found.append(Chunk(seconds, row, place, word[0], color, bold))
                column += len(part.expandtabs(8))
    return found


def svg(found: list[Chunk], title: str, *, until: float | None = None) -> str:
    """The animation; with ``until`` the still frame at that time."""
    rows = max(chunk.row for chunk in found) + 1
    width, height = round(COLUMNS * CHAR + 2 * MARGIN), rows * LINE + BAR + MARGIN
    times = sorted({chunk.seconds for chunk in found})
    total = times[-1] + HOLD
    style = [
        "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}",
        *(f".{color or 'plain'}{{fill:{value}}}" for color, value in COLORS.items()),
        ".b{font-weight:bold}",
    ]
    if until is None:
        rules = [
            f"#t{number}{{animation:k{number} {total:.2f}s step-end infinite}}"
            f"@keyframes k{number}{{0%{{opacity:0}}{seconds / total:.3%}{{opacity:1}}}}"
            for number, seconds in enumerate(times)
            if seconds
        ]
        style.append(f"@media (prefers-reduced-motion:no-preference){{{''.join(rules)}}}")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">',
        f"<title>{escape(title)}</title>",
        f"<style>{''.join(style)}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
        f'<text class="dim" x="{width / 2:g}" y="20" text-anchor="middle">{escape(title)}</text>',
    ]
    for number, seconds in enumerate(times):
        if until is not None and seconds > until:
            continue
        lines.append(f'<g id="t{number}">')
        for chunk in (each for each in found if each.seconds == seconds):
            style_of = (chunk.color or "plain") + (" b" if chunk.bold else "")
            lines.append(
                f'<text class="{style_of}" x="{MARGIN + chunk.column * CHAR:g}" '
                f'y="{BAR + (chunk.row + 1) * LINE - 4}" textLength="{len(chunk.text) * CHAR:g}">'
                f"{escape(chunk.text)}</text>"
            )
        lines.append("</g>")
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    """Record the command and write the SVG."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--title", required=True, help="shown above the recording")
    parser.add_argument("--shown-as", help="the command as shown, default: as it is run")
    parser.add_argument("--frame", type=float, help="write the still frame at this second instead")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    shown = options.shown_as or shlex.join(options.command)
    found = chunks(playback(record(options.command)), shown)
    title = f"{options.title} (output slowed down {SLOWDOWN:g}x, pauses shortened)"
    options.output.write_text(svg(found, title, until=options.frame), encoding="utf-8")


if __name__ == "__main__":
    main()
