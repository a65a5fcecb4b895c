"""Install mtp_plugin once ``tensorrt_llm`` is imported, if TRTLLM_MTP_PLUGIN=1.

With this folder on PYTHONPATH every Python process runs this module, including TensorRT-LLM's
ranks. mtp_plugin is not loaded before ``tensorrt_llm`` is. Another ``sitecustomize`` further down
the path runs after this one and takes its place in ``sys.modules``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

VARIABLE = "TRTLLM_MTP_PLUGIN"
HOST = "tensorrt_llm"


class HostFinder(MetaPathFinder):
    """Import hook that installs the plugin after the host's package was imported."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != HOST:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = HostLoader(spec.loader, self)
        return spec


class HostLoader(Loader):
    """Loader that runs the host's own loader, then installs the plugin."""

    def __init__(self, loader: Loader, finder: HostFinder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        install()
        sys.meta_path.remove(self._finder)


def install() -> None:
    """Install the plugin in this process.

    Raises:
        ConfigError: the variable is neither 1 nor 0.
        MTPPluginError: the host is not supported.
    """
    from mtp_plugin.errors import ConfigError
    from mtp_plugin.hosts.tensorrt_llm import ranks

    value = os.environ.get(VARIABLE, "1")
    if value != "1":
        raise ConfigError(f"{VARIABLE}: expected 1 (install the plugin) or 0, got {value!r}")
    ranks.install_once("sitecustomize")


def run_next() -> None:
    """Run the next ``sitecustomize`` on the path, if there is one."""
    here = os.path.realpath(os.path.dirname(__file__))
    others = [entry for entry in sys.path if os.path.realpath(entry) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if os.environ.get(VARIABLE, "0") not in ("", "0"):
        sys.meta_path.insert(0, HostFinder())
    run_next()
