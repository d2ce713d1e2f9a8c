"""Partition specs: which mesh axes split which dims, and the arithmetic that follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from functron.core import tree
from functron.core.errors import Problem, nearest, public, raise_problems, refuse
from functron.spmd.mesh import STANDARD_AXES, BoundMesh, Mesh

Entry = str | tuple[str, ...] | None


class P(tuple):
    """A partition spec: ``P("dp", None, ("fsdp", "tp"))`` names, per dim, the axes that split it.

    `None` leaves a dim whole; several axes split it major to minor, as in JAX; dims beyond the
    spec are whole. ``P()`` is a fully replicated value.
    """

    __slots__ = ()

    def __new__(cls, *entries: Entry):
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


def entry_axes(entry: Entry) -> tuple[str, ...]:
    """The axes of one spec entry, major to minor."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


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
    from_mesh = f"over Mesh({mesh.mesh if isinstance(mesh, BoundMesh) else mesh})"
    known = {*mesh.axis_names, *STANDARD_AXES}
    seen: set[str] = set()
    for name in spec_axes(spec):
        if name not in known:
            yield Problem(path, f"{spec}", f"axes of the mesh {from_mesh}", nearest(name, known))
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
    starts = []
    local = local_shape(shape, spec, mesh)
    for size, axes in zip(local, dim_axes(spec, len(shape)), strict=True):
        index = 0
        for name in axes:
            index = index * mesh[name] + coordinate.get(name, 0)
        starts.append(index * size)
    return tuple(starts)


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


class Rules(Mapping[str, Entry]):
    """Which mesh axes split each logical axis: the whole parallel configuration in one mapping.

    ``Rules({"heads": "tp", "mlp": "tp", "vocab": "tp"})`` is Megatron's tensor parallelism.
    Logical axes that are not listed stay whole.
    """

    def __init__(self, rules: Mapping[str, Entry]):
        if not isinstance(rules, Mapping):
            wanted = 'mesh axes by logical axis, as in {"heads": "tp"}'
            refuse("Rules", "rules", repr(rules), wanted, error=TypeError)
        self._rules = dict(rules)

    def __getitem__(self, logical: str) -> Entry:
        return self._rules[logical]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __repr__(self) -> str:
        return f"Rules({self._rules})"

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
