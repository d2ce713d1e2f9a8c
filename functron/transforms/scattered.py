"""Gradients with respect to shards of parameters that are there whole: ZeRO stage 2.

A function of whole parameters is differentiated with respect to every rank's part of them. Forward
uses what is there, without communication; backward is that of gathering the parts, so it reduces
and scatters each gradient as soon as it appears, and no rank keeps more than its parts. What is
differentiated is a stand-in with the part's shape, whose numbers nobody reads.

Where `functron.scan` runs over a whole stack of parameters, each of its slices is scattered by
itself, in the scanned body. It recognises such stacks by identity; of what a program makes of a
stack before it is scanned, the gradient is scattered in one piece, to the same numbers.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from functron.core import tree
from functron.spmd.shards import BoundCuts, Cuts, bound_cuts, cut_tree, part_shape, scatter_over


def stand_ins(
    params: tree.Tree, specs: tree.Tree, into: tree.Tree, *, dtype: torch.dtype | None = None
) -> tree.Tree:
    """What to differentiate with respect to, in place of `params`; takes no memory.

    Args:
        params: local values with `specs`.
        specs: a prefix tree.
        into: the specs of the gradients: `specs` with axes appended.
        dtype: of the gradients; None: the parameters' own.

    Returns:
        A tree like `params`, of tensors with the shapes of this rank's parts; a parameter that is
        not cut stands for itself.
    """
    leaves, structure = tree.flatten(params)
    rows = zip(leaves, cut_tree(specs, into, params), strict=True)
    return tree.unflatten(structure, [_stand_in(leaf, cuts, dtype) for leaf, cuts in rows])


def _stand_in(leaf: torch.Tensor, cuts: Cuts, dtype: torch.dtype | None) -> torch.Tensor:
    if not cuts and dtype in (None, leaf.dtype):
        return leaf
    zero = torch.zeros((), dtype=dtype or leaf.dtype, device=leaf.device)
    return zero.expand(part_shape(leaf.shape, cuts))


@contextlib.contextmanager
def scattered(
    parts: tree.Tree,
    params: tree.Tree,
    specs: tree.Tree,
    into: tree.Tree,
    *,
    dtype: torch.dtype | None = None,
) -> Iterator[tree.Tree]:
    """`params` as a function of `parts`, in a with block around what uses them.

    Collectives: none forward; in backward one reduce-scatter per use of a leaf and axis.

    Args:
        parts: what `stand_ins` returned, or what a transform made of it.
        params: the local values with `specs` that are used.
        specs, into: as for `stand_ins`.
        dtype: reduce gradients in this dtype; None: in that of the parameters.
    """
    leaves, structure = tree.flatten(params)
    rows = zip(tree.leaves(parts), leaves, cut_tree(specs, into, params), strict=True)
    out, found = [], {}
    for part, whole, cuts in rows:
        if not cuts and part.dtype == whole.dtype:
            out.append(part)
            continue
        pair = _Pair(part, whole, cuts, dtype)
        value = pair.value()
        out.append(value)
        found[id(value)] = (value, pair)  # kept, so that no other tensor gets this id
    token = _pairs.set({**_pairs.get(), **found})
    try:
        yield tree.unflatten(structure, out)
    finally:
        _pairs.reset(token)


@dataclass(frozen=True, eq=False)
class _Pair:
    """A part that is differentiated, and the whole value that is used."""

    part: torch.Tensor
    whole: torch.Tensor
    cuts: Cuts
    dtype: torch.dtype | None

    def value(self) -> torch.Tensor:
        """The whole value as a function of the part."""
        cuts = bound_cuts(self.whole.shape, self.cuts)
        out: Any = _Whole.apply(self.part, self.whole, _Use(cuts, self.dtype, self.part.dtype))
        return out


_pairs: contextvars.ContextVar[dict[int, tuple[torch.Tensor, _Pair]]] = contextvars.ContextVar(
    "functron_scattered",
    default={},  # noqa: B039  (never written to)
)


def by_row(f: Callable, xs: tree.Tree) -> tuple[Callable, tree.Tree]:
    """`f` and `xs` of a scan such that the slices of what `scattered` made are scattered in `f`."""
    pairs = _pairs.get()
    if not pairs:
        return f, xs
    leaves, structure = tree.flatten(xs)
    found = [pairs[id(leaf)][1] if id(leaf) in pairs else None for leaf in leaves]
    if not any(found):
        return f, xs

    @functools.wraps(f)
    def body(carry, columns):
        rows = [
            column
            if pair is None
            else _Pair(column["part"], column["whole"], pair.cuts, pair.dtype).value()
            for column, pair in zip(columns, found, strict=True)
        ]
        return f(carry, tree.unflatten(structure, rows))

    return body, [
        leaf if pair is None else {"part": pair.part, "whole": pair.whole}
        for leaf, pair in zip(leaves, found, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Use:
    """How the gradient of a whole value is reduced; opaque to functorch."""

    cuts: BoundCuts
    reduced: torch.dtype | None
    result: torch.dtype


class _Whole(Function):
    """y = whole, as the gathering of parts: its cotangent is summed over ranks and scattered."""

    @staticmethod
    def forward(part, whole, use):
        return whole.view_as(whole)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.use = inputs[2]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *cotangents):
        (cotangent,) = cotangents
        if cotangent is None:
            return None, None, None
        use: _Use = ctx.use
        share = cotangent if use.reduced is None else cotangent.to(use.reduced)
        return scatter_over(share, use.cuts).to(use.result), None, None

    @staticmethod
    def vmap(info, in_dims, part, whole, use):
        return whole.view_as(whole), in_dims[1]
