"""The repository uses the standard terms of the field, not those of an older private dialect."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = ("", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml")
BANNED = """
    told tell tells telling asked asks drawn dice bed beds door doors wish wishes wished odds judge
    judges judged judging judgement judgements parcel parcels station stations wing wings whoever
    nobody behind beside stand stands standing stood
"""
BANNED_WORDS = frozenset(BANNED.split())
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
SIDE_CLASS = re.compile(r"\b_Side\b")
ALLOWED = {
    "is_drawn": "public field of the label of synthetic results, and a JSON key",
    '"asks"': "JSON key of benchmark results",
}
ALLOWED_NAMES = re.compile("|".join(map(re.escape, ALLOWED)))


def is_banned(line: str) -> bool:
    """Whether prose or an identifier holds a banned word, apart from allowed names."""
    line = ALLOWED_NAMES.sub("", line)
    words = {word.lower() for word in WORD.findall(line)}
    return not BANNED_WORDS.isdisjoint(words) or SIDE_CLASS.search(line) is not None


def checked_files() -> list[Path]:
    """Tracked text files, or those of all folders where there is no git repository."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = []
        for folder, folders, files in os.walk(ROOT):
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths += [Path(folder, name) for name in files]
    return [
        path
        for path in paths
        if path.suffix in SUFFIXES
        and path.is_file()
        and path != Path(__file__)
        and path.name not in ("CHANGELOG.md", "LICENSE")
    ]


def test_no_banned_words() -> None:
    found, names = [], set()
    for path in checked_files():
        text = path.read_text(encoding="utf-8")
        names.update(ALLOWED_NAMES.findall(text))
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            for number, line in enumerate(text.splitlines(), 1)
            if is_banned(line)
        ]
    assert not found, f"{len(found)} lines with banned words:\n" + "\n".join(found[:50])
    assert names == set(ALLOWED), "remove allowed names that are not used"


def test_words_inside_identifiers_are_found() -> None:
    assert all(map(is_banned, ["error_told(x)", "class HeadBed:", "DRAWN = 1", "a stand-in"]))
    assert not any(map(is_banned, ["standard = bedrock", "label.is_drawn", "this_side = 1"]))
