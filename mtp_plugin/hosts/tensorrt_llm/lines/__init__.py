"""The supported API versions of TensorRT-LLM, one file each, detected by names and signatures."""

from __future__ import annotations

from mtp_plugin.errors import HostError
from mtp_plugin.hosts.tensorrt_llm.adapter import Adapter
from mtp_plugin.hosts.tensorrt_llm.lines.v1_2 import Line12
from mtp_plugin.hosts.tensorrt_llm.lines.v1_3a import Line13a
from mtp_plugin.hosts.tensorrt_llm.lines.v1_3b import Line13b
from mtp_plugin.hosts.tensorrt_llm.seams import Found, look

LINES: tuple[type[Adapter], ...] = (Line12, Line13a, Line13b)


def looked_for() -> dict[str, list[Found]]:
    """Look for the names that each API version needs."""
    return {line.line: [look(need) for need in line.needs] for line in LINES}


def line_among(seen: dict[str, list[Found]]) -> type[Adapter] | None:
    """Return the API version whose needs all hold, or None."""
    return next((line for line in LINES if all(f.holds for f in seen[line.line])), None)


def find_line() -> tuple[type[Adapter], list[Found]]:
    """Detect the API version of the installed TensorRT-LLM.

    Raises:
        HostError: it is not supported; the message lists needed names and what was found.
    """
    seen = looked_for()
    line = line_among(seen)
    if line is not None:
        return line, seen[line.line]
    raise HostError(
        f"TensorRT-LLM: expected one of the API versions {', '.join(seen)}, got none of them. "
        "Nothing is installed. What each lacks:\n"
        + "\n".join(
            f"  {name}: {found}"
            for name, every in seen.items()
            for found in every
            if not found.holds
        )
    )
