"""Drawings of how a spec lays a tensor out over a mesh, as text and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from functron.errors import raise_problems
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.spec import P, dim_axes, num_shards, problems


def visualize_sharding(spec: P, shape: Sequence[int], mesh: Mesh | BoundMesh) -> Drawing:
    """A drawing of which ranks hold which block of a tensor; prints as text, SVG in notebooks.

    Ranks that hold the same block are listed in it together. A drawing has at most two dims: the
    first two that the spec splits, filled up with others where it splits fewer. Where it splits
    more, a block lists the ranks of all parts along the dims that are not drawn. Many rows or
    columns, and many ranks in a block, are shortened with dots.

    Args:
        spec: how the tensor is split.
        shape: its global shape.
        mesh: the ranks.

    Raises:
        ValueError: the spec does not fit the shape or the mesh.
    """
    raise_problems("visualize_sharding", problems("shape", shape, spec, mesh))
    plain = mesh.mesh if isinstance(mesh, BoundMesh) else mesh
    names = [tuple(n for n in axes if plain[n] > 1) for axes in dim_axes(spec, len(shape))]
    dims = [Dim(d, shape[d], num_shards(names[d], plain), names[d]) for d in range(len(shape))]
    by_use = sorted(dims, key=lambda dim: dim.blocks == 1)  # stable: split ones first
    drawn = tuple(sorted(by_use[:2], key=lambda dim: dim.number))
    cells: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plain.size):
        cells.setdefault(tuple(dim.block(plain, rank) for dim in drawn), []).append(rank)
    local = tuple(dim.size // dim.blocks for dim in dims)
    title = f"{tuple(shape)} by {spec} on Mesh({plain}): each rank holds {local}"
    notes = [
        f"{place}: dim {dim.number}" + (f" over {', '.join(dim.axes)}" if dim.axes else ", whole")
        for place, dim in zip(_places(drawn), drawn, strict=True)
    ]
    notes += [
        f"not drawn: dim {dim.number} over {', '.join(dim.axes)}, in {dim.blocks} parts"
        for dim in dims
        if dim.blocks > 1 and dim not in drawn
    ]
    used = {name for axes in names for name in axes}
    copies = [name for name, size in plain.axes if size > 1 and name not in used]
    notes += [f"replicated over {', '.join(copies)}"] if copies else []
    return Drawing(title, drawn, {at: tuple(found) for at, found in cells.items()}, tuple(notes))


@dataclass(frozen=True)
class Dim:
    """A dim of a tensor, and how it is split.

    Attributes:
        number: its position.
        size: of the whole tensor.
        blocks: into how many equal parts it is split.
        axes: the mesh axes that split it, major to minor.
    """

    number: int
    size: int
    blocks: int
    axes: tuple[str, ...]

    def block(self, mesh: Mesh, rank: int) -> int:
        """Which part `rank` holds."""
        index, at = 0, mesh.coordinate(rank)
        for name in self.axes:
            index = index * mesh[name] + at[name]
        return index

    def bounds(self, block: int | None) -> str:
        """The slice that is a block, ``4:8``."""
        step = self.size // self.blocks
        return "…" if block is None else f"{block * step}:{(block + 1) * step}"

    def shown(self) -> list[int | None]:
        """The blocks to draw, None for those left out."""
        if self.blocks <= _MOST:
            return [*range(self.blocks)]
        return [*range(_MOST - 2), None, self.blocks - 1]


_MOST = 8  # rows, or columns, of a drawing


def _places(dims: Sequence[Dim]) -> list[str]:
    return ["down", "across"][2 - len(dims) :]


@dataclass(frozen=True, repr=False)
class Drawing:
    """What `visualize_sharding` returns.

    Attributes:
        title: shape, spec and mesh.
        dims: those that are drawn, at most two; the last one runs across.
        cells: the ranks that hold each block, by its index on the drawn dims.
        notes: which axes split which dim, and over which the tensor is replicated.
    """

    title: str
    dims: tuple[Dim, ...]
    cells: Mapping[tuple[int, ...], tuple[int, ...]]
    notes: tuple[str, ...]

    def _table(self) -> tuple[list[str], list[str], list[list[str]]]:
        """Row labels, column labels and what stands in the cells."""
        columns = self.dims[-1].shown() if self.dims else [0]
        rows = self.dims[0].shown() if len(self.dims) == 2 else [0]
        grid = [[self._cell(r, c) for c in columns] for r in rows]
        across = [self.dims[-1].bounds(c) for c in columns] if self.dims else [""]
        down = [self.dims[0].bounds(r) for r in rows] if len(self.dims) == 2 else [""]
        return down, across, grid

    def _cell(self, row: int | None, column: int | None) -> str:
        if row is None or column is None:
            return "…"
        return _ranks(self.cells[(row, column)[2 - len(self.dims) :]])

    def __str__(self) -> str:
        down, across, grid = self._table()
        width = max(len(text) for row in [across, *grid] for text in row) + 2
        margin = max(map(len, down)) + 1
        bar = "─" * width
        head = " " * (margin + 1) + " ".join(text.center(width) for text in across)
        lines = [self.title, head.rstrip()]
        for number, (label, row) in enumerate(zip(down, grid, strict=True)):
            left, cross, right = "├┼┤" if number else "┌┬┐"
            lines.append(" " * margin + left + cross.join([bar] * len(row)) + right)
            cells = "│".join(text.center(width) for text in row)
            lines.append(f"{label.rjust(margin - 1)} │{cells}│")
        lines.append(" " * margin + "└" + "┴".join([bar] * len(across)) + "┘")
        return "\n".join(line for line in [*lines, *self.notes] if line)

    __repr__ = __str__

    def svg(self) -> str:
        """The drawing as an SVG picture, a colour per block; readable on light and dark pages."""
        down, across, grid = self._table()
        wide = 7 * max(len(text) for row in [across, *grid] for text in row) + 24
        high, left, top = 36, 7 * max(map(len, down)) + 10, 44
        width = max(left + wide * len(across), 7 * max(map(len, [self.title, *self.notes]))) + 4
        height = top + high * len(grid) + 18 * len(self.notes) + 8
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
            _label(2, 16, self.title, "start"),
        ]
        parts += [_label(left + (c + 0.5) * wide, top - 6, text) for c, text in enumerate(across)]
        for r, row in enumerate(grid):
            y = top + r * high
            parts.append(_label(left - 6, y + high / 2 + 4, down[r], "end"))
            for c, text in enumerate(row):
                hue = 360 * (r * len(row) + c) // (len(grid) * len(row))
                colour = "none" if text == "…" else f"hsl({hue},55%,78%)"
                ink = "currentColor" if text == "…" else "black"
                x = left + c * wide
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" fill="{colour}" '
                    'stroke="white" stroke-width="2"/>'
                )
                parts.append(_label(x + wide / 2, y + high / 2 + 4, text, ink=ink))
        below = top + high * len(grid) + 18
        parts += [_label(2, below + 18 * i, note, "start") for i, note in enumerate(self.notes)]
        return "\n".join([*parts, "</svg>"])

    def _repr_html_(self) -> str:
        return self.svg()


def _label(x: float, y: float, text: str, anchor: str = "middle", ink: str = "currentColor") -> str:
    at = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {at} fill="{ink}">{escape(text)}</text>'


def _ranks(ranks: Sequence[int]) -> str:
    """``0-3`` for a run, else ``0,2,4``; from five on ``0,2,…,14``."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{ranks[0]},{ranks[1]},…,{ranks[-1]}"
