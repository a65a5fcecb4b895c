"""The verification methods: their names in configs and requests, codes in slots, kinds of drafts.

The methods are implemented in ``mtp_plugin.speculative.verification``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLED = "rejection sampling, which keeps the distribution but not the output of a seed"


@dataclass(frozen=True)
class Way:
    """A verification method."""

    words: str
    """Description for users."""
    drafts: tuple[str, ...]
    """Supported values of ``draft_sampling``; the first is the default."""
    code: int | None = None
    """Value in the slot column ``verification``; None: requests cannot choose it."""
    keeps_text: bool = True
    """Whether sampled output equals non-speculative decoding; else only its distribution does."""


WAYS: Mapping[str, Way] = {
    "coupled": Way(
        "exact match with the target's token, which is the argmax for greedy requests",
        ("coupled", "greedy"),
        code=0,
    ),
    "rejection": Way(_SAMPLED, ("plain", "greedy"), code=1, keeps_text=False),
    "block": Way(_SAMPLED, ("plain", "greedy"), code=2, keeps_text=False),
    "synthetic": Way(
        "random acceptance at given rates, for benchmarks only", ("coupled", "greedy")
    ),
}
"""Method name -> method."""


def codes() -> dict[str, int]:
    """Return name -> code of the methods that requests can choose."""
    return {name: way.code for name, way in WAYS.items() if way.code is not None}
