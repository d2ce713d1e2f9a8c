"""Looking into programs: printing from every rank, drawing specs, and checking derivatives.

`snapshot_donated` keeps the state of a step that is interrupted.

`visualize_sharding` draws how a spec lays a tensor out over a mesh, as text and SVG.
"""

from __future__ import annotations

import builtins
import itertools
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from functron.core import compat, tree
from functron.core.errors import Problem, full_tracebacks, public, raise_problems
from functron.core.scopes import phase
from functron.program.recorder import active
from functron.spmd.axes import BoundAxis, SimulatedAxis, TracedAxis, scope, user_line
from functron.spmd.donation import snapshot_donated
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.shard_map import MappedFunction, shard_map
from functron.spmd.simulate import no_share
from functron.spmd.spec import P, dim_axes, num_shards, problems

__all__ = ["check_grads", "full_tracebacks", "print", "snapshot_donated", "visualize_sharding"]


def visualize_sharding(spec: P, shape: Sequence[int], mesh: Mesh | BoundMesh) -> Drawing:
    """A drawing of which ranks hold which block of a tensor; prints as text, SVG in notebooks.

    Ranks that hold the same block are listed in it together. A drawing has at most two dims: the
    first two that the spec splits, filled up with others where it splits fewer. Where it splits
    more, a block lists the ranks of all parts along the dims that are not drawn. Many rows or
    columns, and many ranks in a block, are shortened with dots.

    Raises:
        ValueError: the spec does not fit the shape or the mesh.
    """
    raise_problems("visualize_sharding", problems("shape", shape, spec, mesh))
    plain = mesh.mesh
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
    return Drawing(title, drawn, {at: tuple(found) for at, found in cells.items()}, tuple(notes))


@dataclass(frozen=True)
class Dim:
    """A dim of a tensor, and how it is split.

    Attributes:
        blocks: into how many equal parts it is split.
        axes: the mesh axes that split it, major to minor.
    """

    number: int
    size: int
    blocks: int
    axes: tuple[str, ...]

    def block(self, mesh: Mesh, rank: int) -> int:
        """Which part `rank` holds."""
        return mesh.rank_at(mesh.coordinate(rank), self.axes)

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


@dataclass(frozen=True, repr=False)
class Drawing:
    """The picture that `visualize_sharding` returns.

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
        return _list_ranks(self.cells[(row, column)[2 - len(self.dims) :]])

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


def _list_ranks(ranks: Sequence[int]) -> str:
    """``0-3`` for a run, else ``0,2,4``; from five on ``0,2,…,14``."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{ranks[0]},{ranks[1]},…,{ranks[-1]}"


_LIBRARY = torch.library.Library("functron", "FRAGMENT")
_LIBRARY.define(
    "debug_print(str text, Tensor[] values, str[] axes, Tensor[] indices, str[] dims) -> ()"
)


@public
def print(text: str, *args: Any, **kwargs: Any) -> None:  # noqa: A001  (as jax.debug.print)
    """Print ``text.format(*args, **kwargs)`` from inside a program, on every rank.

    Works in simulation, on processes, under torch.func transforms and in traced and compiled
    programs, where it runs each time that the program reaches it; never in the second run of a
    function under remat, nor while only shapes are computed. In simulation there is a line for each
    rank on the axes over which a value varies, in rank order, and one line where none does::

        ft.debug.print("norm {norm:.3f}", norm=x.norm())
        [tp=0] norm 1.250
        [tp=1] norm 0.968

    A process, and a rank of a traced program, prints its own line with its place on every axis.
    Under `torch.func.vmap` there is a line per element, marked ``vmap=0`` and so on.

    Args:
        text: a format string, as `str.format` takes it. Formats apply to every element of a tensor.
        args: tensors, trees of them, and other values.

    Raises:
        ValueError: a field has no value, or a value no field.
    """
    form, tensors = _fill_statics(text, args, kwargs)
    if phase() == "recompute":
        return
    axes = [axis for axis in scope().axes.values() if axis is not None]
    simulated = {compat.level_of(a.token): a.name for a in axes if isinstance(a, SimulatedAxis)}
    plain = [no_share(value) for value in tensors]
    with compat.no_transforms(), torch.no_grad():
        values, dims = _expand_ranks(plain, simulated)
        recorder = active()
        if recorder is not None:
            traced = {axis.name: axis.index for axis in axes if isinstance(axis, TracedAxis)}
            op = torch.ops.functron.debug_print.default
            recorder.effect(op, form, values, [*traced], [*traced.values()], dims)
        elif not compat.faking() and not any(
            isinstance(v, FakeTensor) or v.is_meta for v in values
        ):
            place = {axis.name: axis.index for axis in axes if isinstance(axis, BoundAxis)}
            _print_lines(form, values, place, dims)


