"""Charts of the README files as SVG, written from ``integration/results/*.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COLORS = ("#c4cbd3", "#8c959f", "#2f81f7", "#2da44e")
"""Of series; readable on a light and on a dark background."""
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"
_BASE, _HEIGHT, _BAR, _GAP, _LEFT = 214, 112, 22, 18, 24


@dataclass(frozen=True)
class Group:
    """Bars next to each other, one per series."""

    label: str
    note: str
    values: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """Groups under one title."""

    title: str
    groups: Sequence[Group]


@dataclass(frozen=True)
class Point:
    """A point with an interval of `margin` above and below."""

    label: str
    x: float
    y: float
    margin: float


def point_chart(title: str, x_label: str, y_label: str, series: Sequence[Sequence[Point]]) -> str:
    """Return an SVG of points with their intervals in columns, labelled with name and `x`.

    `y` is a share, shown in percent.
    """
    points = [point for each in series for point in each]
    low_y = min(p.y - p.margin for p in points)
    high_y = max(p.y + p.margin for p in points)
    left, column, top, bottom = 64, 88, 56, 220

    def height(y: float) -> int:
        return round(bottom - 8 - (y - low_y) / max(high_y - low_y, 1e-9) * (bottom - 8 - top))

    parts, x = [], left + column // 2
    for color, each in zip(COLORS[2:], series, strict=False):
        for point in each:
            low, high = height(point.y - point.margin), height(point.y + point.margin)
            parts.append(f'<path d="M{x} {high}V{low}" stroke="{color}" stroke-width="1.5"/>')
            parts.append(f'<circle cx="{x}" cy="{height(point.y)}" r="4" fill="{color}"/>')
            parts.append(_text(x + 22, height(point.y) + 3, f"{point.y:.1%}", "n"))
            parts.append(_text(x, bottom + 17, point.label, "c"))
            parts.append(_text(x, bottom + 32, f"{point.x:.2f}", "n"))
            x += column
    right = x - column // 2
    parts.append(_text((left + right) // 2, bottom + 52, x_label, "c"))
    parts.append(_text(24, 42, y_label, "l"))
    for share in (low_y, high_y):
        parts.append(_text(left - 22, height(share) + 4, f"{share:.1%}", "n"))
    axes = f'<path d="M{left} {top - 6}V{bottom}H{right}" fill="none" stroke="#d1d9e0"/>'
    return _svg(title, right + 24, bottom + 66, [axes, *parts])


def bar_chart(title: str, y_label: str, series: Sequence[str], panels: Sequence[Panel]) -> str:
    """Return an SVG of grouped bars, one per series.

    Args:
        series: names for the legend, at most as many as `COLORS`.
    """
    width = len(series) * _BAR
    highest = max(value for panel in panels for group in panel.groups for value in group.values)
    parts, x = [], _LEFT
    for panel in panels:
        parts.append(_text(x, 76, panel.title, "h"))
        for group in panel.groups:
            for index, value in enumerate(group.values):
                height = round(_HEIGHT * value / highest)
                left, top = x + index * _BAR, _BASE - height
                parts.append(
                    f'<rect x="{left}" y="{top}" width="{_BAR - 2}" height="{height}" '
                    f'fill="{COLORS[index]}"/>'
                )
                parts.append(_text(left + _BAR // 2 - 1, top - 4, f"{value:.2f}", "v"))
            middle = x + width // 2
            parts.append(_text(middle, _BASE + 16, group.label, "c"))
            parts.append(_text(middle, _BASE + 31, group.note, "n"))
            x += width + _GAP
        x += _GAP
    total = x - _GAP
    legend, left = [], _LEFT
    for name, color in zip(series, COLORS, strict=False):
        legend.append(f'<rect x="{left}" y="32" width="11" height="11" fill="{color}"/>')
        legend.append(_text(left + 16, 42, name, "l"))
        left += 34 + 7 * len(name)
    legend.append(_text(_LEFT, 58, y_label, "n s"))
    total, height = max(total, left), _BASE + 44
    axis = f'<path d="M{_LEFT - 6} {_BASE}.5H{total - _LEFT + 6}" stroke="#d1d9e0"/>'
    return _svg(title, total, height, [*legend, *parts, axis])


_DARK = (
    ".bg{fill:#fff}@media (prefers-color-scheme:dark){.bg{fill:#0d1117}text{fill:#e6edf3}"
    ".n{fill:#9198a1}}"
)


def _svg(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            f"<title>{title}</title>",
            f"<style>text{{font-family:{FONT};fill:#1f2328}}.t{{font-size:14px;font-weight:600}}"
            ".h{font-size:12px;font-weight:600}.l,.c{font-size:12px}.v{font-size:9px}"
            ".n{font-size:10px;fill:#59636e}.c,.v,.n{text-anchor:middle}.s{text-anchor:start}"
            f"{_DARK}</style>",
            f'<rect width="{width}" height="{height}" rx="6" class="bg"/>',
            _text(_LEFT, 20, title, "t"),
            *parts,
            "</svg>",
            "",
        ]
    )


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{text}</text>'


_BOX, _COLUMN, _ROW, _NAMES = 92, 112, 58, 150
_BOXES = {
    "last": ("#eaeef2", "#262c36", "#8c959f"),
    "draft": ("#ddf4ff", "#0c2d6b", "#2f81f7"),
    "target": ("#fff", "#0d1117", "#8c959f"),
    "out": ("#dafbe1", "#033a16", "#2da44e"),
    "no": ("#ffebe9", "#67060c", "#cf222e"),
    "wide": ("#f6f8fa", "#151b23", "#8c959f"),
}
"""Boxes of the diagram: fill on a light and on a dark background, and line."""


def step_diagram() -> str:
    """Return an SVG of one step with K = 3, of which two drafts are accepted."""
    width, height = _NAMES + 4 * _COLUMN + 16, 6 * _ROW + 20
    rows = [
        ("input", [("the", "last"), ("cat", "draft"), ("sat", "draft"), ("in", "draft")]),
        ("target tokens", [(word, "target") for word in ("cat", "sat", "on", "a")]),
        ("output: 3 tokens", [("cat", "out"), ("sat", "out"), ("on", "out"), ("", "")]),
        ("next drafts", [("the", "draft"), ("mat", "draft"), (".", "draft"), ("", "")]),
    ]
    tops = {0: 14, 1: 14 + 2 * _ROW, 2: 14 + 3 * _ROW, 3: 14 + 5 * _ROW}
    parts = [
        _wide(14 + _ROW, 4, "target model: one pass over 4 rows"),
        _wide(14 + 4 * _ROW, 3, "MTP layer: 3 passes, one draft each"),
    ]
    for index, (name, boxes) in enumerate(rows):
        top = tops[index]
        parts.append(_text(12, top + 22, name, "c s"))
        parts += [_box(column, top, *box) for column, box in enumerate(boxes) if box[1]]
    # a draft is compared with the target token of the row before it
    for column, same in enumerate((True, True, False)):
        x, y = _NAMES + column * _COLUMN + _BOX, tops[1] + 12
        color, sign = ("#2da44e", "=") if same else ("#cf222e", "≠")
        word = rows[0][1][column + 1][0]
        parts.append(f'<text x="{x + 10}" y="{y + 9}" class="v" style="fill:{color}">{sign}</text>')
        parts.append(_text(x + 10, y - 18, f"draft “{word}”", "n"))
    parts.append(_text(_NAMES + 3 * _COLUMN + 4, tops[2] + 14, "“in” is rejected;", "n e"))
    parts.append(_text(_NAMES + 3 * _COLUMN + 4, tops[2] + 28, "“on”: bonus token", "n e"))
    light = "".join(f".{k}{{fill:{v[0]};stroke:{v[2]}}}" for k, v in _BOXES.items())
    dark = "".join(f".{k}{{fill:{v[1]}}}" for k, v in _BOXES.items())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">',
            "<title>A step with K = 3: two drafts are accepted, three tokens are output</title>",
            f"<style>text{{font-family:{FONT};fill:#1f2328}}.c{{font-size:13px}}"
            ".c,.v,.n{text-anchor:middle}.n{font-size:10px;fill:#59636e}.v{font-size:15px;"
            "font-weight:600}.s,.e{text-anchor:start}"
            f"{_DARK}{light}@media (prefers-color-scheme:dark){{{dark}}}</style>",
            f'<rect width="{width}" height="{height}" rx="6" class="bg"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _box(column: int, top: int, word: str, kind: str) -> str:
    left = _NAMES + column * _COLUMN
    return f'<rect x="{left}" y="{top}" width="{_BOX}" height="34" rx="5" class="{kind}"/>' + _text(
        left + _BOX // 2, top + 22, word, "c"
    )


def _wide(top: int, columns: int, words: str) -> str:
    width = (columns - 1) * _COLUMN + _BOX
    return (
        f'<rect x="{_NAMES}" y="{top}" width="{width}" height="34" rx="5" '
        f'class="wide"/>' + _text(_NAMES + width // 2, top + 22, words, "c")
    )
