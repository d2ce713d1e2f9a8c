"""The distributed binding: a per-rank program in this process, its axes bound to process groups."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from functron.core import compat, tree
from functron.core.closure import hoist
from functron.core.errors import Problem, public, raise_problems
from functron.spmd.axes import BoundAxis, TracedAxis, bind, raise_lost, user_line
from functron.spmd.collectives import all_gather
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.primitives import InputReplicated, OutputReplicated
from functron.spmd.spec import P, dim_axes, is_spec, spec_axes, validate
from functron.spmd.spec import shard as shard_one


def bound_axes(mesh: BoundMesh) -> tuple[list[BoundAxis], list[str]]:
    """The axes of `mesh` that communicate, and the names of those of size 1."""
    axes = [
        BoundAxis(name, size, mesh.coordinate[name], mesh.groups[name])
        for name, size in mesh.shape.items()
        if size > 1
    ]
    return axes, [name for name, size in mesh.shape.items() if size == 1]


def run_rank(
    program: Callable[[Callable, list], tuple[list, list[P | None]]],
    fn: Callable,
    axes: Sequence[BoundAxis | TracedAxis],
    absent: Sequence[str],
    values: Sequence[Any],
    specs: Sequence[P | None],
    *,
    check: bool = False,
) -> list:
    """`program(fn, values)` on one rank's shards, over `axes` and those of size 1, `absent`.

    The cotangent of an input is psummed over the axes that its spec does not mention (that of a
    tensor `fn` closes over, over all of them), and the cotangent of an output is divided by their
    sizes: JAX's convention at the boundary.
    """
    with bind(axes, absent=absent, check=check):
        local = [
            value if spec is None else _replicate(value, spec_axes(spec), axes)
            for value, spec in zip(values, specs, strict=True)
        ]
        hidden, close = hoist(fn)
        closed = close([_replicate(tensor, (), axes) for tensor in hidden])
        outputs, out_specs = program(closed, local)
        return [
            value if spec is None else _count_once(value, spec_axes(spec), axes)
            for value, spec in zip(outputs, out_specs, strict=True)
        ]


def check_shapes(name: str, mesh: BoundMesh, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Check that all ranks of `mesh` call a program with shards of the same shapes and dtypes.

    Collectives: an all-reduce of 16 bytes per axis, and an all-gather of the shapes where they
    differ. Without it gloo would end a process in the first collective that they enter.

    Raises:
        ValueError: (on every rank) they do not; with the arguments that differ, and where.
    """
    rows = zip(paths, leaves, strict=True)
    mine = {
        path: f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        for path, leaf in rows
        if isinstance(leaf, torch.Tensor)
    }
    groups = {
        axis: compat.group(mesh.groups[axis]) for axis, size in mesh.shape.items() if size > 1
    }
    number = zlib.crc32(repr(mine).encode())
    with compat.no_transforms(), compat.no_dispatch_modes():
        ends = torch.tensor([number, -number], device=mesh.device_type)
        for axis, group in groups.items():
            try:
                dist.all_reduce(ends, dist.ReduceOp.MAX, group)
            except RuntimeError as error:
                raise_lost(error, f"the call of {name} over {axis!r} at {user_line()}")
                raise
        if ends[0] == -ends[1]:
            return
        everywhere: Any = [(mesh.coordinate, mine)]
        for group in groups.values():
            parts: list = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, everywhere, group)
            everywhere = [row for part in parts for row in part]
    found = []
    for path in dict.fromkeys(path for _, shapes in everywhere for path in shapes):
        by_shape: dict[str, str] = {}
        for at, shapes in everywhere:
            where = ",".join(f"{axis}={index}" for axis, index in at.items())
            by_shape.setdefault(shapes.get(path, "nothing"), where)
        if len(by_shape) > 1:
            got = ", ".join(f"{shape} on rank {where}" for shape, where in by_shape.items())
            fix = "cut global values with functron.shard, which gives every rank the same shapes"
            found.append(Problem(f"argument {path}", got, "one shape on all ranks", fix))
    raise_problems(f"{name} at {user_line()}: ranks disagree about its arguments", found)


def _differentiated(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.requires_grad or compat.is_wrapped(value))


def _replicate(value: Any, mentioned: Sequence[str], axes: Sequence[BoundAxis | TracedAxis]) -> Any:
    if _differentiated(value) and value.is_floating_point():
        for axis in axes:
            if axis.name not in mentioned:
                value = InputReplicated.call(value, axis)
    return value


def _count_once(
    value: Any, mentioned: Sequence[str], axes: Sequence[BoundAxis | TracedAxis]
) -> Any:
    if _differentiated(value) and value.is_floating_point():
        for axis in axes:
            if axis.name not in mentioned:
                value = OutputReplicated.call(value, axis)
    return value


@public
def shard(value: tree.Tree, specs: tree.Tree, mesh: Mesh | BoundMesh) -> tree.Tree:
    """This process's shards of a tree of global values.

    On a bound mesh, copies of this rank's shards; on a mesh that is simulated, the global values
    themselves.

    Raises:
        ValueError: a leaf cannot be split as its spec says; all offenders are listed.
    """
    flat = validate(value, specs, mesh)
    if not isinstance(mesh, BoundMesh):
        return value
    leaves, structure = tree.flatten(value)
    return tree.unflatten(
        structure,
        [
            leaf if spec is None else shard_one(leaf, spec, mesh, mesh.coordinate).clone()
            for leaf, spec in zip(leaves, flat, strict=True)
        ],
    )


@public
def gather(value: tree.Tree, specs: tree.Tree, mesh: Mesh | BoundMesh) -> tree.Tree:
    """The tree of global values, on every rank, from every rank's shards.

    One all-gather per sharded leaf and axis; on a mesh that is simulated, the values themselves.
    """
    if not isinstance(mesh, BoundMesh):
        return value
    leaves, structure = tree.flatten(value)
    flat = tree.broadcast_prefix(specs, value, is_leaf=is_spec, what="specs")
    axes, absent = bound_axes(mesh)
    out = []
    with bind(axes, absent=absent), torch.no_grad():
        for leaf, spec in zip(leaves, flat, strict=True):
            if isinstance(leaf, torch.Tensor) and spec is not None:
                for dim, names in enumerate(dim_axes(spec, leaf.dim())):
                    leaf = all_gather(leaf, names, axis=dim, tiled=True) if names else leaf
            out.append(leaf)
    return tree.unflatten(structure, out)
