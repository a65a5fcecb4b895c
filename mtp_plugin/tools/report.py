"""The results of a command that compares outputs: one class and one JSON form for all of them."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from typing import Any

from mtp_plugin import __version__
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.tools.terminal.console import DIFFERENT, OK


@dataclass(frozen=True)
class Report:
    """Results of ``generate``, ``parity`` or the soak test."""

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


def as_json(value: Any) -> Any:
    """Return a value in JSON: data classes as objects, None for a number that JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, AcceptanceStats):
        return {
            "acceptance_length": value.acceptance_length,
            "per_position": value.per_position,
            "acceptance_rate": value.acceptance_rate,
            "steps": value.steps,
            "emitted": value.emitted,
            "drafted": value.num_drafted,
            "steps_by_emitted_tokens": value.histogram,
            "label": as_json(value.label),
        }
    if is_dataclass(value):
        return {each.name: as_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):  # the log-probabilities of a position
        return [
            {"token_id": token, "logprob": as_json(one.logprob), "rank": one.rank}
            for token, one in value.items()
        ]
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value
