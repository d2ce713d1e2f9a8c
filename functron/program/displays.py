"""Displays of trees and meshes: tables of what trees hold, drawings of how specs split tensors.

`show` makes a table of a tree of tensors, definitions or specs; `visualize_sharding` draws how a
spec lays a tensor out over a mesh, as text and SVG.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.errors import public, raise_problems, refuse
from functron.core.tables import MAX_LINES, Table, bytes_text
from functron.spmd.donation import Donated
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.spec import (
    P,
    Rules,
    dim_axes,
    global_shape,
    is_spec,
    local_shape,
    padded_part_shape,
    part_span,
    problems,
)

# --- tables


@public
def show(value: Any, specs: Any = None, mesh: Any = None) -> Table:
    """The leaves of a tree as a table: names, shapes, dtypes, specs, and bytes on each rank.

    It prints whole, and is a table in notebooks; its `repr` has `MAX_LINES` lines, where the
    largest parts of the tree are shown in detail and others by their sums. What layers have alike
    is one row: ``layers/{0..11}/mlp/up``.

    >>> ft.show({"w": torch.zeros(8, 4), "b": torch.zeros(8)}, ft.P("tp"), ft.Mesh(tp=2))
    path  shape   dtype    spec     local shape  numbers  bytes  per rank
    b     (8,)    float32  P('tp')  (4,)               8     32        16
    w     (8, 4)  float32  P('tp')  (4, 4)            32    128        64
    2 tensors, 40 numbers, 160 bytes; 80 bytes per rank

    Args:
        value: a tree of tensors, of handles with a shape, dtype, spec and mesh, of `ParamDef`s or
            of specs; on a bound mesh, of this rank's shards. Or what has a table of its own, such
            as a mesh.
        specs: a prefix tree of specs, or the `Rules` that give them.
        mesh: over which the specs split the values: simulated, bound, or what has its axes.

    Raises:
        ValueError: a value cannot be split as its spec says; all offenders are listed.
    """
    own = getattr(value, "_table", None)
    if own is not None and specs is None:
        return own()
    return tree_table(value, specs, mesh)


def tree_table(
    value: tree.Tree, specs: Any = None, mesh: Mesh | BoundMesh | None = None, title: str = ""
) -> Table:
    """`show` of a tree, whose name is the title."""
    if isinstance(specs, Rules):
        rules = specs
        if any(map(_is_def, tree.leaves(value))):
            specs = tree.map_with_path(
                lambda path, d: rules.spec(d.axes, path=path, shape=d.shape), value
            )
        else:
            specs = rules.specs(value)
    paths, leaves = tree.paths(value, _is_p), tree.leaves(value, _is_p)
    flat: Sequence[P | None] = [None] * len(leaves)
    if specs is not None:
        flat = tree.broadcast_prefix(specs, value, is_leaf=is_spec, what="specs", wanted="a P")
    places = [getattr(leaf, "mesh", None) or mesh for leaf in leaves]
    known = [
        getattr(leaf, "spec", None) if spec is None and not isinstance(leaf, Donated) else spec
        for leaf, spec in zip(leaves, flat, strict=True)
    ]
    found = list(zip(paths, leaves, known, places, strict=True))
    raise_problems(
        "these specs do not fit",
        [
            problem
            for path, leaf, spec, place in found
            if spec is not None and place is not None and _is_whole(leaf, place)
            for problem in problems(path, leaf.shape, spec, place)
        ],
    )
    rows = _join_layers([_row(*each) for each in found])
    defs = bool(leaves) and all(map(_is_def, leaves))
    return _make_table(rows, title, "parameters" if defs else "numbers")


class _Row(NamedTuple):
    """A leaf, or several that are alike or beside each other."""

    path: str
    shape: str
    axes: str
    dtype: str
    spec: str
    local: str
    count: int = 0
    nbytes: int = 0
    local_bytes: int = 0
    leaves: int = 1


_BLANK = _Row("", "", "", "", "", "")


def _is_p(value: Any) -> bool:
    return isinstance(value, P)


def _is_def(leaf: Any) -> bool:
    """Whether it is a `ParamDef`."""
    return hasattr(leaf, "axes") and hasattr(leaf, "decay")


def _is_whole(leaf: Any, mesh: Mesh | BoundMesh) -> bool:
    """Whether the shape of a leaf is that of the whole value, not of this rank's shard."""
    if isinstance(leaf, Donated) or not hasattr(leaf, "shape"):
        return False
    return not (isinstance(mesh, BoundMesh) and isinstance(leaf, torch.Tensor))


