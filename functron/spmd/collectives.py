"""Collectives over named mesh axes, with JAX's names, arguments and tiling rules.

Used as ``from functron import lax``. Each works over one axis name or a tuple of them (major to
minor), on pytrees of tensors and numbers, and is the identity over axes of size 1 or absent from
the mesh, so single-device code is the distributed code. On a bound mesh each is the collective of
torch.distributed that its docstring names, its bytes being those of the local operand; in
simulation it is arithmetic over vmap's batch dims.

Every program is differentiated as the linear map it is on the product of all ranks, the convention
of JAX's ``shard_map(check_vma=False)``: `psum` transposes to `psum`, `all_gather` to `psum_scatter`
and back, `ppermute` and `all_to_all` to their inverses.

`psum_stages` sums over the ranks that run the stages of a pipeline.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from functron.core import compat, tree
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.spmd import primitives
from functron.spmd.axes import (
    Axis,
    AxisNames,
    BoundAxis,
    SimulatedAxis,
    TracedAxis,
    axis_index,
    axis_size,
    lookup,
    scope,
    user_line,
)
from functron.spmd.ragged import ragged_all_to_all

F = TypeVar("F", bound=Callable)

__all__ = [
    "all_gather",
    "all_to_all",
    "assume_replicated",
    "axis_index",
    "axis_size",
    "global_index",
    "pbroadcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "ragged_all_to_all",
    "stop_gradient",
]


def _collective(fn: F) -> F:
    """`fn` as users call it, which tells what to do without JAX's `axis_index_groups`."""

    @functools.wraps(fn)
    def call(*args: Any, axis_index_groups: object = None, **kwargs: Any) -> Any:
        if axis_index_groups is not None:
            raise ValueError(
                "axis_index_groups is not supported: give the mesh one axis per level of grouping, "
                "such as Mesh(node=2, local=4) for groups of 4, and reduce over the axis you mean"
            )
        return fn(*args, **kwargs)

    made: Any = call
    return public(made)


def _flag_redundant(x: torch.Tensor, axes: Sequence[Axis], name: str) -> None:
    if not scope().check:
        return
    for axis in axes:
        if isinstance(axis, SimulatedAxis) and not axis.varies(x):
            words = primitives.describe_redundant(name, axis.name, axis.size, x.shape)
            refuse(f"redundant reduction at {user_line()}", f"{name} over {axis.name!r}", *words)


def _dim(dim: int, num_dims: int, name: str) -> int:
    if not -num_dims <= dim < num_dims:
        raise ValueError(f"{name}: got dim {dim}; wanted -{num_dims} to {num_dims - 1}")
    return dim % num_dims


@_collective
def psum(x: tree.Tree, axis_name: AxisNames, *, equal_cotangents: bool = False) -> tree.Tree:
    """y = sum of x over the ranks of `axis_name`; equal on all of them.

    Varying -> replicated. Bool is summed as int32; a Python number is multiplied by the axis size.
    One all-reduce per axis, of x's bytes; backward the same again on the cotangent.

    ``psum(rank, "tp")`` is 6 on every rank of ``Mesh(tp=4)``, where ranks hold 0, 1, 2, 3.

    Args:
        x: tensors and numbers.
        axis_name: the axis, or several.
        equal_cotangents: the cotangents of y are the same on all ranks, as where all ranks compute
            one loss of it alike. Backward then multiplies them by the axis size and sends nothing.
            Simulation and `Program.check` find where it is not so; processes do not. A derivative
            of the gradient brings cotangents that differ: do not say it in what is differentiated
            twice.

    Raises:
        ValueError: x is provably equal on all ranks already (under shard_map's check), or the axis
            is unbound; in backward, in simulation, cotangents are not what was said.
    """
    axes = lookup(axis_name)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf * math.prod(axis.size for axis in axes)
        _flag_redundant(leaf, axes, "psum")
        leaf = leaf.to(torch.int32) if leaf.dtype == torch.bool else leaf
        for axis in axes:
            leaf = primitives.Psum.call(leaf, axis, must_vary=scope().check, equal=equal_cotangents)
        return leaf

    return tree.map(one, x)


