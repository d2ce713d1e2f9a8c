"""Shards of shards: cutting what a spec leaves whole over further axes, where sizes divide or not.

A `Cut` says that a dim of a local value is cut over axes that the value is replicated over so far.
The longest leading part of these axes that divides the dim splits it evenly. The others together
cut what is left into parts of ``ceil(size / ranks)``, the last ones short or empty, and padded with
zeros to that length. Padding is added by `take` and `scatter` and dropped by `join`; nobody else
needs to know of it but who stores the parts, for whom there are `padded_shape`, `pad` and `unpad`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from functron.core import tree
from functron.core.errors import Problem, raise_problems
from functron.spmd.axes import Axis, axis_index, axis_size, lookup
from functron.spmd.collectives import all_gather
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.primitives import PsumScatter
from functron.spmd.spec import Entry, P, dim_axes, entry_axes, is_spec


class Cut(NamedTuple):
    """A dim of a local value and the axes that split it further.

    Attributes:
        dim: counted from the last, -1: so that it also is that of a slice along the first.
        axes: major to minor.
    """

    dim: int
    axes: tuple[str, ...]


Cuts = tuple[Cut, ...]


def cuts_between(spec: P, into: P, num_dims: int) -> Cuts:
    """The cuts that make parts with spec `into` of a value with spec `spec`.

    ``cuts_between(P("tp"), P(("tp", "dp")), 2)`` is ``(Cut(-2, ("dp",)),)``.

    Raises:
        ValueError: on some dim `into` has not the axes of `spec` followed by others.
    """
    before, after = dim_axes(spec, num_dims), dim_axes(into, num_dims)
    raise_problems(
        "cannot cut one sharding into another",
        [
            Problem(
                f"dim {dim}",
                f"{into}, from {spec}",
                f"the axes {old} first, then others: a part of what the rank has",
                "append axes to an entry, so that they are minor",
            )
            for dim, (old, new) in enumerate(zip(before, after, strict=True))
            if new[: len(old)] != old
        ],
    )
    return tuple(
        Cut(dim - num_dims, new[len(old) :])
        for dim, (old, new) in enumerate(zip(before, after, strict=True))
        if len(new) > len(old)
    )


def as_entry(axes: Sequence[str]) -> Entry:
    """The entry of a spec for a dim that these axes split, as one would write it."""
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def whole_over(specs: tree.Tree, axes: Sequence[str]) -> tree.Tree:
    """The specs without these axes: of what is gathered over them."""

    def one(spec: P | None) -> P | None:
        if spec is None:
            return None
        return P(*(as_entry([n for n in entry_axes(e) if n not in axes]) for e in spec))

    return tree.map(one, specs, is_leaf=is_spec)


def cut_tree(specs: tree.Tree, into: tree.Tree, value: tree.Tree) -> list[Cuts]:
    """`cuts_between` for every leaf of `value`; specs are prefix trees."""
    rows = zip(
        tree.leaves(value),
        tree.broadcast_prefix(specs, value, is_leaf=is_spec, what="specs", wanted="a P"),
        tree.broadcast_prefix(into, value, is_leaf=is_spec, what="into", wanted="a P"),
        strict=True,
    )
    return [cuts_between(spec, wanted, len(leaf.shape)) for leaf, spec, wanted in rows]


def part_shape(shape: Sequence[int], cuts: Cuts) -> tuple[int, ...]:
    """The shape of a rank's part of a local value of this shape, padding included."""
    sizes = list(shape)
    for dim, axes in cuts:
        sizes[dim] = -(-sizes[dim] // axis_size(axes))
    return tuple(sizes)


def take(x: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """This rank's part of x, which its ranks hold whole; no communication.

    A view on a bound mesh, unless it must be padded.
    """
    for dim, axes in _steps(x.shape, cuts):
        count, index = axis_size(axes), axis_index(axes)
        x = _padded(x, dim, count)
        size = x.shape[dim] // count
        if isinstance(index, int):
            x = x.narrow(dim, index * size, size)
        else:
            rows = x.unflatten(dim, (count, size)).movedim(dim - 1, 0)
            x = rows.index_select(0, index.to(x.device).reshape(1)).squeeze(0)
    return x


def join(x: torch.Tensor, cuts: Cuts, shape: Sequence[int] | None = None) -> torch.Tensor:
    """The whole local value, of this shape (None: not padded), from every rank's part.

    Varying -> replicated. One all-gather per axis; backward a reduce-scatter each.
    """
    if shape is None:
        shape = list(x.shape)
        for dim, axes in cuts:
            shape[dim] *= axis_size(axes)
    sizes, steps = list(shape), []
    for dim, axes in _steps(shape, cuts):
        steps.append((dim, axes, sizes[dim]))
        sizes[dim] = -(-sizes[dim] // axis_size(axes))
    for dim, axes, size in reversed(steps):
        x = all_gather(x, axes, axis=dim, tiled=True)
        x = x if x.shape[dim] == size else x.narrow(dim, 0, size)
    return x


def scatter(x: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """This rank's part of the sum of x over the ranks of the cuts' axes.

    Varying -> varying. One reduce-scatter per axis, of the bytes that are left of x's.

    Args:
        x: each rank's own, a share of the sum.
        cuts: what `take` would cut.
    """
    return scatter_over(x, bound_cuts(x.shape, cuts))


BoundCuts = Sequence[tuple[int, Sequence[Axis]]]
"""Cuts in their order, with the axes that are in force, none of size 1."""


def bound_cuts(shape: Sequence[int], cuts: Cuts) -> BoundCuts:
    """`cuts` of a local value of this shape, for a place where their axes are not in force."""
    return [(dim, lookup(names)) for dim, names in _steps(shape, cuts)]


def scatter_over(x: torch.Tensor, cuts: BoundCuts) -> torch.Tensor:
    """`scatter` by what `bound_cuts` returned for x's shape."""
    for dim, axes in cuts:
        sizes = [axis.size for axis in axes]
        count = math.prod(sizes)
        rows = _padded(x, dim, count).unflatten(dim, (count, -1))
        x = rows.movedim(dim - 1, 0).unflatten(0, sizes)
        for axis in axes:
            x = PsumScatter.call(x, axis)
    return x


def _steps(shape: Sequence[int], cuts: Cuts) -> list[Cut]:
    """Cuts one after another: of a dim over the axes that divide it, then over the others."""
    steps = []
    for dim, axes in cuts:
        bound = [name for name in axes if axis_size(name) > 1]
        count = _num_even(shape[dim], [axis_size(name) for name in bound])
        groups = (bound[:count], bound[count:])
        steps += [Cut(dim, tuple(group)) for group in groups if group]
    return steps


def _num_even(size: int, counts: Sequence[int]) -> int:
    """How many of these axes, from the first on, split a dim evenly."""
    for position, count in enumerate(counts):
        if size % count:
            return position
        size //= count
    return len(counts)


def _padded(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    missing = -x.shape[dim] % count
    return F.pad(x, [0, 0] * (-dim - 1) + [0, missing]) if missing else x


def fill(x: torch.Tensor, dim: int, axes: Sequence[str]) -> torch.Tensor:
    """x, which ranks hold whole, with the padding that lets these axes split a dim of it evenly.

    For exchanges that send each rank its part of a dim: `take` cuts the same parts.
    """
    even, rest = _parts_of(x.shape[dim], axes)
    if x.shape[dim] % (even * rest) == 0:
        return x
    dim = dim % x.dim() - x.dim()
    return _padded(x.unflatten(dim, (even, -1)), dim, rest).flatten(dim - 1, dim)


def trim(x: torch.Tensor, dim: int, axes: Sequence[str], size: int) -> torch.Tensor:
    """The value of this size along a dim, from all parts of it one after another; undoes `fill`."""
    if x.shape[dim] == size:
        return x
    even, _ = _parts_of(size, axes)
    dim = dim % x.dim() - x.dim()
    return x.unflatten(dim, (even, -1)).narrow(dim, 0, size // even).flatten(dim - 1, dim)


def _parts_of(size: int, axes: Sequence[str]) -> tuple[int, int]:
    """The number of ranks that split a dim evenly, and that of those that cut the rest."""
    counts = [axis_size(name) for name in axes if axis_size(name) > 1]
    count = _num_even(size, counts)
    return math.prod(counts[:count]), math.prod(counts[count:])


def padded_shape(shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh) -> tuple[int, ...]:
    """The global shape of all parts together of a value of this global shape: that and padding.

    Args:
        shape: of the value itself.
        spec: of the parts.
        mesh: the ranks.
    """
    blocks = _blocks(shape, spec, mesh)
    return tuple(
        even * -(-size // (even * rest)) * rest
        for size, (even, rest) in zip(shape, blocks, strict=True)
    )


def pad(value: torch.Tensor, spec: P, mesh: Mesh | BoundMesh) -> torch.Tensor:
    """The global value with the padding of `padded_shape`; the inverse of `unpad`."""
    for dim, (even, rest) in enumerate(_blocks(value.shape, spec, mesh), -value.dim()):
        if value.shape[dim] % (even * rest):
            rows = value.unflatten(dim, (even, -1))
            value = _padded(rows, dim, rest).flatten(dim - 1, dim)
    return value


def unpad(
    value: torch.Tensor, shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh
) -> torch.Tensor:
    """The global value of this shape, from one with the padding of `padded_shape`."""
    for dim, (even, _) in enumerate(_blocks(shape, spec, mesh), -value.dim()):
        if value.shape[dim] != shape[dim]:
            rows = value.unflatten(dim, (even, -1)).narrow(dim, 0, shape[dim] // even)
            value = rows.flatten(dim - 1, dim)
    return value


def _blocks(shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh) -> list[tuple[int, int]]:
    """Per dim the number of ranks that split it evenly, and that of those that cut the rest."""
    found = []
    for size, axes in zip(shape, dim_axes(spec, len(shape)), strict=True):
        counts = [mesh[name] for name in axes]
        count = _num_even(size, counts)
        found.append((math.prod(counts[:count]), math.prod(counts[count:])))
    return found
