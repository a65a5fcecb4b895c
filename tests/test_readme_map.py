"""Every place that the README's map names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_places_of_the_map() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    house = text[text.index("## The house") : text.index("## Configuration")]
    rows = [line.split("|")[1:-1] for line in house.splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in (row[1:] if "`" not in row[0] else row[:1])]
    places = re.findall(r"`([\w/]+/(?:[\w.]+\.(?:py|yaml))?)`", " ".join(cells))
    assert len(places) > 40
    missing = [p for p in places if not ((ROOT / "mtp_plugin" / p).exists() or (ROOT / p).exists())]
    assert missing == []
