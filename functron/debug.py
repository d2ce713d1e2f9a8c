"""Looking into programs: printing from every rank, and drawing how a spec lays out a tensor."""

from __future__ import annotations

import builtins
import itertools
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from functron import compat
from functron.errors import raise_problems
from functron.program.recorder import active
from functron.spmd.axes import BoundAxis, SimulatedAxis, scope
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.spec import P, dim_axes, num_shards, problems
from functron.spmd.traced import TracedAxis

_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define("debug_print(str text, Tensor[] values, str[] axes, Tensor[] indices) -> ()")


def print(text: str, *args: Any, **kwargs: Any) -> None:  # noqa: A001  (as jax.debug.print)
    """Print ``text.format(*args, **kwargs)`` from inside a program, on every rank.

    Works in simulation, on processes, under torch.func transforms and in traced and compiled
    programs, where it runs each time the program reaches it. A line per rank, led by its place on
    the axes over which a value varies; one line where none does::

        ft.debug.print("norm {norm:.3f}", norm=x.norm())
        [tp=0] norm 1.250
        [tp=1] norm 0.968

    Args:
        text: a format string, as `str.format` takes it. 0-dim tensors are formatted as numbers.
        args: tensors and other values.
        kwargs: the same by name.

    Raises:
        ValueError: a field reads an attribute or an item of a tensor.
    """
    form, tensors = _without_statics(text, args, kwargs)
    axes = [axis for axis in scope().axes.values() if axis is not None]
    recorder = active()
    if recorder is not None:
        traced = [axis for axis in axes if isinstance(axis, TracedAxis)]
        names, indices = [axis.name for axis in traced], [axis.index for axis in traced]
        recorder.effect(torch.ops.functron.debug_print.default, form, tensors, names, indices)
        return
    place = {axis.name: axis.index for axis in axes if isinstance(axis, BoundAxis)}
    levels = {
        compat.level_of(axis.token): axis.name for axis in axes if isinstance(axis, SimulatedAxis)
    }
    _print_ranks(form, tensors, place, levels)


def _without_statics(text: str, args: tuple, kwargs: dict) -> tuple[str, list[torch.Tensor]]:
    """The format string with all but tensors filled in, which become its fields in order."""
    formatter, parts, tensors = string.Formatter(), [], []
    automatic = itertools.count()
    for literal, field, spec, conversion in formatter.parse(text):
        parts.append(literal.replace("{", "{{").replace("}", "}}"))
        if field is None:
            continue
        name = field or str(next(automatic))
        value, _ = formatter.get_field(name, args, kwargs)
        root = formatter.get_value(_first(name), args, kwargs)
        if isinstance(root, torch.Tensor) and value is not root:
            raise ValueError(
                f"debug.print: got the field {name!r} of a tensor; wanted the tensor itself or a "
                "value; fix: pass what you want to see as an argument of its own"
            )
        tail = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        if isinstance(value, torch.Tensor):
            parts.append("{" + str(len(tensors)) + tail + "}")
            tensors.append(value)
        else:
            shown = ("{" + tail + "}").format(value)
            parts.append(shown.replace("{", "{{").replace("}", "}}"))
    return "".join(parts), tensors


def _first(name: str) -> int | str:
    first = name.split(".")[0].split("[")[0]
    return int(first) if first.isdigit() else first


def _print_ranks(
    text: str, tensors: Sequence[torch.Tensor], place: Mapping[str, int], levels: Mapping[int, str]
) -> None:
    """A line for each combination of the batch dims under the vmaps around."""
    peeled = [compat.physical(value) for value in tensors]
    if any(isinstance(value, FakeTensor) for value, _, _ in peeled):
        return  # a check without numbers
    sizes: dict[int, int] = {}
    for value, dims, _ in peeled:
        sizes.update({level: value.shape[dim] for level, dim in dims.items()})
    order = sorted(sizes)
    for row in itertools.product(*(range(sizes[level]) for level in order)):
        at = dict(zip(order, row, strict=True))
        values = [_at(one, at) for one in peeled]
        ranks = {levels.get(level, "vmap"): index for level, index in at.items()}
        builtins.print(_line(text, values, {**place, **ranks}), flush=True)


def _at(peeled: compat.Physical, at: Mapping[int, int]) -> torch.Tensor:
    value, dims, own = peeled
    value = value.permute([*dims.values(), *own])
    return value[tuple(at[level] for level in dims)].detach()


def _line(text: str, values: Sequence[torch.Tensor], place: Mapping[str, int]) -> str:
    where = " ".join(f"{name}={index}" for name, index in place.items())
    shown = text.format(*(value.item() if value.dim() == 0 else value for value in values))
    return f"[{where}] {shown}" if where else shown


def _debug_print(text, values, axes, indices) -> None:
    place = {name: int(index) for name, index in zip(axes, indices, strict=True)}
    builtins.print(_line(text, values, place), flush=True)