def _row(path: str, leaf: Any, spec: P | None, mesh: Mesh | BoundMesh | None) -> _Row:
    if isinstance(leaf, Donated):
        return _Row(path, "consumed", "", "", "", "")
    if isinstance(leaf, P):
        return _Row(path, "", "", "", str(leaf), "")
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return _Row(path, _cut(repr(leaf)), "", type(leaf).__name__, "", "")
    shape = local = tuple(leaf.shape)
    text = ""
    if spec is not None and mesh is not None:
        whole = _is_whole(leaf, mesh)
        shape = shape if whole else global_shape(shape, spec, mesh)
        local = local_shape(shape, spec, mesh) if whole else local
        text = str(local)
    axes = " ".join(name or "-" for name in leaf.axes) if _is_def(leaf) else ""
    count, size = math.prod(shape), getattr(leaf.dtype, "itemsize", 1)
    dtype, shown = str(leaf.dtype).removeprefix("torch."), "" if spec is None else str(spec)
    sizes = (count, count * size, math.prod(local) * size)
    return _Row(path, str(shape), axes, dtype, shown, text, *sizes)


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 40 else f"{text[:37]}..."


_NUMBER = re.compile(r"(?<![^/.])\d+(?![^/.])")


def _join_layers(rows: Sequence[_Row]) -> list[_Row]:
    """Three and more rows that differ by numbers in their paths alone as one each."""
    groups: dict[Any, list[_Row]] = defaultdict(list)
    for row in rows:
        groups[_NUMBER.sub("*", row.path), row[1:]].append(row)
    joined = []
    for (pattern, _), group in groups.items():
        numbers = zip(*([*map(int, _NUMBER.findall(row.path))] for row in group), strict=True)
        found = [sorted({*column}) for column in numbers]
        runs = all(x[-1] - x[0] == len(x) - 1 for x in found)
        if len(group) < 3 or not runs or math.prod(map(len, found)) != len(group):
            joined += group
            continue
        texts = iter(f"{{{x[0]}..{x[-1]}}}" if len(x) > 1 else str(x[0]) for x in found)
        path = re.sub(r"\*", lambda _, texts=texts: next(texts), pattern)
        joined.append(_add_up(path, group, group[0]))
    return joined


def _add_up(path: str, rows: Sequence[_Row], like: _Row) -> _Row:
    columns = [*zip(*(row[6:] for row in rows), strict=True)] or [(0,)] * 4
    return _Row(path, *like[1:6], *map(sum, columns))


def _fold(rows: Sequence[_Row], room: int) -> list[_Row]:
    """At most so many rows, unless more parts are at the top: in detail where most bytes are."""

    def split(group: list[_Row], depth: int) -> list[tuple[str, list[_Row]]]:
        parts: dict[str, list[_Row]] = defaultdict(list)
        for row in group:
            parts["/".join(row.path.split("/")[:depth])].append(row)
        return list(parts.items())

    groups, closed = split(list(rows), 1), set()
    while True:
        open_ = [name for name, group in groups if len(group) > 1 and name not in closed]
        if not open_:
            break
        sizes = {name: sum(row.nbytes for row in group) for name, group in groups}
        name = max(open_, key=lambda name: sizes[name])
        at = next(i for i, group in enumerate(groups) if group[0] == name)
        depth, parts = name.count("/") + 2, groups[at][1]
        inner = split(parts, depth)
        while len(inner) == 1 and len(parts) > 1 and depth < 99:  # a chain of single children
            depth += 1
            inner = split(parts, depth)
        if len(groups) - 1 + len(inner) > room:
            closed.add(name)
            continue
        groups[at : at + 1] = inner
    return [
        group[0]
        if len(group) == 1
        else _add_up(
            f"{name}/*", group, _BLANK._replace(shape=f"{sum(r.leaves for r in group)} leaves")
        )
        for name, group in groups
    ]


_HEADINGS = ("path", "shape", "logical axes", "dtype", "spec", "local shape")


def _make_table(rows: Sequence[_Row], title: str, unit: str) -> Table:
    all_ = _add_up("", rows, _BLANK)
    nbytes = all_.nbytes
    sharded = any(row.local for row in rows)
    kept = [k for k in range(6) if k == 0 or any(row[k] for row in rows)]
    numbers: list[tuple[str, Callable[[_Row], str]]] = []
    if nbytes:
        numbers = [(unit, lambda row: f"{row.count:,}"), ("bytes", lambda row: f"{row.nbytes:,}")]
        numbers += [("per rank", lambda row: f"{row.local_bytes:,}")] if sharded else []

    def cells(rows: Sequence[_Row]) -> list[list[str]]:
        head = [*(_HEADINGS[k] for k in kept), *(name for name, _ in numbers)]
        return [head, *([*(str(row[k]) for k in kept), *(text(row) for _, text in numbers)]
                        for row in rows)]  # fmt: skip

    kind = ("tensor", "tensors") if nbytes else ("leaf", "leaves")
    what = [f"{all_.leaves} {kind[all_.leaves != 1]}"]
    what += [f"{all_.count:,} {unit}", _bytes(nbytes)] if nbytes else []
    total = ", ".join(what) + (f"; {_bytes(all_.local_bytes)} per rank" if sharded else "")
    folded = cells(_fold(rows, MAX_LINES - 3))
    return Table(title, cells(rows), len(kept), (total,), folded)


