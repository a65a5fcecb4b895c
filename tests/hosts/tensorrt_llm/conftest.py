"""A made-up host that imports as tensorrt_llm, and a plugin that only counts its installs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mtp_plugin.hosts import tensorrt_llm
from mtp_plugin.hosts.tensorrt_llm import ranks
from tests.hosts.tensorrt_llm.tiny_host import write_host


@pytest.fixture
def forget_host() -> Iterator[Callable[[], None]]:
    """Remove the host's modules; afterwards those that were imported before are back."""

    def names() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]

    def forget() -> None:
        for name in names():
            del sys.modules[name]

    before = {name: sys.modules[name] for name in names()}
    yield forget
    forget()
    sys.modules.update(before)


@pytest.fixture
def no_host(forget_host: Callable[[], None]) -> None:
    """No tensorrt_llm to import, also where one is installed."""
    forget_host()
    sys.modules["tensorrt_llm"] = None  # type: ignore[assignment]


@pytest.fixture
def host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_host: Callable[[], None]
) -> Callable[..., None]:
    """Put the host of a line on the path."""

    def put(line: str, **options: bool) -> None:
        forget_host()
        monkeypatch.syspath_prepend(str(write_host(tmp_path / line, line, **options)))

    return put


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Installs of the plugin, which are none in truth."""
    done: list[str] = []
    monkeypatch.setattr(tensorrt_llm, "install", lambda: done.append("install"))
    monkeypatch.setattr(tensorrt_llm, "is_installed", lambda: bool(done))
    monkeypatch.setattr(ranks, "_loaded_by", [])
    return done
