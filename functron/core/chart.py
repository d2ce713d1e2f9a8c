"""Pictures: lines, bars in time and heat maps as SVG, and bars in time as text.

Runs write some of them without matplotlib; `functron.training.viz` draws with it, in notebooks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import median_high
from typing import NamedTuple

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
MAX_POINTS = 1000
MAX_DOTS = 100
COLORS = ("#d94801", "#238b45", "#6a51a3", "#b8860b", "#ce1256", "#525252")
MARKS = ("#cb181d", "#6a51a3", "#525252", "#238b45")

_FAINT = 'stroke="#9ecae1" stroke-width="1"'
_BOLD = 'stroke="#08519c" stroke-width="2"'

Points = list[tuple[float, float]]


def line_chart(
    x: Sequence[float],
    y: Sequence[float],
    *,
    title: str,
    x_label: str,
    y_label: str,
    others: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    marks: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """A chart of y over x, with its moving average when there are many points, as an SVG document.

    Args:
        x: increasing.
        y: as many; values that are not finite are left out.
        title: above the chart.
        x_label, y_label: below it and beside it, with the units.
        others: further curves by name, each as points (x, y), in colours that a legend explains.
        marks: by name, places on the x axis where something happened: a dashed line at each, with
            the name at the first.
    """
    points = _finite(zip(x, y, strict=True))
    further = {name: _finite(curve) for name, curve in (others or {}).items()}
    seen = [*points, *(point for curve in further.values() for point in curve)]
    x_ticks = ticks(min((p[0] for p in seen), default=0), max((p[0] for p in seen), default=1))
    y_ticks = ticks(min((p[1] for p in seen), default=0), max((p[1] for p in seen), default=1))

    def place(a: float, b: float) -> tuple[float, float]:
        across = (a - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (b - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return (
            LEFT + across * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
        )

    grid = []
    for tick in x_ticks:
        px, bottom = place(tick, y_ticks[0])
        grid.append(_line(px, bottom, px, TOP))
        grid.append(_text(px, bottom + 18, f"{tick:g}"))
    grid += _draw_levels((tick, place(x_ticks[0], tick)[1]) for tick in y_ticks)
    many = len(points) > 50
    curves = [_polyline([place(*p) for p in points], _FAINT)] if many else []
    curves.append(_polyline([place(*p) for p in (smooth(points) if many else points)], _BOLD))
    for number, (name, curve) in enumerate(further.items()):
        curves += _draw_named_curve(name, [place(*p) for p in curve], number)
    across = (x_ticks[0], x_ticks[-1])
    for number, (name, xs) in enumerate((marks or {}).items()):
        inside = [place(x, y_ticks[0])[0] for x in xs if across[0] <= x <= across[1]]
        curves += _draw_marks(name, inside, number)
    words = _draw_words(title, x_label, y_label)
    return svg_document(WIDTH, HEIGHT, [*grid, *curves, *words])


def _draw_levels(places: Iterable[tuple[float, float]]) -> list[str]:
    """A line across and a number beside it for each tick of the y axis, with its height."""
    parts = []
    for tick, height in places:
        parts.append(_line(LEFT, height, WIDTH - RIGHT, height))
        parts.append(_text(LEFT - 8, height + 4, f"{tick:g}", "end"))
    return parts


def _draw_words(title: str, x_label: str, y_label: str) -> list[str]:
    """The title and the names of the axes."""
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [
        _text(WIDTH / 2, 24, title, size=15, more='font-weight="bold"'),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label),
        _text(18, middle, y_label, more=f'transform="rotate(-90 18 {middle:g})"'),
    ]


def svg_document(width: float, height: float, parts: Sequence[str], size: float = 12) -> str:
    """Elements as an SVG document on white, whose text is centred and has this size."""
    form = f'width="{width:g}" height="{height:g}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" {form} '
        f'font-family="sans-serif" font-size="{size:g}" text-anchor="middle">',
        f'<rect {form} fill="white"/>',
        *parts,
        "</svg>\n",
    ])  # fmt: skip


def _finite(points: Iterable[tuple[float, float]]) -> Points:
    return [(a, b) for a, b in points if math.isfinite(a) and math.isfinite(b)]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from at most `low` to at least `high`, in steps of 1, 2 or 5 times 10^n."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / 6
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(m * scale for m in (1, 2, 5, 10) if m * scale >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean of y over a twentieth of the points around each (fewer at the ends)."""
    reach = max(len(points) // 40, 1)
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    out = []
    for index, (a, _) in enumerate(points):
        near = min(reach, index, len(points) - 1 - index)
        total = sums[index + near + 1] - sums[index - near]
        out.append((a, total / (2 * near + 1)))
    return out


def _draw_named_curve(name: str, points: Points, number: int) -> list[str]:
    """A curve in the colour of its number, its points, and its line of the legend."""
    color = COLORS[number % len(COLORS)]
    style = f'stroke="{color}" stroke-width="1.5"'
    dots = [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{color}"/>' for a, b in points]
    height = TOP + 14 + 16 * number
    legend = _text(WIDTH - RIGHT - 8, height, name, "end", ink=color)
    return [_polyline(points, style), *(dots if len(points) <= MAX_DOTS else ()), legend]


def _draw_marks(name: str, places: Sequence[float], number: int) -> list[str]:
    """Dashed lines at places, with a name at the first."""
    color, shown = MARKS[number % len(MARKS)], sorted({round(at, 1) for at in places})
    lines = [
        f'<line x1="{at}" y1="{TOP}" x2="{at}" y2="{HEIGHT - BOTTOM}" stroke="{color}" '
        f'stroke-width="1" stroke-dasharray="4 3"/>'
        for at in shown[:MAX_POINTS]
    ]
    at = TOP + 10 + 11 * number
    return [*lines, *(_text(x + 3, at, name, "start", ink=color, size=10) for x in shown[:1])]


def _polyline(points: Points, style: str) -> str:
    stride = -(-len(points) // MAX_POINTS) or 1
    kept = points[::stride]
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in kept)
    return f'<polyline points="{path}" fill="none" {style} stroke-linejoin="round"/>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e5e5e5"/>'


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "",
    *,
    ink: str = "",
    size: float = 0,
    more: str = "",
) -> str:
    more += f' text-anchor="{anchor}"' if anchor else ""
    more += f' fill="{ink}"' if ink else ""
    more += f' font-size="{size:g}"' if size else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


# --- Gantt charts


class TextBar(NamedTuple):
    """An interval of a row; its labels, best first, and the sign that it goes on with."""

    row: int
    start: float
    end: float
    labels: Sequence[str]
    sign: str


def gantt_text(bars: Sequence[TextBar], names: Sequence[str], width: int) -> str:
    """A line per row with its name, time to the right.

    A bar starts with a label, as far as it fits, and goes on with its sign. A line is of `width`
    characters at most.
    """
    shown = [bar for bar in bars if bar.end > bar.start]
    total = max((bar.end for bar in shown), default=1.0)
    scale = _scale(shown, total, max(1, width - max(map(len, names), default=0) - 3))
    lines = [[" "] * max(1, round(total * scale)) for _ in names]
    for bar in sorted(shown, key=lambda bar: bar.start):
        line = lines[bar.row]
        start, end = min(round(bar.start * scale), len(line) - 1), round(bar.end * scale)
        room = max(end - start - 1, 1)  # a space, so that bars do not run into each other
        label = next((label for label in bar.labels if len(label) <= room), "")
        line[start : start + room] = label.ljust(room, bar.sign)
    return draw_frame(["".join(line) for line in lines], names)


def _scale(bars: Sequence[TextBar], total: float, room: int) -> float:
    """How many characters a unit of time takes: as labels need, but no more than fit."""
    shortest = min((bar.end - bar.start for bar in bars), default=total)
    needs = [(len(bar.labels[0]) + 1) / (bar.end - bar.start) for bar in bars]
    least = math.ceil(max(needs, default=1.0) * shortest - 1e-9)
    wider = [characters / shortest for characters in range(least, least + 3)]
    edges = [edge for bar in bars for edge in (bar.start, bar.end)]
    # a little wider where equal times then look equal
    even = (s for s in wider if all(abs(e * s - round(e * s)) < 1e-6 for e in edges))
    scale = next(even, wider[1])
    if scale * total <= room:
        return scale
    characters = room / total * shortest
    return (int(characters + 1e-9) if characters >= 1 else characters) / shortest


def draw_frame(lines: Sequence[str], names: Sequence[str]) -> str:
    """Lines between bars, each behind its name."""
    margin = max(map(len, names), default=0)
    rows = zip(names, lines, strict=True)
    return "\n".join(f"{name.ljust(margin)} │{line}│" for name, line in rows)


class SvgBar(NamedTuple):
    """An interval of a row of a picture.

    Attributes:
        row, start, end: where it is.
        label: in it, where there is room.
        title: shown under the pointer.
        colour: of CSS.
        dark: whether that asks for white letters.
        slot: which of how many boxes that share the interval.
    """

    row: int
    start: float
    end: float
    label: str
    title: str
    colour: str
    dark: bool = False
    slot: tuple[int, int] = (0, 1)


class Gantt(NamedTuple):
    """A row per name, a box per interval: `svg` draws it, and `functron.training.viz.timeline`.

    Attributes:
        boxes: the intervals.
        names: of the rows.
        title: above the chart.
        legend: texts, each with the colours before it.
    """

    boxes: Sequence[SvgBar]
    names: Sequence[str]
    title: str
    legend: Sequence[Sequence[str]] = ()

    def svg(self, width: float | None = None) -> str:
        """An SVG picture on white, for any page.

        Args:
            width: in pixels; None: such that most boxes have room for their labels.
        """
        return _gantt_svg(*self, width)


def _gantt_svg(
    boxes: Sequence[SvgBar],
    names: Sequence[str],
    title: str,
    legend: Sequence[Sequence[str]],
    width: float | None,
) -> str:
    total = max((box.end for box in boxes), default=0.0) or 1.0
    lengths = sorted(box.end - box.start for box in boxes if box.end > box.start) or [total]
    short = lengths[len(lengths) // 4]  # of measured ones the shortest would stretch the picture
    left, top, high = 62, 48, 28
    wide = min(max(900.0, 22 * total / short), 12000.0) if width is None else width - left - 8
    scale, width, height = wide / total, left + wide + 8, top + high * len(names) + 8
    parts = [_text(2, 14, title, "start", size=13), *_legend(legend)]
    for row, name in enumerate(names):
        y = top + high * row
        parts.append(_text(left - 6, y + high / 2 + 4, name, "end"))
        parts.append(
            f'<rect x="{left}" y="{y}" width="{wide:.1f}" height="{high - 3}" fill="#f0f0f0"/>'
        )
    for box in boxes:
        index, count = box.slot
        slot = (high - 3) / count
        x, y = left + box.start * scale, top + high * box.row + index * slot
        parts += _box(box, x, y, (box.end - box.start) * scale, slot)
    return svg_document(round(width), height, parts, 11)


def _box(box: SvgBar, x: float, y: float, width: float, height: float) -> list[str]:
    """The rectangle of a box, with its label in it where that fits."""
    rectangle = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" '
        f'fill="{box.colour}" stroke="white" stroke-width="0.7">'
        f"<title>{escape(box.title)}</title></rect>"
    )
    if width < 7 * len(box.label):
        return [rectangle]
    size = min(11, height - 1)
    at = x + width / 2, y + height / 2 + size / 3
    return [rectangle, _text(*at, box.label, ink="white" if box.dark else "", size=size)]


def _legend(rows: Sequence[Sequence[str]]) -> list[str]:
    parts, x = [], 2.0
    for name, *colours in rows:
        for colour in colours:
            parts.append(f'<rect x="{x}" y="24" width="11" height="11" fill="{colour}"/>')
            x += 12
        parts.append(_text(x + 3 * bool(colours), 33, name, "start"))
        x += 6.2 * len(name) + 22
    return parts


# --- heat maps


def heat_map(
    values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], *, title: str
) -> str:
    """Numbers in boxes, as an SVG document: the redder, the more above the middle of their column.

    Args:
        values: of every row and column; one that is not finite is left white.
        rows: their names, to the left; where there are many, those in between are left out.
        columns: their names, above.
        title: above all.
    """
    wide, high = 90.0, max(3.0, min(24.0, 1200.0 / max(len(rows), 1)))
    left = 12 + 7.0 * max(map(len, rows), default=0)
    width, height = left + wide * len(columns) + 12, 76 + high * len(rows) + 12
    known = ([row[i] for row in values if math.isfinite(row[i])] for i in range(len(columns)))
    middles = [median_high(column) if column else 0.0 for column in known]
    scale = max((abs(middle) for middle in middles), default=0.0)
    parts = [_text(width / 2, 24, title, size=15, more='font-weight="bold"')]
    parts += [_text(left + wide * (i + 0.5), 62, name) for i, name in enumerate(columns)]
    every = max(1, math.ceil(14 / high))
    for number, (name, row) in enumerate(zip(rows, values, strict=True)):
        top = 72 + high * number
        if number % every == 0:
            parts.append(_text(left - 6, top + high / 2 + 4, name, "end"))
        for i, value in enumerate(row):
            # what hardly takes time in any row is not red for being twice as long in one
            over = (value - middles[i]) / max(abs(middles[i]), scale / 10, 1e-12)
            parts.append(
                f'<rect x="{left + wide * i:.1f}" y="{top:.1f}" width="{wide - 1:g}" '
                f'height="{max(high - 1, 2):.1f}" fill="{_heat(over)}">'
                f"<title>{escape(f'{name}, {columns[i]}: {value:.4g}')}</title></rect>"
            )
            if high >= 14 and math.isfinite(value):
                parts.append(_text(left + wide * (i + 0.5), top + high / 2 + 4, f"{value:.3g}"))
    return svg_document(width, height, parts)


def _heat(over: float) -> str:
    """White in the middle, red at twice that, blue at nothing."""
    if not math.isfinite(over):
        return "white"
    faded = round(255 - 160 * min(abs(over), 1.0))
    return f"rgb(255,{faded},{faded})" if over > 0 else f"rgb({faded},{faded},255)"
