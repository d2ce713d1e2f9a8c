"""Partition specs: which mesh axes split which dims, and the arithmetic that follows from it.

**Uneven splits.** A spec refuses sizes that its axes do not divide, unless it says `Uneven` and the
size. Then each axis in turn, major to minor, cuts the parts of those before it into parts of
``ceil(size / ranks)``, of which the last ones are short or empty, and padded with zeros to that
length. A global value never has padding: it is added where parts are made (`shard`, shard_map's
arguments, `functron.init_params`) and dropped where they are put together.

What a spec leaves whole can be cut over further axes, where sizes divide or not: a `DimCut` says
that a dim of a local value is cut over axes that the value is replicated over so far, into parts
like those of an uneven split. Padding is added by `take` and `scatter` and dropped by `join`;
`padded_shape`, `pad` and `unpad` are for code that stores the parts.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch.nn import functional as F

from functron.core import compat, tree
from functron.core.errors import Problem, nearest, public, raise_problems, refuse
from functron.core.tables import Table
from functron.spmd.axes import Axis, AxisNames, axis_index, axis_size, lookup
from functron.spmd.collectives import all_gather
from functron.spmd.mesh import STANDARD_AXES, BoundMesh, Mesh
from functron.spmd.primitives import PsumScatter

SpecEntry = str | tuple[str, ...] | None


class Uneven(tuple):
    """An entry of a `P`: axes that cut a dim of this size, which they need not divide.

    Every rank has a part of ``ceil(size / ranks)`` entries; those of the last ranks are padded with
    zeros. ``lax.real_entries`` tells a rank which of its entries are real. The global value has
    `size` entries, and so has what checkpoints store. A tuple of the axes' names.

    >>> from functron.spmd import local_shape
    >>> spec = P(ft.Uneven("fsdp", 124))
    >>> local_shape((124,), spec, ft.Mesh(fsdp=8))
    (16,)
    >>> ft.Rules({"embed": ft.Uneven("fsdp")}).spec(("embed",), shape=(124,))
    P(Uneven('fsdp', 124))

    Args:
        axes: a name, or several, major to minor.
        size: of the whole dim. None: for rules, which take it from each parameter's shape.

    Raises:
        TypeError: an axis is no name.
        ValueError: no axes, or a size below 1.
    """

    size: int | None

    def __new__(cls, axes: str | Sequence[str], size: int | None = None):
        names = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
        if not all(isinstance(name, str) for name in names):
            fix = 'Uneven("fsdp", 124)'
            refuse("Uneven", "axes", repr(axes), "names of axes", fix, TypeError)
        if not names:
            refuse("Uneven", "axes", repr(axes), "at least one", "write None for a whole dim")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            refuse("Uneven", "size", repr(size), "the number of entries of the whole dim")
        made = super().__new__(cls, names)
        made.size = size
        return made

    def __getnewargs__(self) -> tuple:
        return tuple(self), self.size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Uneven):
            return False
        return self.size == other.size and tuple(self) == tuple(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((Uneven, tuple(self), self.size))

    def __repr__(self) -> str:
        axes = repr(self[0] if len(self) == 1 else tuple(self))
        return f"Uneven({axes})" if self.size is None else f"Uneven({axes}, {self.size})"

    __str__ = __repr__


class P(tuple):
    """A partition spec: ``P("dp", None, ("fsdp", "tp"))`` names, per dim, the axes that split it.

    `None` leaves a dim whole; several axes split it major to minor, as in JAX; dims beyond the
    spec are whole. ``P()`` is a fully replicated value. Axes must divide the dim that they split,
    unless the entry is an `Uneven`.

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

    def __rmatmul__(self, hint: Any) -> Any:
        """The annotation ``Float[Tensor, "batch embed"] @ P("dp")``; see `functron.debug.typed`."""
        return Annotated[hint, self]


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


def dim_sizes(spec: P, num_dims: int) -> list[int | None]:
    """The size of each of `num_dims` dims that is split as `Uneven`; None for others."""
    entries = [spec[dim] if dim < len(spec) else None for dim in range(num_dims)]
    return [entry.size if isinstance(entry, Uneven) else None for entry in entries]


def is_uneven(spec: P | None) -> bool:
    """Whether parts of a value with this spec may be padded."""
    return spec is not None and any(isinstance(entry, Uneven) for entry in spec)


def num_shards(axes: Iterable[str], mesh: Mesh | BoundMesh) -> int:
    """Into how many shards these axes split a dim; axes that the mesh lacks count as 1."""
    return math.prod(mesh[name] for name in axes)


