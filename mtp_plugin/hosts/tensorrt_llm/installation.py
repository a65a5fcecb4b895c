"""Install the plugin in TensorRT-LLM and remove it."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mtp_plugin.errors import HostError, expect
from mtp_plugin.hosts.tensorrt_llm.adapter import Adapter
from mtp_plugin.hosts.tensorrt_llm.lines import find_line
from mtp_plugin.hosts.tensorrt_llm.options import serves
from mtp_plugin.hosts.tensorrt_llm.ranks import loaded_by
from mtp_plugin.hosts.tensorrt_llm.seams import (
    DISPATCHERS,
    PACKAGE,
    UTILS,
    Found,
    named,
    rebind,
)

_logger = logging.getLogger("mtp_plugin")


@dataclass(frozen=True)
class Status:
    """State of the plugin in this process."""

    installed: bool
    line: str | None = None
    """API version of TensorRT-LLM: 1.2, 1.3a or 1.3b."""
    version: str | None = None
    """``tensorrt_llm.__version__``, for information only."""
    seams: tuple[Found, ...] = ()
    """The needed names and what was found."""
    rebound: tuple[str, ...] = ()
    """Names of the host, as ``module:name``, that refer to our functions now."""
    engines: int = 0
    """Number of our managers that have not been shut down."""
    reached_by: str | None = None
    """How the plugin was loaded in this process; None: by a call of `install`."""

    def __str__(self) -> str:
        if not self.installed:
            return "mtp_plugin is not installed in TensorRT-LLM"
        return (
            f"mtp_plugin is installed in TensorRT-LLM {self.version or '(no version)'}, "
            f"API version {self.line}: {len(self.rebound)} names rebound, "
            f"{self.engines} engines running"
        )


@dataclass
class _Installation:
    adapter: Adapter
    seams: tuple[Found, ...]
    originals: dict[str, Callable[..., Any]] = field(default_factory=dict)
    wrappers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    rebound: list[str] = field(default_factory=list)

    def engines(self) -> int:
        return sum(not manager.mtp_plugin_ended for manager in self.adapter.managers)


_installed: list[_Installation] = []


def install() -> Status:
    """Install the plugin in the TensorRT-LLM of this process.

    From then on its factory functions return our components for MTP configs; other configs are
    passed on. Call it on every rank before a model is built; see `ranks`.

    Raises:
        HostError: TensorRT-LLM cannot be imported, has no supported API version, or has the plugin
            already; nothing is changed then.
    """
    expect(not _installed, HostError, "install(): mtp_plugin is installed in this process already")
    try:
        utils = importlib.import_module(UTILS)
    except ImportError as error:
        raise HostError(f"install(): {UTILS} cannot be imported: {error}") from error
    line, seams = find_line()
    installation = _Installation(line(), tuple(seams))
    for name in DISPATCHERS:
        original = getattr(utils, name)
        wrapper = _wrap(installation.adapter, name, original)
        installation.originals[name] = original
        installation.wrappers[name] = wrapper
        installation.rebound += rebind(original, wrapper)
    _installed.append(installation)
    current = status()
    _logger.info("%s", current)
    return current


def uninstall() -> None:
    """Restore the host's own functions.

    Raises:
        HostError: the plugin is not installed, or engines that use it are running.
    """
    expect(bool(_installed), HostError, "uninstall(): mtp_plugin is not installed in this process")
    installation = _installed[0]
    running = installation.engines()
    expect(
        running == 0,
        HostError,
        f"uninstall(): {running} engines that use mtp_plugin are running; shut them down first",
    )
    for name, wrapper in installation.wrappers.items():
        rebind(wrapper, installation.originals[name])
    _installed.clear()


def is_installed() -> bool:
    """Whether the plugin is installed in this process."""
    return bool(_installed)


def status() -> Status:
    """Return the state of the plugin in this process."""
    if not _installed:
        return Status(installed=False)
    installation = _installed[0]
    return Status(
        installed=True,
        line=installation.adapter.line,
        version=named(PACKAGE, "__version__"),
        seams=installation.seams,
        rebound=tuple(installation.rebound),
        engines=installation.engines(),
        reached_by=loaded_by(),
    )


def _wrap(adapter: Adapter, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a factory function of the host: MTP configs go to the adapter, others to the host."""
    signature = inspect.signature(original)
    answer: Callable[..., Any] = getattr(adapter, name)

    @functools.wraps(original)
    def dispatcher(*arguments: Any, **named_arguments: Any) -> Any:
        bound = signature.bind(*arguments, **named_arguments)
        engine = bound.arguments.get("model_engine")
        config = bound.arguments.get("spec_config", getattr(engine, "spec_config", None))
        if not serves(config):
            return original(*arguments, **named_arguments)
        # tensors created here are written in place later, also outside inference mode
        with torch.inference_mode(False):
            return answer(original, **bound.arguments)

    return dispatcher
