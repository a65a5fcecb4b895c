"""A made-up host that imports as tensorrt_llm, and a plugin that only counts its installs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_plugin.hosts import tensorrt_llm
from mtp_plugin.hosts.tensorrt_llm import ranks
from tests.hosts.tensorrt_llm.tiny_host import write_host


@pytest.fixture
def no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensorrt_llm to import, also where one is installed."""
    _forget_host(monkeypatch)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put the host of a line on the path."""

    def put(line: str, **options: bool) -> None:
        _forget_host(monkeypatch)
        monkeypatch.syspath_prepend(str(write_host(tmp_path / line, line, **options)))

    return put


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Installs of the plugin, which are none in truth."""
    done: list[str] = []
    monkeypatch.setattr(tensorrt_llm, "install", lambda: done.append("install"))
    monkeypatch.setattr(tensorrt_llm, "is_installed", lambda: bool(done))
    monkeypatch.setattr(ranks, "_ways", [])
    return done


def _forget_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "tensorrt_llm":
            monkeypatch.delitem(sys.modules, name)