@_collective
def pmean(x: tree.Tree, axis_name: AxisNames) -> tree.Tree:
    """y = mean of x over the ranks of `axis_name`; equal on all of them.

    One all-reduce per axis, of x's bytes; backward the same. Integers give floats, as in JAX. On a
    value that is already replicated it is the identity.
    """
    axes = lookup(axis_name)
    size = math.prod(axis.size for axis in axes)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.to(torch.int32) if leaf.dtype == torch.bool else leaf
        for axis in axes:
            leaf = primitives.Psum.call(leaf, axis)
        return leaf / size

    return tree.map(one, x)


def _call_over(primitive: type, x: tree.Tree, axis_name: AxisNames) -> tree.Tree:
    axes = lookup(axis_name)

    def one(leaf: Any) -> Any:
        for axis in axes if isinstance(leaf, torch.Tensor) else ():
            leaf = primitive.call(leaf, axis)
        return leaf

    return tree.map(one, x)


@_collective
def pmax(x: tree.Tree, axis_name: AxisNames) -> tree.Tree:
    """y = elementwise maximum of x over the ranks of `axis_name`; equal on all of them.

    One all-reduce (max) per axis, of x's bytes. Has no derivative: differentiating through it
    raises; write ``pmax(stop_gradient(x), axis)`` where none is meant.
    """
    return _call_over(primitives.Pmax, x, axis_name)


@_collective
def pmin(x: tree.Tree, axis_name: AxisNames) -> tree.Tree:
    """y = elementwise minimum of x over the ranks of `axis_name`; equal on all of them.

    One all-reduce (min) per axis, of x's bytes. Has no derivative, like `pmax`.
    """
    return _call_over(primitives.Pmin, x, axis_name)


@_collective
def all_gather(
    x: tree.Tree, axis_name: AxisNames, *, axis: int = 0, tiled: bool = False
) -> tree.Tree:
    """y = every rank's x, stacked (or, tiled, concatenated) along dim `axis` in rank order.

    Varying -> replicated. One all-gather per mesh axis, the result being ``axis_size`` times x's
    bytes; backward one reduce-scatter of the result's bytes.

    Shapes: ``[..., d, ...]`` to ``[..., n, d, ...]``, or tiled to ``[..., n * d, ...]``.
    """
    axes = lookup(axis_name)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        dim = _dim(axis, leaf.dim() + (not tiled), "all_gather axis")
        if not axes:
            return leaf if tiled else leaf.unsqueeze(dim)
        shape, out = leaf.shape, leaf
        for mesh_axis in reversed(axes):
            out = primitives.AllGather.call(out, mesh_axis)
        count = math.prod(mesh_axis.size for mesh_axis in axes)
        out = out.reshape(count, *shape).movedim(0, dim)
        return out.flatten(dim, dim + 1) if tiled else out

    return tree.map(one, x)


def _split_dim(leaf: torch.Tensor, dim: int, size: int, tiled: bool, name: str) -> torch.Tensor:
    """`leaf` with a leading dim of `size` taken out of dim `dim`."""
    got = leaf.shape[dim]
    if (got % size) if tiled else (got != size):
        wanted = f"a multiple of the axis size {size}" if tiled else f"the axis size {size}"
        refuse(
            f"{name} cannot split its operand at {user_line()}",
            f"dim {dim} of shape {tuple(leaf.shape)}",
            got,
            wanted,
            "pad that dim, or split another" if tiled else "pass tiled=True",
        )
    return (leaf.unflatten(dim, (size, -1)) if tiled else leaf).movedim(dim, 0)


