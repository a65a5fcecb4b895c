"""What a result says of the code that it is of."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from integration.bench import machine
from integration.bench.machine import available_cores, cpu_name, git_tree


def test_the_processor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 2.50GHz\nprocessor\t: 1\n")
    assert cpu_name(listed) == "Fast CPU @ 2.50GHz"
    # other systems have no such file, other architectures no such line
    listed.write_text("processor\t: 0\n")
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    for where in (listed, tmp_path / "none"):
        assert cpu_name(where) == machine.platform.machine()
    monkeypatch.setattr(machine.platform, "machine", lambda: "")
    assert cpu_name(listed) == "unknown"


def test_cores_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    assert available_cores() == 3
    monkeypatch.delattr(machine.os, "sched_getaffinity")
    assert available_cores() == (os.cpu_count() or 1)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_folder_has_the_name_that_git_gives_it(tmp_path: Path) -> None:
    files = {
        "a/inner.py": "x = 1\n",
        "a/__pycache__/inner.pyc": "",
        "a.py": "",
        "a-b.py": "y\n",
        "empty/__pycache__/z.pyc": "",
        "été.txt": "é",
        ".cache/x": "1",
    }
    folder = tmp_path / "repository" / "package"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "a.py").chmod(0o755)
    (folder / "a-b.py").chmod(0o645)
    (folder / "link").symlink_to("a.py")
    where = folder.parent
    quiet = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=where, env=quiet, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init")
    (where / ".gitignore").write_text("__pycache__\n.cache\n")
    git("add", ".")
    assert git_tree(folder) == git("rev-parse", f"{git('write-tree')}:package")