def _bytes(count: int) -> str:
    return f"{count:,} bytes" + (f" ({bytes_text(count)})" if count >= 1024 else "")


# --- drawings


@public
def visualize_sharding(array: Any, specs: tree.Tree = None, mesh: Any = None) -> Drawing | Drawings:
    """A drawing of which ranks hold which block of a tensor; prints as text, SVG in notebooks.

    Ranks that hold the same block are listed in it together. A drawing has at most two dims: the
    first two that the spec splits, filled up with others where it splits fewer. Where it splits
    more, a block lists the ranks of all parts along the dims that are not drawn. Many rows or
    columns, and many ranks in a block, are shortened with dots.

    >>> ft.visualize_sharding(torch.zeros(4, 6), P(None, "tp"), ft.Mesh(dp=2, tp=2))
    (4, 6) by P(None, 'tp') on Mesh(dp=2,tp=2): each rank holds (4, 3)
          0:3   3:6
        ┌─────┬─────┐
    0:4 │ 0,2 │ 1,3 │
        └─────┴─────┘
    down: dim 0, whole
    across: dim 1 over tp
    replicated over dp

    Args:
        array: a tensor (on a bound mesh, this rank's shard), a handle that has a spec and a mesh, a
            `ParamDef`, or a shape; or a tree of them, but for shapes: their drawings side by side.
        specs: how they are split, a prefix tree; None: as handles say.
        mesh: over which; None: that of handles.

    Raises:
        ValueError: a spec does not fit the shape or the mesh; there is none, or no mesh.
    """
    if isinstance(array, P):
        got, fix = "a spec", "visualize_sharding(array_or_shape, spec, mesh)"
        refuse("visualize_sharding", "array", got, "a tensor, a handle or a shape", fix)
    if isinstance(array, tuple | list) and all(isinstance(size, int) for size in array):
        array = torch.empty(tuple(array), device="meta")
        mesh = None if mesh is None else mesh.mesh  # a shape is that of the whole
    flat = [None] * len(tree.leaves(array))
    if specs is not None:
        flat = tree.broadcast_prefix(specs, array, is_leaf=is_spec, what="specs", wanted="a P")
    drawings = []
    for (path, leaf), spec in zip(tree.items(array), flat, strict=True):
        place = getattr(leaf, "mesh", None) or mesh
        spec = getattr(leaf, "spec", None) if spec is None else spec
        if spec is None or place is None:
            got = f"no {'spec' if spec is None else 'mesh'}"
            refuse("visualize_sharding", path or "array", got, "both", "pass array, spec, mesh")
        shape = leaf.shape if _is_whole(leaf, place) else global_shape(leaf.shape, spec, place)
        drawings.append(_draw(path, tuple(shape), spec, place))
    return drawings[0] if tree.is_leaf(array) else Drawings(tuple(drawings))


def _draw(path: str, shape: tuple[int, ...], spec: P, mesh: Mesh | BoundMesh) -> Drawing:
    raise_problems("visualize_sharding", problems(path or "shape", shape, spec, mesh))
    plain = mesh.mesh
    names = [tuple(n for n in axes if plain[n] > 1) for axes in dim_axes(spec, len(shape))]
    counts = [tuple(plain[name] for name in axes) for axes in names]
    dims = [Dim(d, shape[d], counts[d], names[d]) for d in range(len(shape))]
    by_use = sorted(dims, key=lambda dim: dim.blocks == 1)  # stable: split ones first
    drawn = tuple(sorted(by_use[:2], key=lambda dim: dim.number))
    cells: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plain.size):
        cells.setdefault(tuple(dim.block(plain, rank) for dim in drawn), []).append(rank)
    local = padded_part_shape(shape, spec, mesh)
    head = f"{path} {shape}" if path else f"{shape}"
    title = f"{head} by {spec} on Mesh({plain}): each rank holds {local}"
    notes = [
        f"{place}: dim {dim.number}" + (f" over {', '.join(dim.axes)}" if dim.axes else ", whole")
        for place, dim in zip(["down", "across"][2 - len(drawn) :], drawn, strict=True)
    ]
    notes += [
        f"not drawn: dim {dim.number} over {', '.join(dim.axes)}, in {dim.blocks} parts"
        for dim in dims
        if dim.blocks > 1 and dim not in drawn
    ]
    used = {name for axes in names for name in axes}
    copies = [name for name, size in plain.axes if size > 1 and name not in used]
    notes += [f"replicated over {', '.join(copies)}"] if copies else []
    found = {at: tuple(ranks) for at, ranks in cells.items()}
    return Drawing(title, f"{head} {spec}", drawn, found, tuple(notes))


