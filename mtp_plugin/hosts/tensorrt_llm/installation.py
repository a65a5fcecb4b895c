"""Putting the plugin into a host and taking it out again."""

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
from mtp_plugin.hosts.tensorrt_llm.ranks import first_way
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
    """Where the plugin stands in this process."""

    installed: bool
    line: str | None = None
    """Of TensorRT-LLM: 1.2, 1.3a or 1.3b."""
    version: str | None = None
    """What the host says of itself; nothing is decided by it."""
    seams: tuple[Found, ...] = ()
    """What was looked for, and found."""
    rebound: tuple[str, ...] = ()
    """Places of the host, as ``module:name``, that hold our functions now."""
    engines: int = 0
    """Managers of ours that have not been shut down."""
    reached_by: str | None = None
    """What brought the plugin to this process; None: a call of `install`."""

    def __str__(self) -> str:
        if not self.installed:
            return "mtp_plugin is not installed in TensorRT-LLM"
        return (
            f"mtp_plugin is installed in TensorRT-LLM {self.version or '(no version)'}, line "
            f"{self.line}: {len(self.rebound)} places rebound, {self.engines} engines running"
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
    """Put the plugin into the TensorRT-LLM of this process.

    Its dispatchers answer MTP configs with our pieces from then on, and everything else as before.
    Call it in every rank, before a model is built; see `ranks`.

    Raises:
        HostError: TensorRT-LLM cannot be imported, is none of the lines, or has the plugin already;
            nothing is changed then.
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
        wrapper = _answering(installation.adapter, name, original)
        installation.originals[name] = original
        installation.wrappers[name] = wrapper
        installation.rebound += rebind(original, wrapper)
    _installed.append(installation)
    told = status()
    _logger.info("%s", told)
    return told


def uninstall() -> None:
    """Take the plugin out again: every place holds the host's own functions.

    Raises:
        HostError: it is not installed, or engines with its pieces run.
    """
    expect(bool(_installed), HostError, "uninstall(): mtp_plugin is not installed in this process")
    installation = _installed[0]
    running = installation.engines()
    expect(
        running == 0,
        HostError,
        f"uninstall(): {running} engines run with mtp_plugin's pieces; shut them down first",
    )
    for name, wrapper in installation.wrappers.items():
        rebind(wrapper, installation.originals[name])
    _installed.clear()


def is_installed() -> bool:
    """Whether this process has the plugin."""
    return bool(_installed)


def status() -> Status:
    """Where the plugin stands in this process."""
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
        reached_by=first_way(),
    )


def _answering(adapter: Adapter, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The host's dispatcher, answering MTP configs by ours."""
    signature = inspect.signature(original)
    answer: Callable[..., Any] = getattr(adapter, name)

    @functools.wraps(original)
    def dispatcher(*arguments: Any, **named_arguments: Any) -> Any:
        asked = signature.bind(*arguments, **named_arguments)
        engine = asked.arguments.get("model_engine")
        config = asked.arguments.get("spec_config", getattr(engine, "spec_config", None))
        if not serves(config):
            return original(*arguments, **named_arguments)
        # what is kept is written in place later, in inference mode or not
        with torch.inference_mode(False):
            return answer(original, **asked.arguments)

    return dispatcher
