"""Replaces the packages without which SGLang's Python files cannot be imported on a CPU."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock

STUBBED = ("sgl_kernel", "torchvision", "torchaudio", "soundfile")


class _Stub(ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "0.26.0"
    __file__ = "stub"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in STUBBED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Install the stubs, before SGLang is imported."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # SGLang compiles its penalties
    sys.meta_path.insert(0, _Finder())
