"""Charts of the README files as SVG, written from ``integration/results/*.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COLORS = ("#8c959f", "#2f81f7", "#2da44e")
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"
_BASE, _HEIGHT, _BAR, _GAP, _LEFT = 200, 112, 22, 18, 24


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


def bar_chart(title: str, series: Sequence[str], panels: Sequence[Panel]) -> str:
    """Return an SVG of grouped bars, whose values are ratios to the first series.

    Args:
        series: names for the legend, at most as many as `COLORS`.
    """
    width = len(series) * _BAR
    highest = max(value for panel in panels for group in panel.groups for value in group.values)
    parts, x = [], _LEFT
    for panel in panels:
        parts.append(_text(x, 62, panel.title, "h"))
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
    total, height = max(total, left), _BASE + 44
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height}" '
            f'viewBox="0 0 {total} {height}" role="img">',
            f"<title>{title}</title>",
            f"<style>text{{font-family:{FONT};fill:#1f2328}}.t{{font-size:14px;font-weight:600}}"
            ".h{font-size:12px;font-weight:600}.l,.c{font-size:12px}.v{font-size:9px}"
            ".n{font-size:10px;fill:#59636e}.c,.v,.n{text-anchor:middle}</style>",
            f'<rect width="{total}" height="{height}" rx="6" fill="#fff"/>',
            _text(_LEFT, 20, title, "t"),
            *legend,
            *parts,
            f'<path d="M{_LEFT - 6} {_BASE}.5H{total - _LEFT + 6}" stroke="#d1d9e0"/>',
            "</svg>",
            "",
        ]
    )


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{text}</text>'
