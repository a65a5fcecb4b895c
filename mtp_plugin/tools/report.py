"""The results of a command that compares outputs: one class and one JSON form for all of them."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from mtp_plugin import __version__
from mtp_plugin.tools.terminal.console import DIFFERENT, OK


@dataclass(frozen=True)
class Report:
    """Results of ``generate``, ``bench``, ``parity`` or the soak test."""

    command: str
    ran: Mapping[str, Any]
    """What ran: model, device, options."""
    identical: bool | None
    """Whether all outputs are those of the reference; None: not compared, or not promised."""
    results: list[dict[str, Any]]

    @property
    def exit_code(self) -> int:
        """`DIFFERENT` if an output is not identical to the reference."""
        return DIFFERENT if self.identical is False else OK

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "kind": self.command,
            "versions": versions(),
            **self.ran,
            "identical": self.identical,
            "results": self.results,
        }


def versions() -> dict[str, str]:
    """Return the versions of the package and its dependencies."""
    found = {"mtp_plugin": __version__, "python": platform.python_version()}
    return {**found, **{name: version(name) for name in ("torch", "transformers")}}
