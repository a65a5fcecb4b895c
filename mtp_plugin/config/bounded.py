"""Files that users name: no named pipes, which may never be written, and read up to a size."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mtp_plugin.errors import ConfigError

MAX_BYTES = 2**26
"""Bytes of a file at most."""
OPEN_FILES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
"""Files that are open already: pipes of a shell's ``<(command)`` have a writer."""


@contextmanager
def open_regular(path: str | Path) -> Iterator[IO[bytes]]:
    """Open a regular file, or a pipe of a shell's ``<(command)``, for reading.

    Raises:
        OSError: it cannot be read, or is another pipe or a device.
    """
    if str(path).startswith(OPEN_FILES):
        with open(path, "rb") as file:
            yield file
        return
    # without O_NONBLOCK, a named pipe without a writer is opened for ever
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(None, "expected a regular file, got a pipe or a device")
        yield file


def read_bounded(path: str | Path) -> bytes:
    """All bytes of a file, see `open_regular`.

    Raises:
        OSError: it cannot be read, or has more than `MAX_BYTES`.
    """
    with open_regular(path) as file:
        return read_all(file)


def read_text(path: str | Path, source: str, wanted: str) -> str:
    """The text of a file that a config names, see `read_file` and `text_of`."""
    return text_of(read_file(path, source, wanted), source)


def read_file(path: str | Path, source: str, wanted: str) -> bytes:
    """All bytes of a file that a config names.

    Raises:
        ConfigError: it cannot be read; the message begins with ``source``.
    """
    try:
        return read_bounded(path)
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file; expected {wanted}") from None
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{source!r}: expected a path: {error}") from None


def text_of(content: bytes, source: str) -> str:
    """The text of a file, without a byte-order mark.

    Raises:
        ConfigError: it is not UTF-8; the message begins with ``source``.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: expected UTF-8 text, got other bytes: {error}") from None


def read_all(file: IO[bytes]) -> bytes:
    """The rest of an open file.

    Raises:
        OSError: it cannot be read, or has more than `MAX_BYTES`.
    """
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise OSError(None, f"expected at most {MAX_BYTES} bytes, got more")
    return content
