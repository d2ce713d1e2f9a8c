"""Rows of text in columns."""

from __future__ import annotations

from collections.abc import Sequence


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
