"""Rows as text and HTML tables, numbers with units, and what shows itself by them.

What shows itself in consoles and notebooks gives its rows as a `Table`, and configurations give
what differs from their defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows as lines, each column as wide as its widest cell, two spaces apart.

    Args:
        rows: of as many cells each; a row without cells is an empty line.
        left: how many columns are aligned to the left, as text is; the others are to the right.
    """
    widths = [max(map(len, column)) for column in zip(*filter(None, rows), strict=True)]
    aligned = [
        [cell.ljust(width) for cell, width in zip(row[:left], widths[:left], strict=True)]
        + [cell.rjust(width) for cell, width in zip(row[left:], widths[left:], strict=True)]
        for row in ((row or [""] * len(widths)) for row in rows)
    ]
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def html_table(rows: Sequence[Sequence[str]], *, heading: bool = False, left: int = 99) -> str:
    """Rows of text as an HTML table, the first one bold if it is a heading.

    Args:
        left: how many columns are aligned to the left, as of `table`.
    """
    parts = []
    for index, row in enumerate(rows):
        tag = "th" if heading and index == 0 else "td"
        cells = zip(row, ["left"] * left + ["right"] * (len(row) - left), strict=False)
        parts.append(
            "".join(f'<{tag} style="text-align:{a}">{escape(text)}</{tag}>' for text, a in cells)
        )
    return "<table>" + "".join(f"<tr>{part}</tr>" for part in parts) + "</table>"


MAX_LINES = 20
"""Of a `repr`."""


@dataclass(frozen=True, repr=False)
class Table:
    """Rows under a title: all of them printed, `MAX_LINES` in a `repr`, a table in notebooks.

    Attributes:
        title: above them; "" for none.
        rows: of as many cells each, the headings first.
        left: how many columns are aligned to the left, as text is.
        notes: lines below.
        folded: fewer rows that stand for all, for a `repr` and the first glance in notebooks;
            (): the first and the last of many.
    """

    title: str
    rows: Sequence[Sequence[str]]
    left: int = 1
    notes: Sequence[str] = ()
    folded: Sequence[Sequence[str]] = ()

    def _short(self) -> Sequence[Sequence[str]]:
        """The rows that fit into `MAX_LINES`."""
        room = MAX_LINES - bool(self.title) - len(self.notes)
        rows = self.folded if self.folded and len(self.rows) > room else self.rows
        if len(rows) <= room:
            return rows
        gap = [f"... {len(rows) - room + 1} more", *[""] * (len(rows[0]) - 1)]
        return [*rows[: room - 4], gap, *rows[-3:]]

    def _text(self, rows: Sequence[Sequence[str]]) -> str:
        body = table(rows, self.left) if rows else ""
        return "\n".join(part for part in (self.title, body, *self.notes) if part)

    def __str__(self) -> str:
        return self._text(self.rows)

    def __repr__(self) -> str:
        return self._text(self._short())

    def _repr_html_(self) -> str:
        short = self._short()
        parts = [f"<b>{escape(self.title)}</b>"]
        parts.append(html_table(short, heading=True, left=self.left))
        if short is not self.rows:
            summary = f"<summary>all {len(self.rows) - 1} rows</summary>"
            whole = html_table(self.rows, heading=True, left=self.left)
            parts.append(f"<details>{summary}{whole}</details>")
        parts += [f"<div>{escape(note)}</div>" for note in self.notes]
        return f"<div>{''.join(parts)}</div>"


Shown = TypeVar("Shown", bound=type)


def shows_table(kind: Shown) -> Shown:
    """A class whose instances show the `Table` of their method ``_table``: a decorator of it."""
    shown: Any = kind
    shown.__repr__ = lambda self: repr(self._table())
    shown._repr_html_ = lambda self: self._table()._repr_html_()
    return kind


def shows_differences(kind: Shown) -> Shown:
    """A dataclass or named tuple that is shown by what differs from its defaults: a decorator.

    Its `repr` is a call that makes it again; in notebooks it is a table of values and defaults.
    """
    shown: Any = kind
    shown.__repr__ = repr_differences
    shown._table = _table_of_differences
    shown._repr_html_ = lambda self: self._table()._repr_html_()
    return kind


def _differences(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """The fields that are not their defaults: names, values and defaults."""
    if isinstance(config, tuple):  # a named one
        known: Any = config
        rows = [(n, known._field_defaults.get(n, dataclasses.MISSING)) for n in known._fields]
    else:
        made = ((f, f.default_factory) for f in dataclasses.fields(config) if f.init and f.repr)
        rows = [(f.name, f.default if make is dataclasses.MISSING else make()) for f, make in made]
    for name, default in rows:
        value = getattr(config, name)
        if default is dataclasses.MISSING or type(value) is not type(default) or value != default:
            yield name, value, default


def repr_differences(config: Any) -> str:
    """The call that makes a configuration, with what differs from its defaults."""
    shown = ", ".join(f"{name}={value!r}" for name, value, _ in _differences(config))
    return f"{type(config).__qualname__}({shown})"


def _table_of_differences(config: Any) -> Table:
    rows = [["setting", "value", "default"], *_difference_rows(config, "")]
    same = "" if len(rows) > 1 else ", all as by default"
    return Table(f"{type(config).__name__}{same}", rows if len(rows) > 1 else (), left=3)


def _difference_rows(config: Any, prefix: str) -> Iterator[list[str]]:
    for name, value, default in _differences(config):
        path = f"{prefix}{name}"
        if dataclasses.is_dataclass(value) and type(value) is type(default):
            yield from _difference_rows(value, f"{path}.")
        else:
            yield [path, repr(value), "" if default is dataclasses.MISSING else repr(default)]


def count_text(count: float) -> str:
    """``1.23 T``: a count with a decimal prefix."""
    return _with_unit(count, 1000, ["", " k", " M", " G", " T", " P", " E", " Z"])


def bytes_text(count: float) -> str:
    """``1.23 GiB``: bytes with a binary prefix."""
    return _with_unit(count, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"])


def _with_unit(value: float, base: int, units: list[str]) -> str:
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    return f"{value:.2f}{units[power]}" if power else f"{value:g}{units[0]}"


_WIDEST = 60  # columns are padded to the widest cell up to this; longer cells stick out


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines in columns, two spaces apart, one before ``= ``."""
    return ["".join(cells).rstrip() for cells in pad_cells(rows)]


def pad_cells(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows of cells with the spaces that put them in columns; columns of "" take no space."""
    widths: dict[int, int] = {}
    gaps: dict[int, str] = {}
    for column, cell in ((k, cell) for row in rows for k, cell in enumerate(row) if cell):
        widths[column] = max(widths.get(column, 0), len(cell) if len(cell) <= _WIDEST else 0)
        gaps[column] = " " if cell.startswith("= ") else gaps.get(column, "  " if column else "")
    return [
        [
            gaps[column] + cell.ljust(widths[column]) if column in widths else ""
            for column, cell in enumerate(row)
        ]
        for row in rows
    ]