@dataclass(frozen=True)
class Dim:
    """A dim of a tensor, and how it is split.

    Attributes:
        counts: how many ranks there are along each of `axes`.
        axes: the mesh axes that split it, major to minor.
    """

    number: int
    size: int
    counts: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def blocks(self) -> int:
        """Into how many parts it is split."""
        return math.prod(self.counts)

    def block(self, mesh: Mesh, rank: int) -> int:
        """Which part `rank` holds."""
        return mesh.rank_at(mesh.coordinate(rank), self.axes)

    def bounds(self, block: int | None) -> str:
        """The slice that is a block, ``4:8``; without the padding of `Uneven` splits."""
        if block is None:
            return "…"
        indices = []
        for count in reversed(self.counts):
            block, index = divmod(block, count)
            indices.insert(0, index)
        begin, end, _ = part_span(self.size, self.counts, indices)
        return f"{begin}:{end}"

    def shown(self) -> list[int | None]:
        """The blocks to draw, None for those left out."""
        if self.blocks <= _MOST:
            return [*range(self.blocks)]
        return [*range(_MOST - 2), None, self.blocks - 1]


_MOST = 8  # rows, or columns, of a drawing


@dataclass(frozen=True, repr=False)
class Drawing:
    """The picture that `visualize_sharding` returns.

    Attributes:
        title: shape, spec and mesh.
        name: shape and spec.
        dims: those that are drawn, at most two; the last one runs across.
        cells: the ranks that hold each block, by its index on the drawn dims.
        notes: which axes split which dim, and over which the tensor is replicated.
    """

    title: str
    name: str
    dims: tuple[Dim, ...]
    cells: Mapping[tuple[int, ...], tuple[int, ...]]
    notes: tuple[str, ...]

    def _grid(self) -> tuple[list[str], list[str], list[list[str]]]:
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
        return _list_ranks(self.cells[(row, column)[2 - len(self.dims) :]])

    def __str__(self) -> str:
        down, across, grid = self._grid()
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

    def svg(self, *, small: bool = False) -> str:
        """The drawing as an SVG picture, a colour per block; readable on light and dark pages.

        Args:
            small: without the notes below, and with the name as its title.
        """
        title, notes = (self.name, ()) if small else (self.title, self.notes)
        down, across, grid = self._grid()
        wide = 7 * max(len(text) for row in [across, *grid] for text in row) + 24
        high, left, top = 36, 7 * max(map(len, down)) + 10, 44
        width = max(left + wide * len(across), 7 * max(map(len, [title, *notes]))) + 4
        height = top + high * len(grid) + 18 * len(notes) + 8
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
            _label(2, 16, title, "start"),
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
        parts += [_label(2, below + 18 * i, note, "start") for i, note in enumerate(notes)]
        return "\n".join([*parts, "</svg>"])

    def _repr_html_(self) -> str:
        return self.svg()


@dataclass(frozen=True, repr=False)
class Drawings:
    """Several drawings: below one another as text, side by side in notebooks."""

    drawings: tuple[Drawing, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.drawings))

    def __repr__(self) -> str:
        few = self.drawings[:1] if len(self.drawings) > 1 else self.drawings
        more = len(self.drawings) - len(few)
        return "\n\n".join([*map(str, few), *([f"and {more} more drawings"] if more else [])])

    def _repr_html_(self) -> str:
        parts = [f"<div>{drawing.svg(small=True)}</div>" for drawing in self.drawings]
        return f'<div style="display:flex;flex-wrap:wrap;gap:20px">{"".join(parts)}</div>'


def _label(x: float, y: float, text: str, anchor: str = "middle", ink: str = "currentColor") -> str:
    at = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {at} fill="{ink}">{escape(text)}</text>'


def _list_ranks(ranks: Sequence[int]) -> str:
    """``0-3`` for a run, else ``0,2,4``; from five on ``0,2,…,14``."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{ranks[0]},{ranks[1]},…,{ranks[-1]}"
