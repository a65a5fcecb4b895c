"""Whether the installed TensorRT-LLM is a line that the plugin goes into; nothing is installed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TextIO

from mtp_plugin.errors import MTPPluginError
from mtp_plugin.hosts.tensorrt_llm.lines import line_among, looked_for
from mtp_plugin.hosts.tensorrt_llm.seams import PACKAGE, UTILS, Found, named

OK, PROBLEM = 0, 1


@dataclass
class Examination:
    """What was found, line by line."""

    line: str | None
    version: str | None
    seams: dict[str, list[Found]]
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 where the plugin can be installed."""
        return PROBLEM if self.problems else OK

    def rows(self) -> list[tuple[str, str, str]]:
        """(holds, what was looked for, what was found) of the line, else of every line."""
        shown = self.seams if self.line is None else {self.line: self.seams[self.line]}
        return [
            ("yes" if found.holds else "NO", str(found.need), found.found)
            for every in shown.values()
            for found in every
        ]


def examine() -> Examination:
    """Look for the seams of every line, and try the classes of the one that is there."""
    seams = looked_for()
    line = line_among(seams)
    seen = Examination(None if line is None else line.line, named(PACKAGE, "__version__"), seams)
    if named(PACKAGE, "__name__") is None:
        seen.problems.append(f"{PACKAGE} cannot be imported")
    elif named(UTILS, "__name__") is None:
        seen.problems.append(f"{UTILS} cannot be imported")
    if line is None:
        seen.problems.append(f"none of the lines {', '.join(seams)}")
        return seen
    try:
        line()
    except MTPPluginError as error:
        seen.problems += str(error).splitlines()
    return seen


def show(seen: Examination, out: TextIO) -> None:
    """The table of seams, and what is wrong."""
    told = f"{PACKAGE} {seen.version or '(no version)'}"
    out.write(f"{told}: line {seen.line}\n" if seen.line else f"{told}\n")
    rows = seen.rows()
    width = max((len(need) for _, need, _ in rows), default=0)
    for holds, need, found in rows:
        out.write(f"  {holds:3}  {need:{width}}  {found}\n")
    for problem in seen.problems:
        out.write(f"problem: {problem}\n")


def main() -> int:
    """The table on standard output; the exit code."""
    seen = examine()
    show(seen, sys.stdout)
    return seen.exit_code
