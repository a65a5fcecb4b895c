"""One hierarchy of named errors: every message says what was expected, what came, and where."""

from __future__ import annotations

import operator
import reprlib
from typing import SupportsIndex


class MTPPluginError(Exception):
    """Root of every error that the package raises on purpose."""


class ConfigError(MTPPluginError, ValueError):
    """A configuration value or file that cannot be used."""


class CheckpointError(MTPPluginError, ValueError):
    """A checkpoint whose config or tensors cannot serve MTP decoding."""


class UnsupportedModelError(CheckpointError):
    """A model family or layer kind that the package does not run."""


class RequestError(MTPPluginError, ValueError):
    """A request refused at admission; the message names every reason."""


class TensorContractError(MTPPluginError, ValueError):
    """A tensor handed to an op with another shape, dtype or device than its contract."""


class MetadataError(MTPPluginError, RuntimeError):
    """Attention or speculative metadata used out of order or found inconsistent."""


class NoFreeSlotsError(MTPPluginError, ValueError):
    """Every slot of a slot manager is taken."""


class NoFreeBlocksError(MTPPluginError, RuntimeError):
    """The KV pool has fewer free blocks than an allocation needs."""


class PluginError(MTPPluginError, LookupError):
    """A plugin that cannot be found, loaded or registered, or that breaks its contract."""


class ExecutorError(MTPPluginError, RuntimeError):
    """The executor cannot go on: shut down, or a request was used against its life cycle."""


class HostError(MTPPluginError, RuntimeError):
    """A host engine that the plugin cannot be put into, or not taken out of, as it stands."""


class MissingExtraError(MTPPluginError, ImportError):
    """What the embedded executor or the command line needs is not installed; says how to do it."""


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
    # the check of the type first is faster, and nearly always enough
    is_integer = type(value) is int or isinstance(value, SupportsIndex)
    if is_integer and not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]
        except Exception:  # tensors that are no integer scalar have __index__ too
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
    raise error(f"{name}: expected an integer{limits}, got {told(value)}")


def error_told(error: BaseException) -> str:
    """What a user's own code raised, in one line, whatever its ``__str__`` does."""
    try:
        said = " ".join(str(error).split())
    except Exception:
        said = "it cannot be told"
    return f"{type(error).__name__}: {said}"


SHOWN = 200
"""Characters of a value that a message shows."""


class _Spelling(reprlib.Repr):
    """Python's spelling, cut where it is long; whatever a value's own ``__repr__`` does."""

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


_spelling = _Spelling()


def told(value: object) -> str:
    """A value for a message, as Python spells it, cut where it is long."""
    try:
        shown = _spelling.repr(value)
    except Exception:  # of classes that are called as Python's own are
        shown = f"<{type(value).__name__}>"
    return shown if len(shown) <= 2 * SHOWN else f"{shown[:SHOWN]}..."
