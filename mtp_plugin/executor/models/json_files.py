"""JSON files of a checkpoint, read within bounds: size, depth, digits, keys given twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from mtp_plugin.config.messages import got
from mtp_plugin.errors import CheckpointError

MAX_BYTES = 2**28
"""Size of a file at most; indexes and tokenizers of released models have a tenth of it."""

MAX_DIGITS = 100
"""Digits of an integer at most."""


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file is missing, cannot be read, is larger than `MAX_BYTES` or no JSON,
            nests too deeply, has a number of too many digits or a key with two values, or holds
            something else than an object.
    """
    try:
        if not file.is_file():
            if file.exists():
                # a pipe or a device may never end
                raise CheckpointError(f"{file}: expected a regular file, got another kind of file")
            raise CheckpointError(
                f"checkpoint {file.parent}: expected a file {file.name}, found none"
            )
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{file}: expected at most {MAX_BYTES} bytes, got {size}")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: expected JSON, got {error}") from None
    try:
        content = json.loads(
            text,
            parse_int=_integer,
            parse_constant=_refuse,
            object_pairs_hook=_without_doubles,
        )
    except RecursionError:
        raise CheckpointError(f"{file}: expected JSON, it nests too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: expected JSON, got {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"the number {constant}")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        for key, value in pairs:
            if value is not table[key] and value != table[key]:
                raise ValueError(f"two values of the key {got(key)}")
    return table
