"""Comparison: results and gradients of a partitioned function with those of the function itself.

Rules of operations say what each rank computes. A rule that is wrong, such as one that forgets a
sum, makes numbers that nothing else would notice; half of them missing is what this finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.errors import Problem
from functron.partitioning.placement import gather_uneven, move, placement_of, without_uneven
from functron.spmd.mesh import BoundMesh, Mesh
from functron.spmd.shard_map import shard_map
from functron.spmd.spec import P, is_spec, is_uneven
from functron.transforms.gradient import value_and_grad

_LISTED = 20  # of leaves that differ; all are counted


class Comparison(NamedTuple):
    """The result of comparing leaves.

    Attributes:
        num_leaves: that were compared.
        largest: difference of an entry, over the largest entry of its part of the tree.
        problems: leaves that differ, the worst first; of many, their number.
    """

    num_leaves: int
    largest: float
    problems: tuple[Problem, ...]


def find_differences(got: dict[str, tree.Tree], wanted: dict[str, tree.Tree]) -> Comparison:
    """The leaves of two trees of tensors that differ by more than their sums' order explains.

    An entry may differ by a thousandth of the largest one of its leaf, and by a 100,000th of the
    largest of all leaves of its part of the tree, below which sums that should be 0 lie; in 16
    bits, by 5% and 1%. Integers and booleans are equal.

    Args:
        got, wanted: by part: results have other sizes than gradients.
    """
    found, largest, num_leaves = [], 0.0, 0
    for part in wanted:
        rows = [
            (f"{part}/{path}".rstrip("/"), one.detach(), other.detach())
            for (path, one), other in zip(
                tree.items(got[part]), tree.leaves(wanted[part]), strict=True
            )
            if isinstance(one, torch.Tensor)
        ]
        most = max((_find_largest(row[2]) for row in rows if tree.is_inexact(row[2])), default=0.0)
        num_leaves += len(rows)
        for path, one, other in rows:
            share, problem = _compare_leaf(path, one, other, most)
            largest = max(largest, share)
            found += [] if problem is None else [(share, problem)]
    found.sort(key=lambda row: -row[0])
    problems = [problem for _, problem in found[:_LISTED]]
    if len(found) > _LISTED:
        more = f"{len(found) - _LISTED} more"
        problems.append(Problem(more, "entries that differ, by less", "the same"))
    return Comparison(num_leaves, largest, tuple(problems))


def _compare_leaf(
    path: str, one: torch.Tensor, other: torch.Tensor, most: float
) -> tuple[float, Problem | None]:
    """The largest difference, over `most`, and what is wrong with it; None: nothing."""
    if one.shape != other.shape:
        shapes = f"shape {list(one.shape)}", f"{list(other.shape)}, as unpartitioned"
        return float("inf"), Problem(path, *shapes)
    far, size = _find_distance(one, other), _find_largest(other)
    near, floor = _tolerances(other.dtype)
    share = far / most if most else far
    if far <= near * size + floor * most:
        return share, None
    text = f"{far:.2g}, {far / size:.0%} of the largest one" if size else f"{far:.2g}"
    wanted = "the numbers of the unpartitioned function"
    return share, Problem(path, f"an entry that differs by {text}", wanted)


def _tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """The shares of a leaf's largest entry, and of that of all, by which entries may differ."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0, 0.0
    return (0.05, 0.01) if torch.finfo(dtype).bits < 32 else (1e-3, 1e-5)


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _find_largest(x: torch.Tensor) -> float:
    return float(_widen(x).abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0


def _find_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of an entry; those that are both nan, or infinite alike, are equal."""
    if not one.numel():
        return 0.0
    one, other = _widen(one), _widen(other)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, 0.0, (one - other).abs())
    return float(apart.nan_to_num(float("inf"), float("inf")).max())


def compute_with_gradients(fn: Callable, args: tuple, *, differentiate: bool = True) -> dict:
    """The results of a function, and the gradients of a sum of them, by ``results``, ``gradients``.

    The sum has weights, which are random, the same each time, and 1 for a scalar; the gradients
    are of all floating-point arguments.

    Args:
        fn: of whole values, as of `functron.partition`.
        args: concrete; they are copied.
        differentiate: whether to; else there are no ``gradients``.
    """
    leaves, structure = tree.flatten(args)
    copies = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]
    paths = tree.paths(args)
    moved = {
        paths[i]: x
        for i, x in enumerate(copies)
        if differentiate and isinstance(x, torch.Tensor) and tree.is_float(x)
    }

    def weigh(moved: dict[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        given = [moved.get(path, x) for path, x in zip(paths, copies, strict=True)]
        out = fn(*tree.unflatten(structure, given))
        floats = [x for x in tree.leaves(out) if isinstance(x, torch.Tensor) and tree.is_float(x)]
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros((), device=floats[0].device if floats else "cpu")
        for x in floats:
            drawn = torch.randn(x.shape, generator=generator) if x.dim() else torch.ones(())
            total = total + (x * drawn.to(x.device, x.dtype)).sum()
        return total, out

    if not moved:
        return {"results": weigh({})[1]}
    (_, out), gradients = value_and_grad(weigh, has_aux=True)(moved)
    return {"results": out, "gradients": gradients}


def gather_arguments(mesh: BoundMesh, in_specs: tree.Tree, args: tuple) -> tuple:
    """The whole values of a function's arguments, of which this rank has shards, on every rank.

    Collectives: an all-gather per leaf and axis that splits it.
    """
    sizes = {name: size for name, size in mesh.mesh.axes if size > 1}
    prefix = in_specs if isinstance(in_specs, tuple) and not is_spec(in_specs) else None

    def gather(*shards):
        given = (in_specs,) * len(shards) if prefix is None else prefix
        specs = tree.broadcast_prefix(given, shards, is_leaf=is_spec, what="in_specs")
        leaves, structure = tree.flatten(shards)
        for i, (x, spec) in enumerate(zip(leaves, specs, strict=True)):
            if isinstance(x, torch.Tensor) and spec is not None:
                x = gather_uneven(x, spec) if is_uneven(spec) else x
                source = placement_of(without_uneven(spec), x.dim(), sizes)
                leaves[i] = move(x, source, placement_of(P(), x.dim(), sizes), sizes)
        return tree.unflatten(structure, leaves)

    whole = tree.map(lambda spec: None if spec is None else P(), in_specs, is_leaf=is_spec)
    return shard_map(gather, mesh, in_specs, whole, check=False)(*args)


def advise(mesh: Mesh) -> str:
    """The fix of wrong gradients on a mesh."""
    axes = " or ".join(name for name, size in mesh.axes if size > 1)
    return f"fix: report it, with the function; until then run without {axes}"