@_collective
def psum_scatter(
    x: tree.Tree, axis_name: AxisNames, *, scatter_dimension: int = 0, tiled: bool = False
) -> tree.Tree:
    """y = this rank's part, along `scatter_dimension`, of the sum of x over ranks.

    Varying -> varying: a `psum` of which each rank keeps one n-th. One reduce-scatter per mesh
    axis, of x's bytes; backward one all-gather.

    Shapes: ``[..., n, ...]`` to ``[..., ...]``; tiled ``[..., n * d, ...]`` to ``[..., d, ...]``.

    Raises:
        ValueError: the dim does not split; or, under shard_map's check, x is replicated already.
    """
    axes = lookup(axis_name)
    sizes = [axis.size for axis in axes]

    def one(leaf: torch.Tensor) -> torch.Tensor:
        dim = _dim(scatter_dimension, leaf.dim(), "psum_scatter scatter_dimension")
        _flag_redundant(leaf, axes, "psum_scatter")
        if not axes and tiled:
            return leaf
        out = _split_dim(leaf, dim, math.prod(sizes), tiled, "psum_scatter")
        if not axes:
            return out.squeeze(0)
        # the major axis is scattered first, so that what is left is split by the minor ones
        out = out.unflatten(0, sizes)
        for axis in axes:
            out = primitives.PsumScatter.call(out, axis, must_vary=scope().check)
        return out

    return tree.map(one, x)


@_collective
def all_to_all(
    x: tree.Tree, axis_name: AxisNames, split_axis: int, concat_axis: int, *, tiled: bool = False
) -> tree.Tree:
    """Split x along dim `split_axis`, send part s to rank s, join what arrives at `concat_axis`.

    Varying -> varying: a transpose between a tensor dim and a mesh axis. One all-to-all per mesh
    axis, of x's bytes; backward the inverse.

    Shapes, untiled: `split_axis` of size n disappears and a dim of size n appears at `concat_axis`.
    Tiled: `split_axis` becomes n times smaller and `concat_axis` n times larger.

    Raises:
        ValueError: the dim does not split.
    """
    axes = lookup(axis_name)
    sizes = [axis.size for axis in axes]

    def one(leaf: torch.Tensor) -> torch.Tensor:
        source = _dim(split_axis, leaf.dim(), "all_to_all split_axis")
        target = _dim(concat_axis, leaf.dim(), "all_to_all concat_axis")
        if not axes and tiled:
            return leaf
        out = _split_dim(leaf, source, math.prod(sizes), tiled, "all_to_all")
        out = out.unflatten(0, sizes) if axes else out
        for position, axis in enumerate(axes):
            out = primitives.AllToAll.call(out.movedim(position, 0), axis).movedim(0, position)
        out = out.flatten(0, len(axes) - 1) if axes else out
        if not tiled:
            return out.movedim(0, target)
        # back to the operand's dims, the received parts in front of what stays of concat_axis
        out = out.movedim(0, target)
        return out.flatten(target, target + 1)

    return tree.map(one, x)


@public
def ppermute(x: tree.Tree, axis_name: AxisNames, perm: Sequence[tuple[int, int]]) -> tree.Tree:
    """y on rank d = x of rank s for every pair (s, d) of `perm`; zeros where no pair ends.

    Varying -> varying. One send and one receive of x's bytes per rank; backward the same with the
    pairs reversed. Over several axes (row-major ranks) x is gathered and the source selected.

    ``ppermute(rank, "tp", [(0, 1), (1, 2)])`` holds 0, 0, 1, 0 on ``Mesh(tp=4)``.

    Raises:
        ValueError: a source or a target comes up twice, or is no rank of the axis.
    """
    axes = lookup(axis_name)
    size = math.prod(axis.size for axis in axes)
    pairs = tuple((int(source), int(target)) for source, target in perm)
    _check_perm(pairs, size)

    def one(leaf: torch.Tensor) -> torch.Tensor:
        if len(axes) == 1:
            return primitives.Ppermute.call(leaf, axes[0], perm=pairs)
        if not axes:
            return leaf if pairs else torch.zeros_like(leaf)
        sources = [-1] * size
        for source, target in pairs:
            sources[target] = source
        ranks = torch.arange(size, device=leaf.device)
        mine = ranks == axis_index(axis_name)
        source = (compat.constant(sources, leaf.device) * mine).sum()
        gathered = all_gather(leaf, axis_name)
        ranks = ranks.view(-1, *[1] * leaf.dim())
        zero = torch.zeros((), dtype=leaf.dtype, device=leaf.device)
        return torch.where(ranks == source, gathered, zero).sum(0, dtype=leaf.dtype)

    return tree.map(one, x)


