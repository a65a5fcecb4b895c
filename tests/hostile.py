"""Invalid values, for every function that validates its input."""

from __future__ import annotations

import decimal
import fractions
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch


class Evil:
    """Fails wherever it is looked at."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __repr__(self) -> str:
        raise RuntimeError("spelled")


class BadIndex:
    """No integer, though it has the method of one."""

    def __index__(self) -> int:
        raise RuntimeError("counted")


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


_own: list[Any] = []
_own.append(_own)

HOSTILE_TEXT = {
    "a forged line": "x\nnext: rm -rf ~",
    "an erased line": "x\r\x1b[2K\x1b]0;title\x07next: rm -rf ~",
    "reversed text": "x\u202e~ fr- mr",
    "line separators": "x\u2028next: rm\x85next: rm",
    "a lone surrogate": "\ud800",
    "1 MB": "x" * 10**6,
    "shell characters": "$(rm -rf ~)`rm`'\"\\;&",
}
"""Texts of files and requests that a terminal, a log or a shell must not get as they are."""
_letters = "abcdefghijklmnop"
HOSTILE_YAML = {
    "nested aliases": "a: &a [x]\n"
    + "".join(f"{b}: &{b} [{f'*{a}, ' * 9}]\n" for a, b in pairwise(_letters)),
    "nested merge keys": "a: &a {x: 1}\n"
    + "".join(f"{b}: &{b} {{<<: [{f'*{a}, ' * 9}]}}\n" for a, b in pairwise(_letters)),
    "an alias of itself": "a: &a [*a]",
    "a long file": "#" * 2**21,
}
"""Files that no reader may expand."""
HOSTILE_PATTERNS = {
    "a repeat in a repeat": "re:(.*.*)*x$",
    "a lazy repeat in a repeat": r"re:(?:\w+?)+?!",
    "choices that overlap": "re:(a|a|a)*b",
    "a repeated group in verbose form": "re:(?x)(a+) +b",
    "many repeats": "re:" + ".*a" * 12 + "!",
    "many optional characters": "re:" + "a?" * 40 + "a" * 40 + "!",
    "many stars": "*a" * 30 + "b",
    "a deep pattern": "re:" + "(" * 5000 + ")" * 5000,
    "a huge count": "re:a{99999999999}",
}
"""Patterns of names of layers whose match takes for ever, or that cannot be compiled."""
HOSTILE: dict[str, Any] = {
    "nothing": None,
    "a flag": True,
    "a negative": -1,
    "beyond 64 bits": 10**30,
    "5,000 digits": 10**5000,
    "a fraction": 0.5,
    "NaN": math.nan,
    "infinity": math.inf,
    "empty": "",
    "NUL": "\0",
    **HOSTILE_TEXT,
    "bytes": b"x\xff",
    "a list": [None],
    "a list of itself": _own,
    "a deep list": _nested(5000),
    "a long list": [1] * 10**5,
    "a table": {1: 2},
    "many keys": {str(i): i for i in range(2000)},
    "an object": object(),
    "a class": int,
    "a function": len,
    "a set": {1, 2},
    "a range": range(3),
    "a tensor": torch.ones(3),
    "an array": numpy.arange(3),
    "a NumPy integer": numpy.int64(3),
    "a decimal": decimal.Decimal("NaN"),
    "a ratio": fractions.Fraction(1, 3),
    "a complex number": 1j,
    "a path": Path("x"),
    "a bad index": BadIndex(),
    "an evil object": Evil(),
}
LONGEST_LINE = 1500
"""Characters of a line of an error."""


def is_short(error: Exception) -> bool:
    """Whether an error's message can be read."""
    lines = str(error).splitlines()
    return len(lines) <= 101 and all(len(line) <= LONGEST_LINE for line in lines)


@contextmanager
def suppress_short(kind: type[Exception]) -> Iterator[None]:
    """An error of a kind is as good as none, where it can be read."""
    try:
        yield
    except kind as error:
        if not is_short(error):
            raise
