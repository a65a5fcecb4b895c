"""Functions of the drop-in modules, which take no backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from mtp_plugin.ops.backend import Backend

T = TypeVar("T")


def with_backend(function: Callable[..., T], backend: Backend) -> Callable[..., T]:
    """Return ``function`` without its argument ``backend``, with its name and docstring."""

    @wraps(function)
    def op(*arguments: Any, **named: Any) -> T:
        return function(*arguments, **named, backend=backend)

    signature = inspect.signature(function)
    others = [each for name, each in signature.parameters.items() if name != "backend"]
    op.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    # a copy: ``wraps`` shares the function's own dict
    op.__annotations__ = {name: t for name, t in op.__annotations__.items() if name != "backend"}
    return op
