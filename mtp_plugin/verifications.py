"""The verification methods: their names in configs and requests, codes in slots, kinds of drafts.

The methods are implemented in ``mtp_plugin.speculative.verification``. Methods from outside the
package have only a name and a code here; ``custom`` in that folder has the methods themselves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points


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
    "rejection": VerificationMethod(
        "rejection sampling, which keeps the distribution but not the output of a seed",
        ("plain", "greedy"),
        code=1,
        keeps_output=False,
    ),
    "block": VerificationMethod(
        "rejection sampling of all drafts of a step at once, with the same guarantee",
        ("plain", "greedy"),
        code=2,
        keeps_output=False,
    ),
    "synthetic": VerificationMethod(
        "random acceptance at given rates, for benchmarks only", ("coupled", "greedy")
    ),
}
"""Method name -> method, of the methods in this package."""

ENTRY_POINT_GROUP = "mtp_plugin.verifications"
CUSTOM_DRAFTS = METHODS["coupled"].drafts
"""Supported values of ``draft_sampling`` of methods from outside the package."""

_custom_codes: dict[str, int] = {}
_removed: set[str] = set()
"""Names of methods that were registered; engines that were built with them keep them."""
# codes are not used again, so that slots of a running engine stay valid
_next_code = itertools.count(16)


def codes() -> dict[str, int]:
    """Return name -> code of the methods in this package that requests can choose."""
    return {name: method.code for name, method in METHODS.items() if method.code is not None}


def custom_codes() -> dict[str, int]:
    """Return name -> code of the methods from outside: registered, or offered by entry points."""
    for name in sorted(offered_methods()):
        if name not in METHODS:
            add_custom(name)
    return dict(_custom_codes)


def add_custom(name: str) -> None:
    """Give a method from outside the package a code, if it has none."""
    if name not in _custom_codes:
        _custom_codes[name] = next_code()


def next_code() -> int:
    """Return a code that no method or drafter of this process has."""
    return next(_next_code)


def remove_custom(name: str) -> None:
    """Forget a method's code: new configs cannot name it, requests of running engines can."""
    _custom_codes.pop(name, None)
    _removed.add(name)


def is_nameable(name: object) -> bool:
    """Return whether a request may name this method; its engine checks that it has it."""
    return isinstance(name, str) and (name in codes() or is_custom(name) or name in _removed)


def is_custom(name: object) -> bool:
    """Return whether ``name`` is a method from outside the package."""
    return isinstance(name, str) and (
        name in _custom_codes or (name not in METHODS and name in offered_methods())
    )


def drafts_of(name: str) -> tuple[str, ...]:
    """Return the supported values of ``draft_sampling`` of a method; the first is the default."""
    return METHODS[name].drafts if name in METHODS else CUSTOM_DRAFTS


@functools.cache
def offered_methods() -> Mapping[str, Sequence[EntryPoint]]:
    """Return the entry points of `ENTRY_POINT_GROUP` by name. They are searched once."""
    offered: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        offered.setdefault(point.name, []).append(point)
    return offered
