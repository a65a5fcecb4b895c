"""Compares parameters and attributes of a host engine with those that an adapter needs.

Parameters may follow the listed ones: any of a function that is only wrapped, since its call is
handed on, else optional ones.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any, Protocol

Signatures = Mapping[str, tuple[str, ...]]
"""``module:Class.method``, ``module:function`` or ``module:Class`` (its constructor) -> the first
parameter names after ``self``."""
Names = Mapping[str, tuple[str, ...]]
"""``module:Class`` -> attributes of its instances; ``module`` -> names in it."""


class Reader(Protocol):
    """Where signatures and names of a version of an engine are looked up."""

    def parameters(self, target: str) -> tuple[str, ...] | None:
        """Return the parameters of a target of `Signatures`, without ``self``.

        An optional one is written ``name=default``, the others of a variable number ``*name`` and
        ``**name``. None: there is no such target.
        """

    def names(self, target: str) -> frozenset[str] | None:
        """Return all attributes of a target of `Names`; None if there is no such target."""


class Installed:
    """Reads what can be imported here."""

    def parameters(self, target: str) -> tuple[str, ...] | None:
        """See `Reader.parameters`."""
        found = find(target)
        if found is None:
            return None
        given = list(inspect.signature(found).parameters.values())
        return tuple(map(_shown, given[1:] if "." in target.partition(":")[2] else given))

    def names(self, target: str) -> frozenset[str] | None:
        """See `Reader.names`; attributes are those that a method assigns, too."""
        found = find(target)
        if not isinstance(found, type):
            return None if found is None else frozenset(vars(found))
        names: set[str] = set()
        for owner in found.__mro__:
            names.update(vars(owner), vars(owner).get("__annotations__", ()))
            for value in vars(owner).values():
                function = inspect.unwrap(value) if callable(value) else None
                if isinstance(function, FunctionType):
                    steps = dis.get_instructions(function)
                    names.update(step.argval for step in steps if step.opname == "STORE_ATTR")
        return frozenset(names)

    def body(self, target: str) -> str:
        """Return `body_hash` of a function; empty if its source is not there."""
        try:
            source = inspect.getsource(inspect.unwrap(find(target)))
        except (OSError, TypeError):
            return ""
        return body_hash(ast.parse(textwrap.dedent(source)).body[0])


def body_hash(function: ast.AST) -> str:
    """Return a hash of a function that comments, docstrings and the Python do not change."""
    return hashlib.sha256(repr(_plain(function)).encode()).hexdigest()[:8]


def _plain(node: Any) -> Any:
    if isinstance(node, list):
        return [_plain(item) for item in node if not _is_docstring(item)]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, _plain(value)) for name, value in ast.iter_fields(node)]
    # newer Pythons have further fields, empty ones
    return type(node).__name__, [field for field in fields if field[1] not in (None, [])]


def _is_docstring(node: Any) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


INSTALLED = Installed()


def read_table(text: str, packages: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Read entries ``target(name, ...)``.

    Args:
        packages: short names that targets may begin with -> packages.
    """
    found = {}
    for target, names in re.findall(r"(\S+)\((.*?)\)", text, re.DOTALL):
        first, dot, rest = target.partition(".")
        found[packages.get(first, first) + dot + rest] = tuple(re.findall(r"\w+|\.{3}", names))
    return found


def differences(
    signatures: Signatures, names: Names, wrapped: Collection[str], reader: Reader = INSTALLED
) -> list[str]:
    """Return one line for everything that an adapter needs and that is missing or differs.

    Args:
        wrapped: see `mismatch`.
    """
    found = [mismatch(target, known, wrapped, reader) for target, known in signatures.items()]
    found += [missing_names(target, known, reader) for target, known in names.items()]
    return [problem for problem in found if problem is not None]


def mismatch(
    target: str, names: tuple[str, ...], wrapped: Collection[str], reader: Reader = INSTALLED
) -> str | None:
    """Return how a function differs from its recorded parameters; None if it fits.

    Args:
        wrapped: targets whose calls are handed on to the original.
    """
    found = reader.parameters(target)
    shown = target.replace(":", ".")
    if found is None:
        return f"{shown} is missing"
    known = tuple(parameter.partition("=")[0] for parameter in found[: len(names)])
    further = found[len(names) :]
    required = [name for name in further if "=" not in name and not name.startswith("*")]
    if known == names and (target in wrapped or not required):
        return None
    return (
        f"{shown}({', '.join(found)}) was expected to have the parameters ({', '.join(names)})"
        + ("" if target in wrapped else ", and optional ones alone after them")
    )


def changed_arguments(
    function: Any, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the further arguments of a call that are not at their defaults.

    Args:
        names: the recorded parameters, also ``self``, of which ``args`` come first.

    Returns:
        Name -> default and value.
    """
    defaults = _defaults(function)
    values = dict(zip([*defaults][len(names) :], args[len(names) :], strict=False))
    values.update((name, value) for name, value in kwargs.items() if name not in names)
    changed = {}
    for name, value in values.items():
        default = defaults.get(name, inspect.Parameter.empty)
        if value is not default and (type(value) is not type(default) or value != default):
            changed[name] = default, value
    return changed


@cache
def _defaults(function: Any) -> dict[str, Any]:
    found = inspect.signature(function).parameters
    return {name: parameter.default for name, parameter in found.items()}


def missing_names(target: str, names: tuple[str, ...], reader: Reader = INSTALLED) -> str | None:
    """Return which names a class or module lacks; None if it has all."""
    shown = target.replace(":", ".")
    found = reader.names(target)
    if found is None:
        return f"{shown} is missing"
    missing = [name for name in names if name not in found]
    return f"{shown} has no {', '.join(missing)}" if missing else None


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    empty = parameter.default is parameter.empty
    return parameter.name if empty else f"{parameter.name}={parameter.default!r}"


def find(target: str) -> Any:
    """Return what a target of `Signatures` or `Names` names; None if there is no such thing."""
    module, _, path = target.partition(":")
    try:
        found: Any = import_module(module)
        for name in filter(None, path.split(".")):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    return found
