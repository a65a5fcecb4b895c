"""Every place that the map names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAP = (ROOT / "mtp_plugin" / "README.md").read_text(encoding="utf-8")


def places(text: str) -> list[str]:
    return re.findall(r"`([\w/]+/(?:[\w.]+\.(?:py|yaml))?)`", text)


def is_there(place: str) -> bool:
    roots = (ROOT, ROOT / "mtp_plugin", ROOT / "mtp_plugin" / "speculative")
    return any((root / place).exists() for root in roots)


def test_places_of_the_map() -> None:
    named = places(MAP)
    assert len(named) > 80
    assert [place for place in named if not is_there(place)] == ["hosts/NAME/"]


def test_stations_are_numbered_and_name_their_files() -> None:
    stations = [line.split("|")[1:-1] for line in MAP.splitlines() if re.match(r"\| \d", line)]
    assert [int(cells[0]) for cells in stations] == list(range(1, len(stations) + 1))
    assert all(places(cells[2]) for cells in stations)


def test_every_wing_is_on_the_map() -> None:
    wings = {
        path.name for path in (ROOT / "mtp_plugin").iterdir() if (path / "__init__.py").exists()
    }
    rows = [line.split("|")[1] for line in MAP.splitlines() if line.startswith("| `")]
    assert wings <= {place.strip("/") for place in places(" ".join(rows))}


def test_the_readme_leads_to_the_map() -> None:
    assert "(mtp_plugin/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
