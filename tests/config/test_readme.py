"""The page of the folder ``configs/`` names every file of it."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "configs"


def test_every_file_of_the_folder_is_named() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    there = {path.name for path in FOLDER.glob("*.yaml")} | {"trtllm/"}
    named = set(re.findall(r"^\| (.*?) \|", listed, re.MULTILINE))
    assert {name for cell in named for name in re.findall(r"`([\w/]+(?:\.yaml|/))`", cell)} == there
