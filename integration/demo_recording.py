"""Record ``make demo`` as an animated SVG.

``python -m integration.demo_recording COMMAND... > integration/results/demo.svg`` runs the command
in a terminal of 78 columns and shows its standard output at the times when it came.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

COLUMNS = 78
SLOWER, LONGEST_PAUSE, END = 4, 0.6, 5.0
"""Factor of all times; seconds."""
WIDTH, STEP, LINE, LEFT, TOP = 640, 7.8, 17, 14, 43
NOTE = f"Two small models on two CPU cores (output slowed down {SLOWER}x, pauses shortened)"
STYLE = (
    "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
    ".plain{fill:#d7dae0}.green{fill:#7ee787}.dim{fill:#8b949e}.b{font-weight:bold}"
    "@media (prefers-color-scheme:light){rect{fill:#f6f8fa}"
    ".plain{fill:#1f2328}.green{fill:#1a7f37}.dim{fill:#59636e}}"
)
CODES = re.compile(r"\x1b\[([\d;]*)m")
RUNS = re.compile(r"\S+(?: \S+)*")
"""Text between gaps of two or more spaces, which are positions."""


class Group(NamedTuple):
    """What appears at the same time."""

    seconds: float
    texts: list[str]


def record(command: Sequence[str]) -> list[tuple[float, str]]:
    """Run a command; return its standard output with the seconds at which each part came."""
    reader, writer = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    parts: list[tuple[float, str]] = []
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=writer, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        os.close(writer)
        try:
            while data := os.read(reader, 65536):
                parts.append((time.perf_counter() - start, data.decode()))
        except OSError:  # a terminal ends so when its last writer has left
            pass
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with exit code {process.returncode}")
    return parts


def svg(parts: Sequence[tuple[float, str]]) -> str:
    """Return the recording of these parts of the output."""
    groups = [Group(0.0, [_text("$ make demo", 0, 0, "plain b")])]
    row, column, style, shown, before = 1, 0, "plain", 0.0, parts[0][0]
    for seconds, data in parts:
        shown += min(SLOWER * (seconds - before), LONGEST_PAUSE)
        before = seconds
        texts = []
        for index, piece in enumerate(CODES.split(data.replace("\r", ""))):
            if index % 2:
                style = _style(piece.split(";"))
                continue
            for number, line in enumerate(piece.split("\n")):
                row, column = (row + 1, 0) if number else (row, column)
                while line:
                    here, line = line[: COLUMNS - column], line[COLUMNS - column :]
                    for run in RUNS.finditer(here):
                        texts.append(_text(run[0], row, column + run.start(), style))
                    column += len(here)
                    if line:  # a terminal wraps
                        row, column = row + 1, 0
        if texts:
            groups.append(Group(shown, texts))
    total = shown + END
    height = TOP + LINE * row + 10
    frames = "".join(
        f"#t{i}{{animation:k{i} {total:.2f}s step-end infinite}}"
        f"@keyframes k{i}{{0%{{opacity:0}}{100 * group.seconds / total:.3f}%{{opacity:1}}}}"
        for i, group in enumerate(groups)
        if i
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}">',
            f"<title>{NOTE}</title>",
            f"<style>{STYLE}@media (prefers-reduced-motion:no-preference){{{frames}}}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#0d1117"/>',
            f'<text class="dim" x="{WIDTH // 2}" y="20" text-anchor="middle">{NOTE}</text>',
            *(f'<g id="t{i}">\n' + "\n".join(g.texts) + "\n</g>" for i, g in enumerate(groups)),
            "</svg>\n",
        ]
    )


def _style(codes: Sequence[str]) -> str:
    color = "green" if "32" in codes else "dim" if "2" in codes else "plain"
    return f"{color} b" if "1" in codes else color


def _text(text: str, row: int, column: int, style: str) -> str:
    x, y = LEFT + STEP * column, TOP + LINE * row
    place = f'x="{x:g}" y="{y}" textLength="{STEP * len(text):g}"'
    return f'<text class="{style}" {place}>{escape(text)}</text>'


if __name__ == "__main__":
    sys.stdout.write(svg(record(sys.argv[1:])))
