"""Every path that the architecture guide names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "mtp_plugin" / "README.md").read_text(encoding="utf-8")


def paths_in(text: str) -> list[str]:
    return re.findall(r"`([\w/]+/(?:[\w.]+\.(?:py|yaml))?)`", text)


def exists(path: str) -> bool:
    roots = (ROOT, ROOT / "mtp_plugin", ROOT / "mtp_plugin" / "speculative")
    return any((root / path).exists() for root in roots)


def test_paths_of_the_guide_exist() -> None:
    named = paths_in(GUIDE)
    assert len(named) > 80
    assert [path for path in named if not exists(path)] == ["hosts/NAME/"]


def test_stages_are_numbered_and_name_their_files() -> None:
    stages = [line.split("|")[1:-1] for line in GUIDE.splitlines() if re.match(r"\| \d", line)]
    assert [int(cells[0]) for cells in stages] == list(range(1, len(stages) + 1))
    assert all(paths_in(cells[2]) for cells in stages)


def test_every_package_is_listed() -> None:
    packages = {
        path.name for path in (ROOT / "mtp_plugin").iterdir() if (path / "__init__.py").exists()
    }
    rows = [line.split("|")[1] for line in GUIDE.splitlines() if line.startswith("| `")]
    assert packages <= {path.strip("/") for path in paths_in(" ".join(rows))}


def test_readme_links_to_the_guide() -> None:
    assert "(mtp_plugin/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
