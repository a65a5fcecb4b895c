"""Files that users name, read up to a size: a device may have no end."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from mtp_plugin.errors import ConfigError

MAX_BYTES = 2**26
"""Bytes of a file at most."""


def read_bounded(path: str | Path) -> bytes:
    """All bytes of a file, pipe or device.

    Raises:
        OSError: it cannot be read, or has more than `MAX_BYTES`.
    """
    with Path(path).open("rb") as file:
        return read_all(file)


def read_text(path: str | Path, source: str, wanted: str) -> str:
    """The text of a file that a config names, without a byte-order mark.

    Raises:
        ConfigError: it cannot be read; the message begins with ``source``.
    """
    try:
        return read_bounded(path).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file; expected {wanted}") from None
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: expected UTF-8 text, got other bytes: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{source!r}: expected a path: {error}") from None


def read_all(file: IO[bytes]) -> bytes:
    """The rest of an open file.

    Raises:
        OSError: it cannot be read, or has more than `MAX_BYTES`.
    """
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(None, f"expected at most {MAX_BYTES} bytes, got more")
    return content
