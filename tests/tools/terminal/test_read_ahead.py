"""The system is requested to read weights while Python imports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtp_plugin.tools.terminal.read_ahead import read_ahead


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such hints")
def test_every_shard_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.safetensors", "b.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"x")
    os.mkfifo(tmp_path / "c.safetensors")
    requested = []
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda descriptor, *advice: requested.append(
            (os.readlink(f"/proc/self/fd/{descriptor}"), advice)
        ),
    )
    thread = read_ahead(tmp_path)
    assert thread is not None
    thread.join(10)
    whole = (0, 0, os.POSIX_FADV_WILLNEED)
    assert requested == [(str(tmp_path / f"{name}.safetensors"), whole) for name in "ab"]


def test_a_folder_that_is_not_there_is_reported_elsewhere(tmp_path: Path) -> None:
    thread = read_ahead(tmp_path / "nowhere\0")
    if thread is not None:
        thread.join(10)
        assert not thread.is_alive()


def test_without_such_hints_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert read_ahead(".") is None