def _fill_statics(text: str, args: tuple, kwargs: dict) -> tuple[str, list[torch.Tensor]]:
    """The format string with all but tensors filled in, which become its fields in order."""
    formatter, automatic = string.Formatter(), itertools.count()
    parts: list[str] = []
    tensors: list[torch.Tensor] = []
    used: set[int | str] = set()

    def look_up(name: str) -> Any:
        try:
            value, root = formatter.get_field(name, args, kwargs)
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"debug.print at {user_line()}: got no value for the field {name!r}; wanted an "
                "argument of that name or position"
            ) from error
        used.add(root)
        return value

    def fill(spec: str) -> str:
        """A format that takes values itself, as in ``{x:.{digits}f}``."""
        rows = formatter.parse(spec)
        return "".join(
            literal + (str(look_up(name or str(next(automatic)))) if name is not None else "")
            for literal, name, _, _ in rows
        )

    for literal, name, spec, conversion in formatter.parse(text):
        parts.append(_escape_braces(literal))
        if name is None:
            continue
        value = look_up(name or str(next(automatic)))
        tail = (f"!{conversion}" if conversion else "") + (f":{fill(spec)}" if spec else "")
        parts.append(_make_field(value, tail, tensors))
    unused = [key for key in [*range(len(args)), *kwargs] if key not in used]
    raise_problems(
        f"debug.print at {user_line()}",
        [Problem(f"argument {key}", "no field for it", f"{{{key}}} in {text!r}") for key in unused],
    )
    return "".join(parts), tensors


def _make_field(value: Any, tail: str, tensors: list[torch.Tensor]) -> str:
    """The part of a format string that shows `value`, whose tensors are appended to `tensors`."""
    leaves, structure = tree.flatten(value)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return _escape_braces(f"{{0{tail}}}".format(value))
    marked: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            marked.append(_Mark(len(tensors)))
            tensors.append(leaf)
        else:
            marked.append(leaf)
    shown = _escape_braces(repr(tree.unflatten(structure, marked)))
    return re.sub("\0(.*?)\0", lambda found: "{" + found[1] + tail + "}", shown)


@dataclass(frozen=True)
class _Mark:
    """Stands for tensor number `index` where a tree that holds it is shown."""

    index: int

    def __repr__(self) -> str:
        return f"\0{self.index}\0"


def _escape_braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _expand_ranks(
    tensors: Sequence[torch.Tensor], names: Mapping[int, str]
) -> tuple[list[torch.Tensor], list[str]]:
    """The plain tensors, with a leading dim for each vmap under which any of them is batched.

    Args:
        tensors: possibly wrapped by torch.func transforms.
        names: of the axes, by vmap level; other levels are the user's own vmaps.

    Returns:
        The tensors and the names of their leading dims, outermost vmap first.
    """
    peeled = [compat.physical(value) for value in tensors]
    sizes: dict[int, int] = {}
    for value, dims, _ in peeled:
        sizes.update({level: value.shape[dim] for level, dim in dims.items()})
    levels = sorted(sizes)
    plain = []
    for value, dims, own in peeled:
        value = value.detach()
        if levels:
            value = value.permute([*(dims[level] for level in levels if level in dims), *own])
            for position, level in enumerate(levels):
                value = value if level in dims else value.unsqueeze(position)
            shape = [*(sizes[level] for level in levels), *value.shape[len(levels) :]]
            value = value.expand(shape)
        plain.append(value)
    own_vmaps = [level for level in levels if level not in names]
    given = {level: f"vmap{position or ''}" for position, level in enumerate(own_vmaps)}
    return plain, [names.get(level) or given[level] for level in levels]


def _print_lines(
    text: str, values: Sequence[torch.Tensor], place: Mapping[str, Any], dims: Sequence[str]
) -> None:
    sizes = values[0].shape[: len(dims)] if values else ()
    for row in itertools.product(*map(range, sizes)):
        at = {**place, **dict(zip(dims, row, strict=True))}
        where = " ".join(f"{name}={int(index)}" for name, index in at.items())
        shown = text.format(*(_Shown(value[row]) for value in values))
        builtins.print(f"[{where}] {shown}" if where else shown, flush=True)


@dataclass(frozen=True, eq=False)
class _Shown:
    """A tensor as a field of a format string."""

    value: torch.Tensor

    def __str__(self) -> str:
        return str(self.value.item() if self.value.dim() == 0 else self.value)

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return _format_each(self.value.tolist(), spec) if spec else str(self)


def _format_each(value: Any, spec: str) -> str:
    """Numbers, or nested lists of them, each in the format `spec`."""
    if isinstance(value, list):
        return f"[{', '.join(_format_each(item, spec) for item in value)}]"
    return format(value, spec)


def _debug_print(text, values, axes, indices, dims) -> None:
    _print_lines(text, values, dict(zip(axes, indices, strict=True)), dims)


_LIBRARY.impl("debug_print", _debug_print, "CompositeExplicitAutograd")
_LIBRARY.impl("debug_print", lambda *args: None, "Meta")


_RULE = (
    "look for a backward rule (custom_vjp, autograd.Function) that forgot a collective: ranks sum "
    "what they return over the ranks that used a value, so psum transposes to psum, all_gather to "
    "psum_scatter, and ppermute to its inverse; or for a stop_gradient"
)


