"""Look up what the adapter needs of the installed TensorRT-LLM by name and signature."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

PACKAGE = "tensorrt_llm"
SPECULATIVE = f"{PACKAGE}._torch.speculative"
PYEXECUTOR = f"{PACKAGE}._torch.pyexecutor"
UTILS = f"{SPECULATIVE}.utils"

DISPATCHERS = (
    "get_spec_resource_manager",
    "get_spec_metadata",
    "get_spec_decoder",
    "get_spec_worker",
)
"""Factory functions of `UTILS` for the host's components; `install` wraps them."""


@dataclass(frozen=True)
class Need:
    """A name that an API version must have, or must not have (``absent``).

    ``parameters``: required parameters of the function, or of the class's constructor.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    absent: bool = False

    def __str__(self) -> str:
        listed = f"({', '.join(self.parameters)})" if self.parameters else ""
        return f"{'no ' if self.absent else ''}{self.module}:{self.name}{listed}"


@dataclass(frozen=True)
class Found:
    """Result of looking up a `Need`."""

    need: Need
    found: str
    holds: bool

    def __str__(self) -> str:
        return f"{self.need}: {self.found}"


def look(need: Need) -> Found:
    """Look up a needed name; imports its module, changes nothing."""
    try:
        value: Any = importlib.import_module(need.module)
    except ImportError as error:
        return Found(need, f"no module ({error})", need.absent)
    for part in need.name.split("."):
        if not hasattr(value, part):
            return Found(need, "not there", need.absent)
        value = getattr(value, part)
    if need.absent:
        return Found(need, "there", holds=False)
    if not need.parameters:
        return Found(need, "there", holds=True)
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return Found(need, "there, without a signature", holds=False)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    missing = [name for name in need.parameters if name not in parameters]
    found = f"({', '.join(parameters)})"
    return Found(need, found, holds=takes_all or not missing)


def named(module: str, *names: str) -> Any:
    """Return the first of these names that a module has, or None."""
    try:
        home = importlib.import_module(module)
    except ImportError:
        return None
    return next((getattr(home, name) for name in names if hasattr(home, name)), None)


def holders(value: object) -> Iterator[tuple[ModuleType, str]]:
    """Yield (module, name) for every loaded module of the host that refers to this object."""
    for name, module in sorted(sys.modules.items()):
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            held = [each for each, there in vars(module).items() if there is value]
            for each in held:
                yield module, each


def rebind(old: object, new: Callable[..., Any]) -> list[str]:
    """Replace ``old`` in the loaded modules of the host; return the names as ``module:name``."""
    places = list(holders(old))
    for module, name in places:
        setattr(module, name, new)
    return [f"{module.__name__}:{name}" for module, name in places]
