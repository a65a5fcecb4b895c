"""The table of weights in CONTRIBUTING holds."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| [\w ,]+ \| (`mtp_plugin.*) \| ([\d,]+) \|$", re.MULTILINE)


def lines_in(folder: str) -> int:
    files = (ROOT / folder).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def test_no_product_outgrows_its_row() -> None:
    rows = [
        (re.findall(r"`(mtp_plugin.*?)`", folders), int(most.replace(",", "")))
        for folders, most in ROW.findall(PAGE)
    ]
    found = [sum(map(lines_in, folders)) for folders, _ in rows]
    assert rows[0][0] == ["mtp_plugin"]
    found[0] -= sum(found[1:])  # the first row is the rest of the package
    assert [row for row, lines in zip(rows, found, strict=True) if lines > row[1]] == []


def test_tests_do_not_outgrow_the_package() -> None:
    (most,) = re.findall(r"at ([\d.]+) or fewer lines of tests a line", PAGE)
    assert lines_in("tests") <= float(most) * lines_in("mtp_plugin")
