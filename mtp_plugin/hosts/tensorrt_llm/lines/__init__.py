"""TensorRT-LLM's lines, a file each, told apart by what an installation has."""

from __future__ import annotations

from mtp_plugin.errors import HostError
from mtp_plugin.hosts.tensorrt_llm.adapter import Adapter
from mtp_plugin.hosts.tensorrt_llm.lines.v1_2 import Line12
from mtp_plugin.hosts.tensorrt_llm.lines.v1_3a import Line13a
from mtp_plugin.hosts.tensorrt_llm.lines.v1_3b import Line13b
from mtp_plugin.hosts.tensorrt_llm.seams import Found, look

LINES: tuple[type[Adapter], ...] = (Line12, Line13a, Line13b)


def looked_for() -> dict[str, list[Found]]:
    """What every line needs, and what there is."""
    return {line.line: [look(need) for need in line.needs] for line in LINES}


def line_among(seen: dict[str, list[Found]]) -> type[Adapter] | None:
    """The line all of whose needs hold; None: there is none."""
    return next((line for line in LINES if all(f.holds for f in seen[line.line])), None)


def find_line() -> tuple[type[Adapter], list[Found]]:
    """The line that an installation is, by its signatures.

    Raises:
        HostError: none of them, listing what was looked for and what was found.
    """
    seen = looked_for()
    line = line_among(seen)
    if line is not None:
        return line, seen[line.line]
    raise HostError(
        f"TensorRT-LLM: expected one of the lines {', '.join(seen)}, got none of them. Nothing is "
        "installed. What each lacks:\n"
        + "\n".join(
            f"  {name}: {found}"
            for name, every in seen.items()
            for found in every
            if not found.holds
        )
    )
