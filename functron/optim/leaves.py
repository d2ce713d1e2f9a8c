"""Whole parameters, for optimizers that look at more of them than one element at a time.

What a mean over rows or a matrix is made of may lie on several ranks, and a stack of layers is many
matrices in one tensor. A `Leaf` says both of a parameter, so that its numbers are those of one rank
that holds every matrix by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functron import tree
from functron.errors import Problem, raise_problems
from functron.spmd.axes import axis_size
from functron.spmd.collectives import psum
from functron.spmd.shards import Cut, take
from functron.spmd.spec import P, dim_axes, is_spec

STACKED = ("layers", "expert")
"""Logical axes along which parameters are stacked, each of them by itself."""


@dataclass(frozen=True)
class Leaf:
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
    while count < len(names) and names[count] in STACKED:
        count += 1
    return count


def whole(value: tree.Tree, defs: tree.Tree = None, specs: tree.Tree = None) -> list[Leaf]:
    """The `Leaf` of every tensor in `value`.

    Args:
        value: parameters, gradients or updates, on a mesh this rank's shards.
        defs: the parameters' `ParamDef`s, or anything with global shapes; None: what is seen is
            whole, and nothing is stacked.
        specs: how `value` is sharded, a prefix tree of `P`; None: not at all.

    Raises:
        ValueError: some tensor has not the shape of a shard of its def; all are listed.
    """
    leaves, paths = tree.leaves(value), tree.paths(value)
    wanted = "a ParamDef, or containers"
    known = leaves
    if defs is not None:
        known = tree.broadcast_prefix(defs, value, what="the defs", wanted=wanted)
    flat = [P()] * len(leaves)
    if specs is not None:
        flat = tree.broadcast_prefix(specs, value, is_leaf=is_spec, what="the specs", wanted="a P")
    rows = list(zip(paths, known, flat, strict=True))
    found = [Leaf(path, tuple(d.shape), num_stacked(d), spec) for path, d, spec in rows]
    raise_problems(
        "parameters that are looked at as a whole are not what their defs and specs say",
        (
            problem
            for leaf, x in zip(found, leaves, strict=True)
            if (problem := _unlike(leaf, x)) is not None
        ),
    )
    return found


def _unlike(leaf: Leaf, x: torch.Tensor) -> Problem | None:
    """What is wrong with taking x for a shard of the leaf, which may be padded."""
    own = list(leaf.own)
    sizes = [_split(leaf.shape[dim], leaf.axes([dim])) for dim in own]
    if x.dim() == len(leaf.shape) and [x.shape[dim] for dim in own] == sizes:
        return None
    wanted = (*x.shape[: leaf.num_stacked], *sizes)
    return Problem(
        leaf.path or "(root)",
        f"shape {tuple(x.shape)}",
        f"{wanted}, of the global {leaf.shape} under {leaf.spec}",
        "give the optimizer the parameters' defs and specs (under ZeRO, those of the shards); "
        "what ranks of a pipeline divide (vocab_over_pp) needs an elementwise optimizer",
    )


def _split(size: int, axes: Sequence[str]) -> int:
    return -(-size // math.prod(axis_size(name) for name in axes))


def total(x: torch.Tensor, dims: Sequence[int], leaf: Leaf) -> torch.Tensor:
    """The sum of x over these dims, which stay with size 1, on all ranks that have parts of them.

    One all-reduce of the result where they are sharded. Padding is of zeros and adds nothing.
    """
    summed = x.sum(tuple(dims), keepdim=True) if dims else x
    axes = leaf.axes(dims)
    return psum(summed, axes) if axes else summed


def mean(x: torch.Tensor, dims: Sequence[int], leaf: Leaf) -> torch.Tensor:
    """`total`, divided by the number of elements without padding."""
    return total(x, dims, leaf) / leaf.count(dims)


def root_mean_square(x: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """``sqrt(mean(x^2))`` of every one of the stacked parameters, [*stacked, 1, ...]."""
    return mean(x.square(), list(leaf.own), leaf).sqrt()


def unpadded(x: torch.Tensor, dim: int, leaf: Leaf) -> torch.Tensor:
    """x with zeros where this rank's part of a dim is padding; x has all dims of the leaf.

    Args:
        x: like a part of the leaf, but that other dims may have size 1.
        dim: one of its dims.
        leaf: whose.
    """
    axes = leaf.axes([dim])
    size = leaf.shape[dim]
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
