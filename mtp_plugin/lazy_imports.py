"""Names that a package imports when they are first read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        names: module, relative to the package -> the names that it defines, separated by spaces.
    """
    modules = {name: module for module, listed in names.items() for name in listed.split()}
    present = vars(sys.modules[package])

    def read(name: str) -> Any:
        if name in names:
            return import_module(f".{name}", package)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        present[name] = value = getattr(import_module(f".{modules[name]}", package), name)
        return value

    return read, lambda: sorted({*present, *modules})