def problems(
    path: str, shape: Sequence[int] | None, spec: P, mesh: Mesh | BoundMesh
) -> Iterator[Problem]:
    """Problems with splitting a value of this global shape by `spec` over `mesh`.

    Reports unknown axes, an axis used twice, a spec longer than the rank, and dims that do not
    divide, or have another size than an `Uneven` entry says. A standard axis that the mesh lacks is
    fine: it has size 1. Without a shape (None) only the axes are checked.
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
        sizeless = [entry for entry in spec if isinstance(entry, Uneven) and entry.size is None]
        for entry in sizeless:
            fix = f"write Uneven({repr(entry)[7:-1]}, 124), say"
            yield Problem(path, f"{spec}", "the size of the whole dim in each Uneven", fix)
        return
    if len(spec) > len(shape):
        yield Problem(
            path,
            f"{spec} for shape {tuple(shape)}",
            f"at most {len(shape)} entries",
            "drop entries, or give the value more dims",
        )
    for dim, axes in enumerate(dim_axes(spec, len(shape))):
        shards, size, entry = num_shards(axes, mesh), shape[dim], (*spec, None)[min(dim, len(spec))]
        got = f"dim {dim} of shape {tuple(shape)}, {size}, split by {spec} {from_mesh}"
        instead = Uneven(axes, max(size, 1)) if axes else None
        if isinstance(entry, Uneven):
            if entry.size != size:
                wanted = "its size in the spec" if entry.size is None else f"the size {entry.size}"
                yield Problem(path, got, wanted, f"write {instead}")
        elif size % shards:
            fix = f"pad dim {dim} to {-(-size // shards) * shards}, take {'/'.join(axes)} off that "
            fix += f"dim, or write {instead}, which pads parts with zeros, for a function that "
            fix += "masks these (lax.real_entries)"
            yield Problem(path, got, f"a multiple of {shards}", fix)


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
    """The shape of one rank's shard of a value of global shape `shape`, padding included.

    Raises:
        ValueError: the shape cannot be split this way.
    """
    raise_problems("cannot shard", problems("shape", shape, spec, mesh))
    return padded_part_shape(shape, spec, mesh)


def padded_part_shape(
    shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh | Mapping[str, int]
) -> tuple[int, ...]:
    """`local_shape` of a value that every dim may be padded of, whether the spec says so or not."""
    axes = dim_axes(spec, len(shape))
    return tuple(
        part_length(size, [mesh[name] for name in names])
        for size, names in zip(shape, axes, strict=True)
    )


def part_length(size: int, counts: Iterable[int]) -> int:
    """The length, with padding, of a part of a dim that axes of so many ranks cut in turn."""
    for count in counts:
        size = -(-size // count)
    return size


def part_span(size: int, counts: Sequence[int], indices: Sequence[int]) -> tuple[int, int, int]:
    """Where a rank's part begins and ends in a dim, and its length with padding.

    Args:
        counts, indices: how many ranks cut the dim, and which of them this one is, for each axis.
    """
    begin, end, length = 0, size, size
    for count, index in zip(counts, indices, strict=True):
        length = -(-length // count)
        begin = min(begin + index * length, end)
        end = min(begin + length, end)
    return begin, end, length


def global_shape(shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh) -> tuple[int, ...]:
    """The shape of the whole value one of whose shards has shape `shape`."""
    rows = zip(shape, dim_axes(spec, len(shape)), dim_sizes(spec, len(shape)), strict=True)
    return tuple(
        size * num_shards(names, mesh) if real is None else real for size, names, real in rows
    )


def count_padding(shape: Sequence[int], spec: P | None, mesh: Mesh | BoundMesh) -> int:
    """How many entries of padding all parts of a value have, one of which has this shape."""
    if spec is None or not is_uneven(spec):
        return 0
    parts = num_shards(spec_axes(spec), mesh)
    return math.prod(shape) * parts - math.prod(global_shape(shape, spec, mesh))


def part_problems(
    path: str, shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh
) -> Iterator[Problem]:
    """`problems` of the value one of whose shards has this shape, and of the shard's own shape."""
    whole = global_shape(shape, spec, mesh)
    yield from problems(path, whole, spec, mesh)
    wanted = padded_part_shape(whole, spec, mesh)
    if tuple(shape) != wanted and None not in whole:
        got = f"a part of shape {tuple(shape)}, split by {spec} over Mesh({mesh.mesh})"
        yield Problem(path, got, f"{wanted}", "cut global values with functron.shard")


def spans(
    shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh, coordinate: Mapping[str, int]
) -> list[tuple[int, int, int]]:
    """Where the shard at `coordinate` begins and ends, and its length with padding, per dim.

    Raises:
        ValueError: the shape cannot be split this way.
    """
    raise_problems("cannot shard", problems("shape", shape, spec, mesh))
    return [
        part_span(size, [mesh[name] for name in axes], [coordinate.get(name, 0) for name in axes])
        for size, axes in zip(shape, dim_axes(spec, len(shape)), strict=True)
    ]


