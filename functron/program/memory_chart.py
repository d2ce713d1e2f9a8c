"""Stacked areas over steps as SVG text, in the style of `functron.plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from types import MappingProxyType

from functron.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, ticks

_COLOURS = MappingProxyType(
    {
        "parameters": "#08519c",
        "optimizer": "#6baed6",
        "gradients": "#e6550d",
        "activations": "#31a354",
        "workspace": "#bdbdbd",
        "inputs": "#756bb1",
    }
)
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
_MAX_POINTS = 1000


def area_chart(
    series: Mapping[str, Sequence[int]], *, title: str, x_label: str, y_label: str
) -> str:
    """Areas stacked on one another, in bytes, with a legend, as an SVG document.

    Args:
        series: by category, the bottom one first; all of one length.
        title: above the chart.
        x_label: below it.
        y_label: beside it; the unit is added.
    """
    rows = _thin([*zip(*series.values(), strict=True)])
    top = max((sum(row) for row in rows), default=0)
    scale, unit = next((pair for pair in _UNITS if top >= pair[0]), _UNITS[-1])
    y_ticks = ticks(0, top / scale)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def across(step: int) -> float:
        return LEFT + width * step / max(len(rows), 1)

    def up(count: float) -> float:
        return HEIGHT - BOTTOM - height * count / (y_ticks[-1] * scale)

    parts = []
    for tick in y_ticks:
        at = up(tick * scale)
        parts.append(
            f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#e5e5e5"/>'
        )
        parts.append(_text(LEFT - 8, at + 4, f"{tick:g}", anchor="end"))
    below = [0] * len(rows)
    for index, name in enumerate(series):
        above = [base + row[index] for base, row in zip(below, rows, strict=True)]
        edge = _steps(above, across, up) + _steps(below, across, up)[::-1]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in edge)
        colour = _COLOURS.get(name, "#636363")
        parts.append(f'<polygon points="{points}" fill="{colour}"><title>{name}</title></polygon>')
        below = above
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 18 {middle:g})"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            *parts,
            *_legend(list(series)),
            _text(WIDTH / 2, 20, title, more='font-size="13" font-weight="bold"'),
            _text(LEFT + width / 2, HEIGHT - 10, x_label),
            _text(18, middle, f"{y_label} ({unit})", more=turned),
            "</svg>\n",
        ]
    )


def _thin(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """At most `_MAX_POINTS` rows: of neighbours the highest, so that peaks stay."""
    stride = -(-len(rows) // _MAX_POINTS) or 1
    return [max(rows[k : k + stride], key=sum) for k in range(0, len(rows), stride)]


def _steps(values: Sequence[int], across, up) -> list[tuple[float, float]]:
    points = []
    for step, value in enumerate(values):
        points += [(across(step), up(value)), (across(step + 1), up(value))]
    return points


def _legend(names: list[str]) -> list[str]:
    parts = []
    for index, name in enumerate(names):
        x = LEFT + index * (WIDTH - LEFT - RIGHT) / max(len(names), 1)
        colour = _COLOURS.get(name, "#636363")
        parts.append(f'<rect x="{x:.1f}" y="28" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, 37, name, anchor="start"))
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