def check_grads(
    f: Callable,
    mesh: Mesh | BoundMesh,
    *args: Any,
    in_specs: tree.Tree = None,
    order: int = 1,
    modes: Sequence[str] = ("rev",),
    eps: float = 1e-5,
    rtol: float = 1e-5,
    atol: float = 1e-7,
    seed: int = 0,
) -> None:
    """Check the derivatives of a per-rank program against finite differences, on all ranks.

    For every floating-point argument x_i, a random direction v and random cotangents u of what each
    rank returns, it compares ``<u, df/dx_i v>`` with ``<u, f(x_i + eps v) - f(x_i - eps v)> / 2
    eps``, in float64 on the simulated mesh, as `jax.test_util.check_grads` does for one device. So
    it finds wrong transposes of what ranks exchange, such as a `custom_vjp` whose backward lacks a
    psum, which single-device checks cannot.

    Args:
        f: of this rank's shards, as `shard_map` takes it, or what `shard_map` returned. Its
            results may vary over any axes.
        mesh: the ranks; simulated here also where it is bound.
        args: global values, of which those that are no floats stay fixed.
        in_specs: how they are split, as for `shard_map`. None: those of `f`, or not at all.
        order: 2 checks the derivative of the gradient too, and so on.
        modes: "rev" (vjp) and "fwd" (jvp), which functions with a `custom_vjp` lack.
        eps: the length of a step.
        rtol: tolerated, in multiples of the lengths of u and of the difference quotient.

    Raises:
        ValueError: derivatives differ, by argument with both numbers; an order below 1 or an
            unknown mode; nothing to differentiate.
    """
    problems = [Problem("order", repr(order), "at least 1")] if order < 1 else []
    problems += [Problem("modes", repr(m), '"rev" or "fwd"') for m in modes if m not in _MODES]
    leaves, structure = tree.flatten(args)
    moving = [i for i, leaf in enumerate(leaves) if tree.is_float(leaf)]
    if not moving:
        got = "no floating-point tensor"
        problems.append(Problem("args", got, "something to differentiate by"))
    raise_problems("check_grads", problems)
    if isinstance(f, MappedFunction):
        f, in_specs = f.f, f.in_specs if in_specs is None else in_specs
    whole = mesh.mesh

    def rows(*local: Any) -> tuple[torch.Tensor, ...]:
        return tuple(leaf.unsqueeze(0) for leaf in tree.leaves(f(*local)) if tree.is_float(leaf))

    ranks = P(tuple(name for name, size in whole.axes if size > 1))
    mapped = shard_map(rows, whole, P() if in_specs is None else in_specs, ranks, check=False)

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        full = list(leaves)
        for i, value in zip(moving, values, strict=True):
            full[i] = value
        return mapped(*tree.unflatten(structure, full))

    paths = tree.paths(args)
    generator = torch.Generator().manual_seed(seed)
    values = tuple(leaves[i].detach().to(torch.float64) for i in moving)
    for degree in range(1, order + 1):
        u = _directions(function(*values), generator)
        names = [f"{'gradient of ' * (degree - 1)}argument {paths[i]}" for i in moving]
        found = [
            _compare_derivatives(function, values, i, u, mode, (eps, rtol, atol, generator))
            for mode in modes
            for i in range(len(values))
        ]
        raise_problems(
            f"derivatives of order {degree} on Mesh({whole}) are not those of finite differences",
            [
                Problem(name, *parts, _RULE)
                for name, parts in zip(names * len(modes), found, strict=True)
                if parts is not None
            ],
        )
        function = _pull_back(function, u)


_MODES = ("rev", "fwd")


def _pull_back(function: Callable, u: tuple[torch.Tensor, ...]) -> Callable:
    """The gradient of ``<u, function(...)>``."""
    return lambda *values: torch.func.vjp(function, *values)[1](u)


def _directions(
    like: Sequence[torch.Tensor], generator: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """Random tensors of these shapes, together of length 1."""
    drawn = [torch.randn(x.shape, dtype=torch.float64, generator=generator) for x in like]
    length = sum(float(x.square().sum()) for x in drawn) ** 0.5 or 1.0
    return tuple((x / length).to(one.device) for x, one in zip(drawn, like, strict=True))


def _dot(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))


def _compare_derivatives(
    function: Callable, values: tuple, index: int, u: tuple, mode: str, settings: tuple
) -> tuple[str, str] | None:
    """The derivatives by one argument, got and wanted, where they differ."""
    eps, rtol, atol, generator = settings
    (v,) = _directions([values[index]], generator)
    along = tuple(v if i == index else torch.zeros_like(x) for i, x in enumerate(values))
    ends = [
        function(*(x + sign * eps * d for x, d in zip(values, along, strict=True)))
        for sign in (1, -1)
    ]
    quotient = [(a - b) / (2 * eps) for a, b in zip(*ends, strict=True)]
    want = _dot(u, quotient)
    if mode == "rev":
        got = _dot(torch.func.vjp(function, *values)[1](u), along)
    else:
        got = _dot(u, torch.func.jvp(function, values, along)[1])
    if abs(got - want) <= atol + rtol * _dot(quotient, quotient) ** 0.5:
        return None
    return f"{got:.9g} by {mode}", f"{want:.9g}, the difference quotient"
