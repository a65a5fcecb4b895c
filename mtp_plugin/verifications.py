"""The verification methods: their names in configs and requests, codes in slots, kinds of drafts.

The methods are implemented in ``mtp_plugin.speculative.verification``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_SAMPLED = "rejection sampling, which keeps the distribution but not the output of a seed"


@dataclass(frozen=True)
class VerificationMethod:
    """A verification method."""

    description: str
    """Description for users."""
    drafts: tuple[str, ...]
    """Supported values of ``draft_sampling``; the first is the default."""
    code: int | None = None
    """Value in the slot column ``verification``; None: requests cannot choose it."""
    keeps_output: bool = True
    """Whether sampled output equals non-speculative decoding; else only its distribution does."""


METHODS: Mapping[str, VerificationMethod] = {
    "coupled": VerificationMethod(
        "exact match with the target's token, which is the argmax for greedy requests",
        ("coupled", "greedy"),
        code=0,
    ),
    "rejection": VerificationMethod(_SAMPLED, ("plain", "greedy"), code=1, keeps_output=False),
    "block": VerificationMethod(_SAMPLED, ("plain", "greedy"), code=2, keeps_output=False),
    "synthetic": VerificationMethod(
        "random acceptance at given rates, for benchmarks only", ("coupled", "greedy")
    ),
}
"""Method name -> method."""


def codes() -> dict[str, int]:
    """Return name -> code of the methods that requests can choose."""
    return {name: method.code for name, method in METHODS.items() if method.code is not None}
