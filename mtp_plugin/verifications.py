"""The ways to judge drafts, under the names that configs and requests call them by.

One table: what may be asked for, what slots then say, and which drafts go with it. What judges is a
mode in ``mtp_plugin.speculative.verification``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_BY_ODDS = "by the odds of their draw, the distribution stays, the text of a seed does not"


@dataclass(frozen=True)
class Way:
    """One way to judge drafts."""

    words: str
    """By what, for whoever writes a config."""
    drafts: tuple[str, ...]
    """How they may be drawn, the first where nobody says."""
    code: int | None = None
    """Column ``verification`` of requests that it judges; None: no request may ask for it."""
    keeps_text: bool = True
    """Whether a drawn text is the target's own; else it is another draw of the same
    distribution."""


WAYS: Mapping[str, Way] = {
    "coupled": Way(
        "by the target's own choice, which is its first one while requests are greedy",
        ("coupled", "greedy"),
        code=0,
    ),
    "rejection": Way(_BY_ODDS, ("plain", "greedy"), code=1, keeps_text=False),
    "block": Way(_BY_ODDS, ("plain", "greedy"), code=2, keeps_text=False),
    "synthetic": Way("draws decide, for benchmarks only", ("coupled", "greedy")),
}
"""By name."""


def codes() -> dict[str, int]:
    """Those of the ways that requests may ask for, by name."""
    return {name: way.code for name, way in WAYS.items() if way.code is not None}
