"""A door with its backend fixed: what the drop-in modules are made of."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from mtp_plugin.kernels.backend import Backend

T = TypeVar("T")


def fixed(door: Callable[..., T], backend: Backend) -> Callable[..., T]:
    """``door`` without its argument ``backend``: a function of the same name and docstring."""

    @wraps(door)
    def op(*arguments: Any, **named: Any) -> T:
        return door(*arguments, **named, backend=backend)

    signature = inspect.signature(door)
    others = [each for name, each in signature.parameters.items() if name != "backend"]
    op.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    # not the dict of the door itself
    op.__annotations__ = {name: t for name, t in op.__annotations__.items() if name != "backend"}
    return op
