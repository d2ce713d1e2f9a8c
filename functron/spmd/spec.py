"""Partition specs: which mesh axes split which dims, and the arithmetic that follows from it.

What a spec leaves whole can be cut over further axes, where sizes divide or not: a `DimCut` says
that a dim of a local value is cut over axes that the value is replicated over so far. The longest
leading part of these axes that divides the dim splits it evenly. The others together cut what is
left into parts of ``ceil(size / ranks)``, the last ones short or empty, and padded with zeros to
that length. Padding is added by `take` and `scatter` and dropped by `join`; `padded_shape`, `pad`
and `unpad` are for code that stores the parts.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from functron.core import compat, tree
from functron.core.errors import Problem, nearest, public, raise_problems, refuse
from functron.core.tables import Table
from functron.spmd.axes import Axis, axis_index, axis_size, lookup
from functron.spmd.collectives import all_gather
from functron.spmd.mesh import STANDARD_AXES, BoundMesh, Mesh
from functron.spmd.primitives import PsumScatter

SpecEntry = str | tuple[str, ...] | None


class P(tuple):
    """A partition spec: ``P("dp", None, ("fsdp", "tp"))`` names, per dim, the axes that split it.

    `None` leaves a dim whole; several axes split it major to minor, as in JAX; dims beyond the
    spec are whole. ``P()`` is a fully replicated value.

    >>> from functron.spmd import local_shape
    >>> local_shape((8, 6), P("dp", "tp"), ft.Mesh(dp=2, tp=3))
    (4, 2)
    """

    __slots__ = ()

    def __new__(cls, *entries: SpecEntry):
        checked = []
        for entry in entries:
            names = entry if isinstance(entry, (tuple, list)) else (entry,)
            if entry is not None and not all(isinstance(name, str) for name in names):
                raise TypeError(
                    f"P entry {entry!r}: wanted an axis name, a tuple of axis names, or None"
                )
            checked.append(tuple(entry) if isinstance(entry, list) else entry)
        return super().__new__(cls, checked)

    def __getnewargs__(self) -> tuple:
        return tuple(self)  # copying and pickling call P(*entries)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


def is_spec(value: object) -> bool:
    """Whether `value` is a leaf of a spec tree: a `P`, or the static spec None."""
    return value is None or isinstance(value, P)


def entry_axes(entry: SpecEntry) -> tuple[str, ...]:
    """The axes of one spec entry, major to minor."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


@functools.lru_cache(1024)
def spec_axes(spec: P) -> tuple[str, ...]:
    """Every axis that `spec` mentions, in dim order."""
    return tuple(name for entry in spec for name in entry_axes(entry))


def dim_axes(spec: P, num_dims: int) -> list[tuple[str, ...]]:
    """The axes that split each of `num_dims` dims."""
    return [entry_axes(spec[dim]) if dim < len(spec) else () for dim in range(num_dims)]


def num_shards(axes: Iterable[str], mesh: Mesh | BoundMesh) -> int:
    """Into how many shards these axes split a dim; axes that the mesh lacks count as 1."""
    return math.prod(mesh[name] for name in axes)


def problems(
    path: str, shape: Sequence[int] | None, spec: P, mesh: Mesh | BoundMesh
) -> Iterator[Problem]:
    """Problems with splitting a value of this global shape by `spec` over `mesh`.

    Reports unknown axes, an axis used twice, a spec longer than the rank, and dims that do not
    divide. A standard axis that the mesh lacks is fine: it has size 1. Without a shape (None) only
    the axes are checked.
    """
    from_mesh = f"over Mesh({mesh.mesh})"
    known = {*mesh.axis_names, *STANDARD_AXES}
    seen: set[str] = set()
    for name in spec_axes(spec):
        if name not in known:
            yield Problem(
                path,
                f"{spec}",
                f"axes of the mesh {from_mesh}",
                nearest(name, known, mesh.axis_names),
            )
        if name in seen:
            yield Problem(path, f"{spec}", f"axis {name!r} at most once", "split one dim by it")
        seen.add(name)
    if shape is None:
        return
    if len(spec) > len(shape):
        yield Problem(
            path,
            f"{spec} for shape {tuple(shape)}",
            f"at most {len(shape)} entries",
            "drop entries, or give the value more dims",
        )
    for dim, axes in enumerate(dim_axes(spec, len(shape))):
        shards = num_shards(axes, mesh)
        if shape[dim] % shards:
            yield Problem(
                path,
                f"dim {dim} of shape {tuple(shape)}, {shape[dim]}, split by {spec} {from_mesh}",
                f"a multiple of {shards}",
                f"pad dim {dim} to {-(-shape[dim] // shards) * shards}, "
                f"or take {'/'.join(axes)} off that dim",
            )