_LIBRARY.impl("debug_print", _debug_print, "CompositeExplicitAutograd")


def visualize_sharding(spec: P, shape: Sequence[int], mesh: Mesh | BoundMesh) -> Drawing:
    """A drawing of which ranks hold which block of a tensor; prints as text, SVG in notebooks.

    At most two dims can be drawn: the first two that the spec splits (one, or none, where it splits
    fewer). Ranks that hold the same block are listed in it together.

    Args:
        spec: how the tensor is split.
        shape: its global shape.
        mesh: the ranks.

    Raises:
        ValueError: the spec does not fit the shape or the mesh.
    """
    raise_problems("visualize_sharding", problems("shape", shape, spec, mesh))
    axes = dim_axes(spec, len(shape))
    counts = [num_shards(names, mesh) for names in axes]
    split = [dim for dim, count in enumerate(counts) if count > 1]
    drawn = sorted([*split, *(d for d in range(len(shape)) if d not in split)][:2])
    plain = mesh.mesh if isinstance(mesh, BoundMesh) else mesh
    cells: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plain.size):
        at = plain.coordinate(rank)
        cells.setdefault(tuple(_index(axes[dim], plain, at) for dim in drawn), []).append(rank)
    return Drawing(
        f"{tuple(shape)} {spec} on {plain.shape}",
        tuple((f"dim {dim}", shape[dim], counts[dim], axes[dim]) for dim in drawn),
        {index: tuple(ranks) for index, ranks in cells.items()},
    )


def _index(names: Sequence[str], mesh: Mesh, at: Mapping[str, int]) -> int:
    index = 0
    for name in names:
        index = index * mesh[name] + at.get(name, 0)
    return index


@dataclass(frozen=True)
class Drawing:
    """What `visualize_sharding` returns.

    Attributes:
        title: shape, spec and mesh.
        dims: of each drawn dim its name, size, number of blocks and mesh axes; at most two.
        cells: the ranks that hold each block, by its index on the drawn dims.
    """

    title: str
    dims: tuple[tuple[str, int, int, tuple[str, ...]], ...]
    cells: Mapping[tuple[int, ...], tuple[int, ...]]

    def _grid(self) -> list[list[str]]:
        """Rows of cells; a single dim is drawn as a row, none as one cell."""
        rows = self.dims[0][2] if len(self.dims) == 2 else 1
        columns = self.dims[-1][2] if self.dims else 1
        return [
            [_ranks(self.cells[(r, c)[2 - len(self.dims) :]]) for c in range(columns)]
            for r in range(rows)
        ]

    def __str__(self) -> str:
        grid = self._grid()
        width = max(len(cell) for row in grid for cell in row) + 2
        bar = "─" * width
        lines = ["┌" + "┬".join([bar] * len(grid[0])) + "┐"]
        for row in grid:
            lines.append("│" + "│".join(cell.center(width) for cell in row) + "│")
            lines.append("├" + "┼".join([bar] * len(row)) + "┤")
        lines[-1] = "└" + "┴".join([bar] * len(grid[0])) + "┘"
        return "\n".join([self.title, *lines, *self._legend()])

    def _legend(self) -> list[str]:
        places = ["down", "across"][2 - len(self.dims) :] if self.dims else []
        return [
            f"{place}: {name}, {size} in {count} of {size // count} over {' '.join(names) or '-'}"
            for place, (name, size, count, names) in zip(places, self.dims, strict=True)
        ]

    def svg(self) -> str:
        """The drawing as an SVG picture, a colour per block."""
        grid = self._grid()
        wide, high, top = 96, 44, 22
        width = max(wide * len(grid[0]), 8 * len(self.title)) + 2
        height = top + high * len(grid) + 18 * len(self.dims) + 6
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="12">',
            f'<text x="1" y="14" fill="currentColor">{escape(self.title)}</text>',
        ]
        for r, row in enumerate(grid):
            for c, cell in enumerate(row):
                hue = 360 * (r * len(row) + c) // (len(grid) * len(row))
                x, y = 1 + c * wide, top + r * high
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" stroke="#888" '
                    f'fill="hsl({hue},55%,75%)"/><text x="{x + wide / 2}" y="{y + high / 2 + 4}" '
                    f'text-anchor="middle" fill="#000">{escape(cell)}</text>'
                )
        for i, line in enumerate(self._legend()):
            y = top + high * len(grid) + 16 + 18 * i
            parts.append(f'<text x="1" y="{y}" fill="currentColor">{escape(line)}</text>')
        return "".join([*parts, "</svg>"])

    def _repr_html_(self) -> str:
        return self.svg()


def _ranks(ranks: Sequence[int]) -> str:
    """``0-3`` for a run, ``0,2,4`` otherwise, shortened where there are many."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = ",".join(map(str, ranks[:4]))
    return f"{shown},…{ranks[-1]}" if len(ranks) > 4 else shown
