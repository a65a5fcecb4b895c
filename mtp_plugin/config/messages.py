"""Pydantic's errors as lines, and values and keys as YAML spells them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails, PydanticCustomError

from mtp_plugin.errors import format_value

LONGEST_KEY = 200
"""Characters of a key that messages show."""
_FORM = re.compile(r"<\w+>|\[key\]")
"""A step of pydantic's location that is no key: the form of a value, or the key of an item."""
_MESSAGES = {"missing": "required key is missing", "invalid_key": "a key should be text"}


def problem(message: str) -> PydanticCustomError:
    """Return the error for a validator to raise; `message_of` returns its message unchanged."""
    return PydanticCustomError("problem", "{message}", {"message": message})


def message_of(details: ErrorDetails) -> str:
    """Return pydantic's message with the value that was given."""
    kind = details["type"]
    if kind == "problem":
        return details["msg"]
    if kind in _MESSAGES:
        return _MESSAGES[kind]
    wanted = re.sub(r"^\w+ should ", "should ", details["msg"])
    wanted = re.sub(r"valid dictionary( or instance of \w+)?", "mapping", wanted)
    wanted = re.sub(r" after validation, not \w+$", "", wanted)
    return f"{wanted.replace('valid tuple', 'list')}, got {got(details['input'])}"


def key_path(location: Sequence[int | str]) -> str:
    """Return the dotted key path of pydantic's location."""
    return ".".join(spelled(step) for step in location if not _FORM.fullmatch(str(step)))


def got(value: Any) -> str:
    """What came, spelled as YAML spells it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "[]"
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