def validate(
    value: tree.Tree, specs: tree.Tree, mesh: Mesh | BoundMesh, *, what: str = "value"
) -> list[P | None]:
    """One spec per leaf of a tree of *global* values (or anything with a shape), checked.

    Raises:
        ValueError: `specs` is not a prefix tree, or some leaf cannot be split as its spec says;
            every offender is listed with its path.
    """
    flat = tree.broadcast_prefix(
        specs, value, is_leaf=is_spec, what=f"the specs of {what}", wanted="a P, or containers"
    )
    rows = zip(tree.paths(value), tree.leaves(value), flat, strict=True)
    found = [
        problem
        for path, leaf, spec in rows
        if spec is not None and hasattr(leaf, "shape")
        for problem in problems(f"{what}/{path}" if path else what, leaf.shape, spec, mesh)
    ]
    raise_problems(f"{what} cannot be sharded", found)
    return flat


def local_shape(shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh) -> tuple[int, ...]:
    """The shape of one rank's shard of a value of global shape `shape`.

    Raises:
        ValueError: the shape cannot be split this way.
    """
    raise_problems("cannot shard", problems("shape", shape, spec, mesh))
    axes = dim_axes(spec, len(shape))
    return tuple(size // num_shards(names, mesh) for size, names in zip(shape, axes, strict=True))


def global_shape(shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh) -> tuple[int, ...]:
    """The shape of the whole value one of whose shards has shape `shape`."""
    axes = dim_axes(spec, len(shape))
    return tuple(size * num_shards(names, mesh) for size, names in zip(shape, axes, strict=True))


def offsets(
    shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh, coordinate: Mapping[str, int]
) -> tuple[int, ...]:
    """Where the shard at `coordinate` starts, per dim, in a value of global shape `shape`."""
    rows = zip(local_shape(shape, spec, mesh), dim_axes(spec, len(shape)), strict=True)
    return tuple(mesh.mesh.rank_at(coordinate, axes) * size for size, axes in rows)


@functools.lru_cache(1024)
def windows(shape: tuple[int, ...], spec: P, mesh: Mesh) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Each rank's part of a value of global shape `shape`: where it starts and stops, per dim.

    Raises:
        ValueError: the shape cannot be split this way.
    """
    sizes = local_shape(shape, spec, mesh)
    places = (offsets(shape, spec, mesh, mesh.coordinate(rank)) for rank in range(mesh.size))
    return tuple(
        tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))
        for starts in places
    )


def shard(
    value: torch.Tensor, spec: P, mesh: Mesh | BoundMesh, coordinate: Mapping[str, int]
) -> torch.Tensor:
    """The shard of the global `value` at `coordinate`: a view where torch can give one."""
    starts = offsets(value.shape, spec, mesh, coordinate)
    for dim, (start, size) in enumerate(
        zip(starts, local_shape(value.shape, spec, mesh), strict=True)
    ):
        value = value.narrow(dim, start, size)
    return value


def unshard(shards: Sequence[torch.Tensor], spec: P, mesh: Mesh) -> torch.Tensor:
    """The global value from every rank's shard, in rank order; replicas are taken from the first.

    Raises:
        ValueError: there is not one shard per rank of `mesh`.
    """
    if len(shards) != mesh.size:
        raise ValueError(f"unshard: got {len(shards)} shards; wanted one per rank, {mesh.size}")
    whole = shards[0].new_empty(global_shape(shards[0].shape, spec, mesh))
    for rank in reversed(range(mesh.size)):
        shard(whole, spec, mesh, mesh.coordinate(rank)).copy_(shards[rank])
    return whole


class Rules(Mapping[str, SpecEntry]):
    """Which mesh axes split each logical axis: the whole parallel configuration in one mapping.

    ``Rules({"heads": "tp", "mlp": "tp", "vocab": "tp"})`` is Megatron's tensor parallelism.
    Logical axes that are not listed stay whole.

    >>> ft.Rules({"mlp": "tp"}).spec(("embed", "mlp"))
    P(None, 'tp')
    """

    def __init__(self, rules: Mapping[str, SpecEntry]):
        if not isinstance(rules, Mapping):
            wanted = 'mesh axes by logical axis, as in {"heads": "tp"}'
            refuse("Rules", "rules", repr(rules), wanted, error=TypeError)
        self._rules = dict(rules)

    def __getitem__(self, logical: str) -> SpecEntry:
        return self._rules[logical]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __repr__(self) -> str:
        return f"Rules({self._rules})"

    def _table(self) -> Table:
        rows = [[name, f"{rule}" if rule else "-"] for name, rule in self._rules.items()]
        return Table("Rules", [["logical axis", "mesh axes"], *rows], left=2)

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    @public
    def spec(self, axes: Sequence[str | None], *, path: str = "value") -> P:
        """The spec of a value whose dims have these logical axes.

        Raises:
            ValueError: two of the dims are split by the same mesh axis.
        """
        spec = P(*(self._rules.get(name) if name is not None else None for name in axes))
        names = spec_axes(spec)
        twice = sorted({name for name in names if names.count(name) > 1})
        raise_problems(
            "the rules give no usable spec",
            [
                Problem(
                    path,
                    f"logical axes {tuple(axes)}, which become {spec}",
                    f"mesh axis {name!r} on one dim at most",
                    "rename one of the logical axes and give it another rule",
                )
                for name in twice
            ],
        )
        return spec

    @public
    def specs(self, values: tree.Tree) -> tree.Tree:
        """The specs of a tree of values by their paths, of rules from patterns to specs.

        ``Rules({r"(q|k|v)_proj": P("tp"), r"o_proj": P(None, "tp")}).specs(params)``. A value has
        the spec of the first rule whose regular expression is found in its path (names joined by
        slashes), and is replicated where none is. A spec may be longer than the rank of a value
        that it should split less, such as a bias: entries beyond it are left out.

        Raises:
            TypeError: a rule is no spec.
            ValueError: a rule is no regular expression, or is found in no path.
        """
        kinds = [
            Problem(f"rule {name!r}", repr(rule), "a P", "write P(...)")
            for name, rule in self._rules.items()
            if not isinstance(rule, P)
        ]
        raise_problems("rules by path", kinds, TypeError)
        paths = tree.paths(values)
        found, used = [], set()
        for path, leaf in zip(paths, tree.leaves(values), strict=True):
            name = next((name for name in self._rules if re.search(name, path)), None)
            used.add(name)
            spec: Any = P() if name is None else self._rules[name]
            found.append(P(*spec[: len(leaf.shape)]) if hasattr(leaf, "shape") else P())
        raise_problems(
            "rules by path",
            [
                Problem(f"rule {name!r}", "no path that it is found in", "one of the paths")
                for name in self._rules
                if name not in used and not any(re.search(name, path) for path in paths)
            ],
        )
        return tree.unflatten(tree.flatten(values)[1], found)


class DimCut(NamedTuple):
    """A dim of a local value and the axes that split it further.

    Attributes:
        dim: counted from the last, -1: so that it also is that of a slice along the first.
        axes: major to minor.
    """

    dim: int
    axes: tuple[str, ...]


Cuts = tuple[DimCut, ...]


@functools.lru_cache(1024)
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
        DimCut(dim - num_dims, new[len(old) :])
        for dim, (old, new) in enumerate(zip(before, after, strict=True))
        if len(new) > len(old)
    )


def as_entry(axes: Sequence[str]) -> SpecEntry:
    """The entry of a spec for a dim that these axes split, as one would write it."""
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def without_axes(specs: tree.Tree, axes: Sequence[str]) -> tree.Tree:
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
        x = _pad_dim(x, dim, count)
        size = x.shape[dim] // count
        if isinstance(index, int):
            x = x.narrow(dim, index * size, size)
        else:
            rows = x.unflatten(dim, (count, size)).movedim(dim - 1, 0)
            x = rows.index_select(0, compat.constant(index, x.device).reshape(1)).squeeze(0)
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
        rows = _pad_dim(x, dim, count).unflatten(dim, (count, -1))
        x = rows.movedim(dim - 1, 0).unflatten(0, sizes)
        for axis in axes:
            x = PsumScatter.call(x, axis)
    return x


def _steps(shape: Sequence[int], cuts: Cuts) -> list[DimCut]:
    """Cuts one after another: of a dim over the axes that divide it, then over the others."""
    steps = []
    for dim, axes in cuts:
        bound = [name for name in axes if axis_size(name) > 1]
        count = _num_even(shape[dim], [axis_size(name) for name in bound])
        groups = (bound[:count], bound[count:])
        steps += [DimCut(dim, tuple(group)) for group in groups if group]
    return steps


def _num_even(size: int, counts: Sequence[int]) -> int:
    """How many of these axes, from the first on, split a dim evenly."""
    for position, count in enumerate(counts):
        if size % count:
            return position
        size //= count
    return len(counts)


def _pad_dim(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    missing = -x.shape[dim] % count
    return F.pad(x, [0, 0] * (-dim - 1) + [0, missing]) if missing else x


def fill(x: torch.Tensor, dim: int, axes: Sequence[str]) -> torch.Tensor:
    """x, which ranks hold whole, with the padding that lets these axes split a dim of it evenly.

    For exchanges that send each rank its part of a dim: `take` cuts the same parts.
    """
    return _pad_parts(x, dim, *_split_counts(x.shape[dim], map(axis_size, axes)))


def trim(x: torch.Tensor, dim: int, axes: Sequence[str], size: int) -> torch.Tensor:
    """The value of this size along a dim, from all parts of it one after another; undoes `fill`."""
    return _trim_parts(x, dim, size, *_split_counts(size, map(axis_size, axes)))


def _split_counts(size: int, counts: Iterable[int]) -> tuple[int, int]:
    """The number of ranks that split a dim evenly, and that of those that cut the rest."""
    counts = [count for count in counts if count > 1]
    even = _num_even(size, counts)
    return math.prod(counts[:even]), math.prod(counts[even:])


def _pad_parts(x: torch.Tensor, dim: int, even: int, rest: int) -> torch.Tensor:
    if x.shape[dim] % (even * rest) == 0:
        return x
    dim = dim % x.dim() - x.dim()
    return _pad_dim(x.unflatten(dim, (even, -1)), dim, rest).flatten(dim - 1, dim)


def _trim_parts(x: torch.Tensor, dim: int, size: int, even: int, rest: int) -> torch.Tensor:
    if x.shape[dim] == size:
        return x
    dim = dim % x.dim() - x.dim()
    return x.unflatten(dim, (even, -1)).narrow(dim, 0, size // even).flatten(dim - 1, dim)


def padded_shape(shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh) -> tuple[int, ...]:
    """The global shape of all parts together of a value of this global shape: that and padding."""
    blocks = _count_blocks(shape, spec, mesh)
    return tuple(
        even * -(-size // (even * rest)) * rest
        for size, (even, rest) in zip(shape, blocks, strict=True)
    )


def pad(value: torch.Tensor, spec: P, mesh: Mesh | BoundMesh) -> torch.Tensor:
    """The global value with the padding of `padded_shape`; the inverse of `unpad`."""
    for dim, counts in enumerate(_count_blocks(value.shape, spec, mesh)):
        value = _pad_parts(value, dim, *counts)
    return value


def unpad(
    value: torch.Tensor, shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh
) -> torch.Tensor:
    """The global value of this shape, from one with the padding of `padded_shape`."""
    for dim, counts in enumerate(_count_blocks(shape, spec, mesh)):
        value = _trim_parts(value, dim, shape[dim], *counts)
    return value


def _count_blocks(shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh) -> list[tuple[int, int]]:
    """Per dim the number of ranks that split it evenly, and that of those that cut the rest."""
    rows = zip(shape, dim_axes(spec, len(shape)), strict=True)
    return [_split_counts(size, [mesh[name] for name in axes]) for size, axes in rows]
