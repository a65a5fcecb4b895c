"""Annotations, values and keys in words: what was expected, what came."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from mtp_plugin.errors import format_value

LONGEST_KEY = 200
"""Characters of a key that messages show."""


def expected(annotation: Any, constraints: tuple[Any, ...] = ()) -> str:
    """The allowed values of an annotation, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        found = (m.metadata if isinstance(m, FieldInfo) else [m] for m in arguments[1:])
        return expected(arguments[0], (*constraints, *(one for each in found for one in each)))
    if type(None) in arguments:
        inner = next(a for a in arguments if a is not type(None))
        return f"{expected(inner, constraints)} or null"
    if arguments and origin in (Union, UnionType):
        # what looks alike is said once
        return " or ".join(dict.fromkeys(expected(a, constraints) for a in arguments))
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + join(arguments)
    if origin is tuple:
        return f"a list (each item {expected(arguments[0])})"
    if origin is dict:
        key, value = map(expected, arguments)
        return f"a mapping (each key {key}, each value {value})"
    limits = {
        name: getattr(constraint, name)
        for constraint in constraints
        for name in ("ge", "gt", "le", "min_length")
        if hasattr(constraint, name)
    }
    if annotation is str:
        return "text that is not empty" if limits else "text"
    names = {bool: "true or false", int: "an integer", float: "a number"}
    return names.get(annotation, "a mapping") + _range(limits)


def _range(limits: Mapping[str, Any]) -> str:
    if "ge" in limits and "le" in limits:
        return f" from {limits['ge']} to {limits['le']}"
    if "ge" in limits:
        return f" of at least {limits['ge']}"
    if "gt" in limits:
        return f" above {limits['gt']}" + (f", at most {limits['le']}" if "le" in limits else "")
    return ""


def got(value: Any) -> str:
    """What came, spelled as YAML spells it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    shown = format_value(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def join(values: Iterable[Any]) -> str:
    """The values in quotes, with commas between them."""
    return ", ".join(repr(value) for value in values)


def spelled(step: int | str) -> str:
    """A step of a key path; quoted where it would not show."""
    if isinstance(step, str) and len(step) > LONGEST_KEY:
        step = f"{step[:LONGEST_KEY]}..."
    return str(step) if str(step) and str(step).isprintable() else repr(step)
