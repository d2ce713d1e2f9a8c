"""Whole parameters, for optimizers that look at more of them than one element at a time.

What a mean over rows or a matrix is made of may lie on several ranks, and a stack of layers is many
matrices in one tensor. A `Whole` says both of a parameter, so that its numbers are those of one
rank that holds every matrix by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functron.core import tree
from functron.core.errors import Problem, raise_problems
from functron.spmd.axes import axis_size, scope
from functron.spmd.collectives import psum, psum_stages
from functron.spmd.replication import varying_axes
from functron.spmd.shards import Cut, take
from functron.spmd.spec import P, dim_axes, is_spec, spec_axes

MATRICES = ("layers", "expert")
"""Logical axes along which parameters of the same kind lie side by side."""


@dataclass(frozen=True)
class Whole:
    """A parameter as a whole.

    Attributes:
        path: for messages.
        shape: the global one. The first `num_stacked` sizes are not used: a rank of a pipeline has
            some of the layers only.
        num_stacked: leading dims along which parameters are stacked, each of them by itself.
        spec: how what the optimizer sees of it is split.
    """

    path: str
    shape: tuple[int, ...]
    num_stacked: int = 0
    spec: P = field(default_factory=P)

    @property
    def own(self) -> range:
        """The dims that are not stacked."""
        return range(self.num_stacked, len(self.shape))

    def axes(self, dims: Iterable[int]) -> tuple[str, ...]:
        """The mesh axes that split these dims, in their order."""
        split = dim_axes(self.spec, len(self.shape))
        return tuple(name for dim in dims for name in split[dim])

    def count(self, dims: Iterable[int]) -> int:
        """How many elements these dims have together, on all ranks."""
        return math.prod(self.shape[dim] for dim in dims)


def num_stacked(d: Any) -> int:
    """How many leading dims of a `ParamDef` are stacks; 0 of what has no names."""
    names, count = getattr(d, "axes", ()), 0
    while count < len(names) and names[count] in MATRICES:
        count += 1
    return count


def leaf_specs(specs: tree.Tree, value: tree.Tree, what: str) -> list[P]:
    """The spec of every leaf of `value`, for `what`, whose result depends on all shards of a leaf.

    Raises:
        ValueError: there are none, inside a program over more than one rank; or, where a simulation
            is checked, a leaf varies over an axis that its spec lacks. Every rank would silently
            compute another number.
    """
    leaves, axes = tree.leaves(value), [n for n, axis in scope().axes.items() if axis is not None]
    if specs is None:
        fix = f"pass the parameters' specs to {what}, or bind them: optimizer.bind(specs), as "
        fix += "make_step does; P() where nothing is sharded"
        got = f"no specs, on a mesh with {', '.join(map(repr, axes))}"
        found = Problem(what, got, "specs, or every rank computes a number of its own", fix)
        raise_problems("the shards of a leaf are not known", [found] if axes and leaves else [])
        return [P()] * len(leaves)
    flat = tree.broadcast_prefix(specs, value, is_leaf=is_spec, what="the specs", wanted="a P")
    rows = zip(tree.paths(value), leaves, flat, strict=True) if scope().check else ()
    raise_problems(
        f"{what}: the specs are not those of the leaves",
        [
            Problem(
                path or "(root)",
                f"a leaf that varies over {name!r}, and {spec}",
                "a spec that mentions each axis that splits the leaf",
                "give it the specs of the parameters; if it is a gradient, call "
                "sync_gradients(grads, specs) first",
            )
            for path, leaf, spec in rows
            for name in varying_axes(leaf)
            if name not in spec_axes(spec)
        ],
    )
    return flat


def total(numbers: Sequence[torch.Tensor], specs: Sequence[P]) -> torch.Tensor:
    """The sum of one number for each leaf over all leaves, their shards and a pipeline's ranks.

    One all-reduce of a number for each distinct set of mesh axes that the specs mention, and one
    over the ranks of a pipeline.

    Args:
        numbers: 0-dim, of this rank's shard of each leaf; at least one.
        specs: of these leaves.
    """
    groups: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for number, spec in zip(numbers, specs, strict=True):
        axes = tuple(sorted(spec_axes(spec)))
        groups.setdefault(axes, []).append(number.to(numbers[0].device))
    sums = [
        psum(torch.stack(each).sum(), axes) if axes else torch.stack(each).sum()
        for axes, each in groups.items()
    ]
    return psum_stages(torch.stack(sums).sum())


def wholes(value: tree.Tree, defs: tree.Tree = None, specs: tree.Tree = None) -> list[Whole]:
    """The `Whole` of every tensor in `value`.

    Args:
        value: parameters, gradients or updates, on a mesh this rank's shards.
        defs: the parameters' `ParamDef`s, or anything with global shapes; None: what is seen is
            whole, and nothing is stacked.
        specs: how `value` is sharded, a prefix tree of `P`; None: not at all.

    Raises:
        ValueError: some tensor has not the shape of a shard of its def; all are listed.
    """
    leaves, paths = tree.leaves(value), tree.paths(value)
    known = leaves
    if defs is not None:
        wanted = "a ParamDef, or containers"
        known = tree.broadcast_prefix(defs, value, what="the defs", wanted=wanted)
    flat = leaf_specs(specs, value, "an optimizer that looks at whole parameters")
    rows = zip(paths, known, flat, strict=True)
    found = [Whole(path, tuple(d.shape), num_stacked(d), spec) for path, d, spec in rows]
    rows = [_unlike(one, x) for one, x in zip(found, leaves, strict=True)]
    raise_problems(
        "parameters that are looked at as a whole are not what their defs and specs say",
        filter(None, rows),
    )
    return found


def _unlike(whole: Whole, x: torch.Tensor) -> Problem | None:
    """The problem of taking x for a shard, which may be padded; None: there is none."""
    own = list(whole.own)
    sizes = [_split(whole.shape[dim], whole.axes([dim])) for dim in own]
    if x.dim() == len(whole.shape) and [x.shape[dim] for dim in own] == sizes:
        return None
    return Problem(
        whole.path or "(root)",
        f"shape {tuple(x.shape)}",
        f"{(*x.shape[: whole.num_stacked], *sizes)}, of the global {whole.shape} under "
        f"{whole.spec}",
        "give the optimizer the parameters' defs and specs (under ZeRO, those of the shards); what "
        "ranks of a pipeline divide (vocab_over_pp) needs an elementwise optimizer",
    )


def _split(size: int, axes: Sequence[str]) -> int:
    return -(-size // math.prod(axis_size(name) for name in axes))


def mean(x: torch.Tensor, dims: Sequence[int], whole: Whole) -> torch.Tensor:
    """The mean of x over these dims, which stay with size 1, of all ranks that have parts of them.

    One all-reduce of the result where they are sharded. Padding is of zeros, and not counted.
    """
    summed = x.sum(tuple(dims), keepdim=True) if dims else x
    axes = whole.axes(dims)
    return (psum(summed, axes) if axes else summed) / whole.count(dims)


def root_mean_square(x: torch.Tensor, whole: Whole) -> torch.Tensor:
    """``sqrt(mean(x^2))`` of every one of the stacked parameters, [*stacked, 1, ...]."""
    return mean(x.square(), list(whole.own), whole).sqrt()


def unpadded(x: torch.Tensor, dim: int, whole: Whole) -> torch.Tensor:
    """x with zeros where this rank's part of a dim is padding.

    Args:
        x: like a part of the parameter, but that other dims may have size 1.
        dim: one of its dims.
        whole: the parameter.
    """
    axes, size = whole.axes([dim]), whole.shape[dim]
    if x.shape[dim] * math.prod(axis_size(name) for name in axes) == size:
        return x
    ones = take(torch.ones(size, dtype=x.dtype, device=x.device), (Cut(-1, axes),))
    return x * ones.reshape([-1 if d == dim else 1 for d in range(x.dim())])


def without(spec: P, dims: Iterable[int]) -> P:
    """The spec of a value that lacks these dims of one with spec `spec`."""
    gone = set(dims)
    return P(*(entry for dim, entry in enumerate(spec) if dim not in gone))


def flat_specs(param_specs: tree.Tree, like: tree.Tree) -> list[P | None]:
    """One spec for every leaf of `like`, of a prefix tree."""
    return tree.broadcast_prefix(param_specs, like, is_leaf=is_spec, what="specs", wanted="a P")
