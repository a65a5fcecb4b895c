"""What a result says of the code that it is of."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mtp_plugin.tools.bench.machine import git_tree


@pytest.mark.skipif(shutil.which("git") is None, reason="asks git")
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