def _check_perm(pairs: tuple[tuple[int, int], ...], size: int) -> None:
    problems = []
    for what, ranks in (("source", [s for s, _ in pairs]), ("target", [d for _, d in pairs])):
        for rank in sorted(set(ranks)):
            if ranks.count(rank) > 1:
                problems.append(Problem("perm", f"{what} {rank} twice", f"every {what} once"))
            if not 0 <= rank < size:
                problems.append(Problem("perm", f"{what} {rank}", f"a rank from 0 to {size - 1}"))
    raise_problems(f"ppermute at {user_line()}", problems)


@public
def pbroadcast(x: tree.Tree, axis_name: AxisNames, source: int) -> tree.Tree:
    """y = x of rank `source` (row-major over the axes), on every rank.

    Varying -> replicated. One broadcast per axis, of x's bytes, half of what an all-reduce sends;
    backward one all-reduce: the source receives the sum of all cotangents.

    ``pbroadcast(rank, "tp", 2)`` is 2 on every rank of ``Mesh(tp=4)``.

    Raises:
        ValueError: `source` is no rank of the axes.
    """
    size = axis_size(axis_name)
    if not 0 <= source < size:
        raise ValueError(f"pbroadcast: got source {source}; wanted a rank from 0 to {size - 1}")
    mine, axes = axis_index(axis_name), lookup(axis_name)
    minor = [math.prod(axis.size for axis in axes[place + 1 :]) for place in range(len(axes))]
    positions = [source // m % axis.size for m, axis in zip(minor, axes, strict=True)]

    def one(leaf: torch.Tensor) -> torch.Tensor:
        if size == 1:
            return leaf
        here = compat.constant(mine == source, leaf.device)
        out = torch.where(here, leaf, torch.zeros((), dtype=leaf.dtype, device=leaf.device))
        for axis, position in zip(axes, positions, strict=True):
            out = primitives.Broadcast.call(out, axis, source=position)
        return out

    return tree.map(one, x)


@public
def assume_replicated(x: tree.Tree, axis_name: AxisNames) -> tree.Tree:
    """y = x, declared equal on all ranks of `axis_name` without a reduction.

    For values that are equal for a reason the check cannot see. No communication, and no proof: in
    simulation the first rank's value stands for all. Cotangents pass unchanged on every rank.
    """
    return _call_over(primitives.AssumeReplicated, x, axis_name)


@public
def stop_gradient(x: tree.Tree) -> tree.Tree:
    """y = x with derivative zero."""
    return tree.map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, x)


@public
def global_index(size: int, axis_name: AxisNames, *, device: torch.device | str) -> torch.Tensor:
    """The global indices, int64 [size], of this rank's rows of a dim split by `axis_name`."""
    rows = torch.arange(size, device=device)
    return rows + axis_index(axis_name) * size


def psum_stages(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over the processes that run other stages of a pipeline; 0-dim or any shape.

    The identity where one process runs all stages, and where there are none. One all-reduce of x's
    bytes otherwise.
    """
    stages = scope().stages
    if stages is None or stages.index is None:
        return x
    make_index = scope().axis_index
    if make_index is not None:
        return primitives.Psum.call(x, TracedAxis(stages.name, stages.size, make_index))
    return primitives.Psum.call(
        x, BoundAxis(stages.name, stages.size, stages.index, stages.group, None, stages.recorder)
    )
