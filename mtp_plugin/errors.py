"""Exceptions of the package. Messages say what is expected and what was given, and where."""

from __future__ import annotations

import operator
import os
import reprlib
import shlex
from typing import SupportsIndex

INT32_MAX = 2**31 - 1
"""Largest number in a column of the slot table, in options and in configs."""


class MTPPluginError(Exception):
    """Base class of the package's exceptions.

    Args:
        message: what was given and what is expected.
        next_command: the shell command to type next; it ends the message.
    """

    next_command: str | None = None

    def __init__(self, message: str = "", next_command: str | None = None) -> None:
        super().__init__(message if next_command is None else f"{message}: {next_command}")
        if next_command is not None:
            self.next_command = next_command


class ConfigError(MTPPluginError, ValueError):
    """A configuration file or value is invalid."""


class CheckpointError(MTPPluginError, ValueError):
    """A checkpoint's config or tensors cannot be used for MTP decoding."""


class UnsupportedModelError(CheckpointError):
    """The model family or a kind of layer is not supported."""


class RequestError(MTPPluginError, ValueError):
    """A request is invalid or not supported; the message lists every reason."""


class TensorContractError(MTPPluginError, ValueError):
    """An argument of an op has the wrong type, shape, dtype or device."""


class MetadataError(MTPPluginError, RuntimeError):
    """Attention or speculative metadata is inconsistent or was used out of order."""


class NoFreeSlotsError(MTPPluginError, ValueError):
    """All state slots are in use."""


class NoFreeBlocksError(MTPPluginError, RuntimeError):
    """The KV cache has too few free blocks for an allocation."""


class PluginError(MTPPluginError, LookupError):
    """A plugin cannot be found, loaded or registered, or violates its interface."""


class ExecutorError(MTPPluginError, RuntimeError):
    """The executor was shut down or cannot continue, or a request is in the wrong state."""


class HostError(MTPPluginError, RuntimeError):
    """The plugin cannot be installed into this host engine, or not be removed from it."""


class MissingExtraError(MTPPluginError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


def expect(condition: bool, error: type[MTPPluginError], message: str) -> None:
    """Raise ``error(message)`` unless ``condition`` holds."""
    if not condition:
        raise error(message)


def expect_int(
    name: str,
    value: object,
    minimum: int | None = None,
    maximum: int | None = None,
    error: type[MTPPluginError] = TensorContractError,
) -> int:
    """Return ``value`` as an ``int`` if it is an integer in ``minimum .. maximum``.

    Integers of other libraries (NumPy) are accepted, ``bool`` is not.

    Raises:
        error: anything else.
    """
    # the type check first is faster and nearly always sufficient
    is_integer = type(value) is int or isinstance(value, SupportsIndex)
    if is_integer and not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except Exception:  # tensors that are not integer scalars have __index__, too
            pass
        else:
            too_small = minimum is not None and number < minimum
            if not too_small and not (maximum is not None and number > maximum):
                return number
    if minimum is not None and maximum is not None:
        limits = f" in {minimum}..{maximum}"
    elif minimum is not None:
        limits = f" >= {minimum}"
    else:
        limits = "" if maximum is None else f" <= {maximum}"
    raise error(f"{name}: expected an integer{limits}, got {format_value(value)}")


def describe_error(error: BaseException) -> str:
    """Return the type and message of an exception in one line, even if its ``__str__`` raises."""
    try:
        message = one_line(" ".join(str(error).split()))
    except Exception:
        message = "its message cannot be read"
    return f"{type(error).__name__}: {message}"


LONGEST_LINE = 4000
"""Maximum number of characters of a line that shows text of a file, a request or an operator."""


def one_line(text: object) -> str:
    """Return text as one line for a terminal or a log: characters that are not printable are
    escaped, and a long text is cut."""
    shown = str(text)
    if len(shown) > LONGEST_LINE:
        shown = f"{shown[:LONGEST_LINE]}..."
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in shown)


def shell_quote(text: object) -> str:
    """Return a word of a shell command: `shlex.quote`, or `$'...'` with escapes of bytes for text
    with characters that are not printable."""
    word = str(text)
    if word.isprintable():
        return shlex.quote(word)
    special = {byte: f"\\x{byte:02x}" for byte in (*range(32), *range(127, 256))}
    special |= {ord("\n"): "\\n", ord("'"): "\\'", ord("\\"): "\\\\"}
    return f"$'{''.join(special.get(byte, chr(byte)) for byte in os.fsencode(word))}'"


SHOWN = 200
"""Maximum number of characters of a value in a message."""


class _Repr(reprlib.Repr):
    """``repr`` that shortens long values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 20
        self.maxdeque = self.maxarray = 20
        self.maxother = SHOWN

    def repr_str(self, x: str, level: int) -> str:  # noqa: ARG002
        return repr(x) if len(x) <= SHOWN else f"{x[:SHOWN]!r}..."

    def repr_bytes(self, x: bytes, level: int) -> str:  # noqa: ARG002
        return repr(x) if len(x) <= SHOWN else f"{x[:SHOWN]!r}..."

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002
        return repr(x) if x.bit_length() <= SHOWN else f"an integer of {x.bit_length()} bits"


_repr = _Repr()


def format_value(value: object) -> str:
    """Return ``repr(value)`` for a message, shortened, even if ``__repr__`` raises."""
    try:
        shown = _repr.repr(value)
    except Exception:  # reprlib dispatches by class name: a user's class may be called "list"
        shown = f"<{type(value).__name__}>"
    return shown if len(shown) <= 2 * SHOWN else f"{shown[:SHOWN]}..."