def offsets(
    shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh, coordinate: Mapping[str, int]
) -> tuple[int, ...]:
    """Where the shard at `coordinate` starts, per dim, in a value of global shape `shape`."""
    return tuple(begin for begin, _, _ in spans(shape, spec, mesh, coordinate))


@functools.lru_cache(1024)
def windows(shape: tuple[int, ...], spec: P, mesh: Mesh) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Each rank's part of a value of global shape `shape`: where it starts and stops, per dim.

    Raises:
        ValueError: the shape cannot be split this way.
    """
    places = (spans(shape, spec, mesh, mesh.coordinate(rank)) for rank in range(mesh.size))
    return tuple(tuple((begin, end) for begin, end, _ in place) for place in places)


def shard(
    value: torch.Tensor, spec: P, mesh: Mesh | BoundMesh, coordinate: Mapping[str, int]
) -> torch.Tensor:
    """The shard of the global `value` at `coordinate`: a view where torch can give one."""
    missing = []
    for dim, (begin, end, length) in enumerate(spans(value.shape, spec, mesh, coordinate)):
        value = value.narrow(dim, begin, end - begin)
        missing = [0, length - (end - begin), *missing]
    return F.pad(value, missing) if any(missing) else value


def unshard(shards: Sequence[torch.Tensor], spec: P, mesh: Mesh) -> torch.Tensor:
    """The global value from every rank's shard, in rank order; replicas are taken from the first.

    Raises:
        ValueError: there is not one shard per rank of `mesh`.
    """
    if len(shards) != mesh.size:
        raise ValueError(f"unshard: got {len(shards)} shards; wanted one per rank, {mesh.size}")
    whole = shards[0].new_empty(global_shape(shards[0].shape, spec, mesh))
    for rank in reversed(range(mesh.size)):
        at, part = whole, shards[rank]
        for dim, (begin, end, _) in enumerate(
            spans(whole.shape, spec, mesh, mesh.coordinate(rank))
        ):
            at, part = at.narrow(dim, begin, end - begin), part.narrow(dim, 0, end - begin)
        at.copy_(part)
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
    def spec(
        self,
        axes: Sequence[str | None],
        *,
        path: str = "value",
        shape: Sequence[int] | None = None,
    ) -> P:
        """The spec of a value whose dims have these logical axes.

        Args:
            shape: of the value, the sizes of its `Uneven` entries; None: they stay without.

        Raises:
            ValueError: two of the dims are split by the same mesh axis.
        """
        entries = [self._rules.get(name) if name is not None else None for name in axes]
        for dim, entry in enumerate(entries):
            if isinstance(entry, Uneven) and shape is not None:
                entries[dim] = Uneven(entry, shape[dim])
        spec = P(*entries)
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
            shape = getattr(leaf, "shape", ())
            rows = zip(spec, shape, strict=False)
            found.append(P(*(Uneven(e, n) if isinstance(e, Uneven) else e for e, n in rows)))
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


def with_axes(entry: SpecEntry, axes: Sequence[str]) -> SpecEntry:
    """The entry with these axes in place of its own, and `Uneven` as before."""
    return Uneven(axes, entry.size) if isinstance(entry, Uneven) and axes else as_entry(axes)


def without_axes(specs: tree.Tree, axes: Sequence[str]) -> tree.Tree:
    """The specs without these axes: of what is gathered over them."""

    def one(spec: P | None) -> P | None:
        if spec is None:
            return None
        return P(*(with_axes(e, [n for n in entry_axes(e) if n not in axes]) for e in spec))

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


def join_parts(x: torch.Tensor, cuts: Cuts, spec: P) -> torch.Tensor:
    """`join` of a part with this spec, whose `Uneven` dims say how much is padding."""
    shape, num_dims = list(x.shape), x.dim()
    axes, sizes = dim_axes(spec, num_dims), dim_sizes(spec, num_dims)
    for dim, cut in cuts:
        shape[dim] *= axis_size(cut)
        if (size := sizes[dim]) is not None:
            kept = [axis_size(name) for name in axes[dim] if name not in cut]
            shape[dim] = part_length(size, kept)
    return join(x, cuts, shape)


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
    """Cuts one after another: of a dim over the axes that divide it, then over each other one."""
    steps = []
    for dim, axes in cuts:
        bound = [name for name in axes if axis_size(name) > 1]
        count = _num_even(shape[dim], [axis_size(name) for name in bound])
        groups = (bound[:count], *([name] for name in bound[count:]))
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
    return pad_parts(x, dim, [axis_size(name) for name in axes])


def trim(x: torch.Tensor, dim: int, axes: Sequence[str], size: int) -> torch.Tensor:
    """The value of this size along a dim, from all parts of it one after another; undoes `fill`."""
    return trim_parts(x, dim, size, [axis_size(name) for name in axes])


def pad_parts(x: torch.Tensor, dim: int, counts: Sequence[int]) -> torch.Tensor:
    """x with the padding that lets axes of so many ranks split a dim of it evenly, in turn."""
    if x.shape[dim] % math.prod(counts) == 0:
        return x
    dim, (count, *others) = dim % x.dim() - x.dim(), counts
    x = _pad_dim(x, dim, count)
    return pad_parts(x.unflatten(dim, (count, -1)), dim, others).flatten(dim - 1, dim)


def trim_parts(x: torch.Tensor, dim: int, size: int, counts: Sequence[int]) -> torch.Tensor:
    """x without that padding, of this size along the dim."""
    if x.shape[dim] == size:
        return x
    dim, (count, *others) = dim % x.dim() - x.dim(), counts
    x = trim_parts(x.unflatten(dim, (count, -1)), dim, -(-size // count), others)
    return x.flatten(dim - 1, dim).narrow(dim, 0, size)


def pad_uneven(x: torch.Tensor, spec: P, counts: Mapping[str, int]) -> torch.Tensor:
    """The global value with the padding of all its parts along `Uneven` dims."""
    return _change(pad_parts, x, spec, counts)


def trim_uneven(x: torch.Tensor, spec: P, counts: Mapping[str, int]) -> torch.Tensor:
    """The global value from all parts one after another along `Uneven` dims."""

    def trimmed(x: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
        return trim_parts(x, dim, dim_sizes(spec, x.dim())[dim] or 0, sizes)

    return _change(trimmed, x, spec, counts)


def _change(change: Callable, x: torch.Tensor, spec: P, counts: Mapping[str, int]) -> torch.Tensor:
    if not is_uneven(spec):
        return x
    axes = dim_axes(spec, x.dim())
    for dim, size in enumerate(dim_sizes(spec, x.dim())):
        if size is not None:
            x = change(x, dim, [counts.get(name, 1) for name in axes[dim]])
    return x


def padded_shape(shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh) -> tuple[int, ...]:
    """The global shape of all parts together of a value of this global shape: that and padding.

    Dims that are `Uneven` have none in global values.
    """
    return tuple(
        size if real is not None else part_length(size, counts) * math.prod(counts)
        for size, counts, real in _rows(shape, spec, mesh)
    )


def pad(value: torch.Tensor, spec: P, mesh: Mesh | BoundMesh) -> torch.Tensor:
    """The global value with the padding of `padded_shape`; the inverse of `unpad`."""
    for dim, (_, counts, real) in enumerate(_rows(value.shape, spec, mesh)):
        value = pad_parts(value, dim, counts) if real is None else value
    return value


def unpad(
    value: torch.Tensor, shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh
) -> torch.Tensor:
    """The global value of this shape, from one with the padding of `padded_shape`."""
    for dim, (size, counts, _) in enumerate(_rows(shape, spec, mesh)):
        value = trim_parts(value, dim, size, counts)
    return value


def _rows(shape: Sequence[int], spec: P, mesh: Mesh | BoundMesh) -> list[tuple]:
    """Per dim its size, how many ranks cut it in turn, and the size of an `Uneven` entry."""
    axes, sizes = dim_axes(spec, len(shape)), dim_sizes(spec, len(shape))
    counts = [[mesh[name] for name in names] for names in axes]
    return list(zip(shape, counts, sizes, strict=True))


def real_mask(
    shape: Sequence[int], spec: P, device: torch.device | None = None
) -> torch.Tensor | None:
    """True for the entries of this rank's shard that are no padding; None: all of them.

    Args:
        shape: of the shard.
        spec: of the value.

    Returns:
        A mask that broadcasts against the shard.
    """
    found = None
    rows = zip(dim_axes(spec, len(shape)), dim_sizes(spec, len(shape)), strict=True)
    for dim, (axes, size) in enumerate(rows):
        if size is None or size == shape[dim] * axis_size(axes):
            continue
        mask = real_entries(size, axes, device=device)
        mask = mask.reshape([-1 if d == dim else 1 for d in range(len(shape))])
        found = mask if found is None else found & mask
    return found


@public
def real_entries(
    size: int, axis_name: AxisNames, *, device: torch.device | None = None
) -> torch.Tensor:
    """Which entries of this rank's part of an `Uneven` dim are real, and no padding. Varying.

    >>> f = lambda x: lax.real_entries(3, "tp")
    >>> ft.shard_map(f, ft.Mesh(tp=2), P(), P("tp"))(torch.zeros(()))
    tensor([ True,  True,  True, False])

    Args:
        size: of the whole dim.
        axis_name: the axes that cut it, major to minor.

    Returns:
        ``bool[ceil(size / ranks)]``.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    ones = torch.ones(size, dtype=torch.bool, device=device)
    return take(ones, (DimCut(-1, axes),))
