"""Gantt charts of schedules and timelines, as text and SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from functron.pipeline.action import Action, Cell, Kind

if TYPE_CHECKING:
    from functron.pipeline.schedule import Schedule

KIND_NAMES: Mapping[Kind, str] = MappingProxyType(
    {
        "F": "forward",
        "B": "backward",
        "I": "backward for inputs",
        "W": "backward for weights",
    }
)
_FILL: Mapping[Kind, str] = MappingProxyType({"F": "·", "B": "=", "I": "-", "W": "~"})
_HUE: Mapping[Kind, int] = MappingProxyType({"F": 215, "B": 135, "I": 175, "W": 35})
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


class Bar(NamedTuple):
    """What a rank does in an interval: one action, or some together."""

    rank: int
    start: float
    end: float
    actions: Cell


def tick_bars(schedule: Schedule) -> list[Bar]:
    """The cells of a table, each a tick long."""
    return [
        Bar(rank, tick, tick + 1, cell)
        for tick, row in enumerate(schedule.table)
        for rank, cell in enumerate(row)
        if cell
    ]


def tick_text(schedule: Schedule) -> str:
    """A line per rank, ticks to the right; F3₁ is the forward of microbatch 3 in chunk 1."""
    columns = []
    for row in schedule.table:
        labels = ["+".join(map(_label, cell)) for cell in row]
        width = max(map(len, labels))
        columns.append([label.ljust(width) for label in labels])
    lines = zip(*columns, strict=True) if columns else [()] * schedule.num_ranks
    return _framed(" ".join(line) for line in lines)


def text(bars: Sequence[Bar], num_ranks: int, width: int) -> str:
    """A line per rank, time to the right; F3₁ is the forward of microbatch 3 in chunk 1.

    A bar starts with its label, as far as it fits, and goes on with a sign of its kind.

    Args:
        bars: what to draw.
        num_ranks: how many lines.
        width: of a line, at most.
    """
    shown = [bar for bar in bars if bar.end > bar.start]
    total = max((bar.end for bar in shown), default=1.0)
    scale = _scale(shown, total, max(1, width - len(f"rank {num_ranks - 1} ││")))
    lines = [[" "] * max(1, round(total * scale)) for _ in range(num_ranks)]
    for bar in sorted(shown, key=lambda bar: bar.start):
        line = lines[bar.rank]
        start, end = min(round(bar.start * scale), len(line) - 1), round(bar.end * scale)
        room = max(end - start - 1, 1)  # a space, so that bars do not run into each other
        label = next((label for label in _labels(bar) if len(label) <= room), "")
        line[start : start + room] = label.ljust(room, _FILL[bar.actions[-1].kind])
    return _framed("".join(line) for line in lines)


def _scale(bars: Sequence[Bar], total: float, room: int) -> float:
    """How many characters a unit of time takes: as labels need, but no more than fit."""
    shortest = min((bar.end - bar.start for bar in bars), default=total)
    needs = [(len(_labels(bar)[0]) + 1) / (bar.end - bar.start) for bar in bars]
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


def _framed(lines: Iterable[str]) -> str:
    rows = [*lines]
    margin = len(f"rank {len(rows) - 1} ")
    return "\n".join(f"{f'rank {rank}'.ljust(margin)}│{row}│" for rank, row in enumerate(rows))


def _label(action: Action) -> str:
    chunk = str(action.chunk).translate(_SUBSCRIPTS) if action.chunk else ""
    return f"{action.kind}{action.microbatch}{chunk}"


def _labels(bar: Bar) -> list[str]:
    """What to write into a bar, best first."""
    whole, first = "+".join(map(_label, bar.actions)), bar.actions[0]
    return [whole, whole.replace("+", ""), _label(first)[1:], str(first.microbatch)]


def svg(bars: Sequence[Bar], num_ranks: int, title: str, width: float | None = None) -> str:
    """A row per rank, a colour per kind, darker for higher chunks; on white, for any page.

    Args:
        bars: what to draw.
        num_ranks: how many rows.
        title: above them.
        width: of the picture; None: such that most bars have room for their labels.
    """
    total = max((bar.end for bar in bars), default=0.0) or 1.0
    lengths = sorted(bar.end - bar.start for bar in bars if bar.end > bar.start) or [total]
    short = lengths[len(lengths) // 4]  # of measured bars the shortest would stretch the picture
    left, top, high = 62, 48, 28
    wide = min(max(900.0, 22 * total / short), 12000.0) if width is None else width - left - 8
    scale, width, height = wide / total, left + wide + 8, top + high * num_ranks + 8
    chunks = 1 + max((a.chunk for bar in bars for a in bar.actions), default=0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" font-family="sans-serif" font-size="11" '
        'text-anchor="middle">',
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
        _text(2, 14, title, "start", size=13),
        *_legend(bars, chunks),
    ]
    for rank in range(num_ranks):
        y = top + high * rank
        parts.append(_text(left - 6, y + high / 2 + 4, f"rank {rank}", "end"))
        parts.append(
            f'<rect x="{left}" y="{y}" width="{wide:.1f}" height="{high - 3}" fill="#f0f0f0"/>'
        )
    for bar in bars:
        slot = (high - 3) / len(bar.actions)
        for index, action in enumerate(bar.actions):
            x, y = left + bar.start * scale, top + high * bar.rank + index * slot
            parts += _box(x, y, (bar.end - bar.start) * scale, slot, action, chunks)
    return "\n".join([*parts, "</svg>"])


def _box(x: float, y: float, width: float, height: float, action: Action, chunks: int) -> list[str]:
    """The rectangle of an action, with its microbatch in it where that fits."""
    rectangle = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" '
        f'fill="{_colour(action.kind, action.chunk, chunks)}" stroke="white" stroke-width="0.7">'
        f"<title>{action}</title></rect>"
    )
    label = str(action.microbatch)
    if width < 7 * len(label):
        return [rectangle]
    ink = "white" if _light(action.chunk, chunks) < 55 else "black"
    size = min(11, height - 1)
    at = x + width / 2, y + height / 2 + size / 3
    return [rectangle, _text(*at, label, ink=ink, size=size)]


def _light(chunk: int, chunks: int) -> float:
    """Lightness in percent: from 76 for the first chunk down to 40 for the last."""
    return 76 - 36 * chunk / max(chunks - 1, 1)


def _colour(kind: Kind, chunk: int, chunks: int) -> str:
    return f"hsl({_HUE[kind]},60%,{_light(chunk, chunks):.0f}%)"


def _legend(bars: Sequence[Bar], chunks: int) -> list[str]:
    used = {action.kind for bar in bars for action in bar.actions}
    parts, x = [], 2.0
    for kind, name in KIND_NAMES.items():
        if kind not in used:
            continue
        for chunk in range(min(chunks, 2)):
            colour = _colour(kind, (chunks - 1) * chunk, chunks)
            parts.append(f'<rect x="{x}" y="24" width="11" height="11" fill="{colour}"/>')
            x += 12
        parts.append(_text(x + 3, 33, name, "start"))
        x += 6.2 * len(name) + 22
    if chunks > 1:
        parts.append(_text(x, 33, f"(first and last of {chunks} chunks)", "start"))
    return parts


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "middle",
    *,
    ink: str = "#222",
    size: float = 11,
) -> str:
    at = f'x="{x:.1f}" y="{y:.1f}" fill="{ink}"'
    at += f' text-anchor="{anchor}"' if anchor != "middle" else ""
    at += f' font-size="{size:g}"' if size != 11 else ""
    return f"<text {at}>{escape(text)}</text>"
