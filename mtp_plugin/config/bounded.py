"""Files that users name, read up to a size: a device may have no end."""

from __future__ import annotations

from pathlib import Path
from typing import IO

MAX_BYTES = 2**26
"""Bytes of a file at most."""


def read_bounded(path: str | Path) -> bytes:
    """All bytes of a file, pipe or device.

    Raises:
        OSError: it cannot be read, or has more than `MAX_BYTES`.
    """
    with Path(path).open("rb") as file:
        return read_all(file)


def read_all(file: IO[bytes]) -> bytes:
    """The rest of an open file.

    Raises:
        OSError: it cannot be read, or has more than `MAX_BYTES`.
    """
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(None, f"expected at most {MAX_BYTES} bytes, got more")
    return content
