"""Placements: which part of a global value a rank holds, and the moves from one to another.

Along every mesh axis a value is split along a dim, replicated, or partial: ranks hold values whose
sum, maximum or minimum it is. An index along a dim is a number of several digits, major to minor,
and an axis that splits the dim is one of them: a `Digit` says how many blocks are outside of it.
``P(("dp", "tp"))`` has the digits dp, outside of which there is one block, and tp, outside of which
there are as many as dp has ranks. A dim of 4 heads of 8 features each, the features split by tp, is
the digit tp with 4 blocks outside: the block-cyclic layouts that reshapes make need nothing else,
and any axis can be gathered without the others.

A `move` takes a value from one placement to another by the collectives of `functron.lax`; its
derivative is theirs. `move_cost` says what it costs, in bytes or in seconds.

| from | to | collective | bytes, of the value v that a rank holds without the axis, n ranks |
|---|---|---|---|
| split | replicated | all_gather | v (n - 1) / n |
| split | split along another dim | all_to_all | v (n - 1) / n^2 |
| replicated | split | none: the rank takes its part | 0 |
| partial | replicated | psum (pmax, pmin) | 2 v (n - 1) / n |
| partial sum | split | psum_scatter | v (n - 1) / n |
| replicated | partial sum | none: the first rank keeps it, others have zeros | 0 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from functron.core import compat
from functron.core.errors import refuse
from functron.spmd import collectives as lax
from functron.spmd.spec import (
    DimCut,
    P,
    Uneven,
    as_entry,
    dim_axes,
    dim_sizes,
    is_uneven,
    join_parts,
    take,
)

Sizes = Mapping[str, int]
"""The sizes of the axes with more than one rank."""

CollectiveCost = Callable[[str, str, int], float]
"""The seconds of a collective, ``(op, axis, payload_bytes)``: of its operand, or of an all_gather
its result, on one rank."""

Reduction = Literal["sum", "max", "min"]
SUM: Reduction = "sum"


class Digit(NamedTuple):
    """A mesh axis that splits a dim, inside of each of `outer` blocks; 1 for the major split."""

    outer: int
    axis: str


Digits = tuple[Digit, ...]
"""The axes that split one dim, major to minor."""


@dataclass(frozen=True)
class ValuePlacement:
    """The part of a value that every rank holds.

    Attributes:
        dims: the digits of every dim.
        partial: the axes along which ranks hold values to combine, and how.
    """

    dims: tuple[Digits, ...]
    partial: tuple[tuple[str, Reduction], ...] = ()

    @property
    def split(self) -> dict[str, tuple[int, int]]:
        """Of every axis that splits a dim, which, and the blocks outside of it."""
        return {d.axis: (dim, d.outer) for dim, digits in enumerate(self.dims) for d in digits}

    def without(self, axis: str) -> ValuePlacement:
        """The same, replicated along `axis`."""
        dims = tuple(tuple(d for d in digits if d.axis != axis) for digits in self.dims)
        return ValuePlacement(dims, tuple(row for row in self.partial if row[0] != axis))

    def splitting(self, axis: str, dim: int, outer: int) -> ValuePlacement:
        """The same, split along `dim` by `axis`."""
        dims = list(self.without(axis).dims)
        dims[dim] = tuple(sorted((*dims[dim], Digit(outer, axis))))
        return ValuePlacement(tuple(dims), tuple(row for row in self.partial if row[0] != axis))

    @property
    def whole(self) -> ValuePlacement:
        """The same without partial values: replicated where it has them."""
        return replace(self, partial=())

    def __str__(self) -> str:
        """In words: ``P('dp', None)``, ``P('dp'), partial sum over 'tp'``."""
        entries = []
        for digits in self.dims:
            names = [
                d.axis if d.outer == 1 or len(digits) > 1 else f"{d.axis}@{d.outer}" for d in digits
            ]
            entries.append(as_entry(names))
        text = repr(P(*entries))
        for axis, kind in self.partial:
            text += f", partial {kind} over {axis!r}"
        return text


def placement_of(spec: P, num_dims: int, sizes: Sizes) -> ValuePlacement:
    """The placement of a spec.

    Raises:
        ValueError: it splits a dim unevenly.
    """
    if is_uneven(spec):
        title, fix = "cannot follow this spec through a function", "split it so in in_specs alone"
        refuse(title, "spec", f"{spec}", "axes that divide what they split", fix)
    dims = []
    for axes in dim_axes(spec, num_dims):
        outer, digits = 1, []
        for axis in axes:
            if axis in sizes:
                digits.append(Digit(outer, axis))
                outer *= sizes[axis]
        dims.append(tuple(digits))
    return ValuePlacement(tuple(dims))


def without_uneven(spec: P) -> P:
    """The spec of what `gather_uneven` returns."""
    return P(*(None if isinstance(entry, Uneven) else entry for entry in spec))


def _uneven_cuts(spec: P, num_dims: int) -> tuple[DimCut, ...]:
    rows = zip(dim_axes(spec, num_dims), dim_sizes(spec, num_dims), strict=True)
    return tuple(
        DimCut(dim - num_dims, axes) for dim, (axes, size) in enumerate(rows) if size is not None
    )


def gather_uneven(x: torch.Tensor, spec: P) -> torch.Tensor:
    """x with its `Uneven` dims whole, without padding; one all_gather per axis."""
    return join_parts(x, _uneven_cuts(spec, x.dim()), spec)


def take_uneven(x: torch.Tensor, spec: P) -> torch.Tensor:
    """This rank's part of `Uneven` dims that all ranks have whole; no communication."""
    return take(x, _uneven_cuts(spec, x.dim()))


def spec_of(placement: ValuePlacement, sizes: Sizes) -> P | None:
    """The spec that means this; None where none does (partial, or a dim split inside blocks)."""
    if placement.partial:
        return None
    entries = []
    for digits in placement.dims:
        outer = 1
        for digit in digits:
            if digit.outer != outer:
                return None
            outer *= sizes[digit.axis]
        entries.append(as_entry([digit.axis for digit in digits]))
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def local_shape(shape: Sequence[int], placement: ValuePlacement, sizes: Sizes) -> tuple[int, ...]:
    """The shape of what a rank holds of a value of this global shape."""
    return tuple(
        size // math.prod(sizes[d.axis] for d in digits)
        for size, digits in zip(shape, placement.dims, strict=True)
    )


def fits(digits: Digits, size: int, sizes: Sizes) -> bool:
    """Whether these axes can split a dim of this size evenly, each inside the one before.

    Size 0 is as of any.
    """
    done = 1
    for outer, axis in digits:
        if outer % done or size % (outer * sizes[axis]):
            return False
        done = outer * sizes[axis]
    return True


def blocks_outside(digits: Digits, sizes: Sizes) -> int:
    """The blocks outside of a further axis that splits the dim inside of these."""
    return digits[-1].outer * sizes[digits[-1].axis] if digits else 1


# --- dims as products of letters: what rules speak of


def from_letters(rows: Iterable[tuple[int, Digits]]) -> Digits:
    """The digits of a dim whose letters, major to minor, have these sizes and digits."""
    start, found = 1, []
    for size, digits in rows:
        found += [Digit(start * outer, axis) for outer, axis in digits]
        start *= size
    return tuple(found)


# --- moves


def steps(
    source: ValuePlacement, target: ValuePlacement, sizes: Sizes
) -> list[tuple[str, str, tuple]]:
    """The collectives of a move, in order: ``(name, axis, where)``.

    Slices come first, since they make what is communicated smaller, then what is reduced or
    exchanged, then gathers. An axis whose place in its dim changes is gathered and sliced.
    """
    before, after, partial = source.split, target.split, dict(source.partial)
    wanted = dict(target.partial)
    first, middle, last = [], [], []
    again = []  # splits that others must make room for
    for axis in sizes:
        old, new, kind = before.get(axis), after.get(axis), partial.get(axis)
        if axis in wanted:
            assert kind in (None, wanted[axis]), (source, target)
            last += [("all_gather", axis, old)] if old is not None else []
            again += [("share", axis, (wanted[axis],))] if kind is None else []
        elif kind is not None and new is not None and kind == "sum":
            middle.append(("psum_scatter", axis, new))
        elif kind is not None:
            middle.append((f"p{kind}", axis, ()))
            if new is not None:
                again.append(("slice", axis, new))
        elif old == new:
            continue
        elif old is None:
            first.append(("slice", axis, new))
        elif new is None:
            last.append(("all_gather", axis, old))
        elif old[0] != new[0]:
            middle.append(("all_to_all", axis, (old, new)))
        else:
            last.append(("all_gather", axis, old))
            again.append(("slice", axis, new))
    for order in ([*first, *middle, *last, *again], [*last, *middle, *first, *again]):
        if _is_possible(source, order, sizes):
            return order
    return _gather_and_slice(source, target)


def _is_possible(source: ValuePlacement, order: Sequence[tuple], sizes: Sizes) -> bool:
    """Whether no step splits a dim where another axis, which a later step takes away, still is."""
    state = source
    for name, axis, where in order:
        state = _apply_step(state, name, axis, where)
        if not all(fits(digits, 0, sizes) for digits in state.dims):
            return False
    return True


def _gather_and_slice(
    source: ValuePlacement, target: ValuePlacement
) -> list[tuple[str, str, tuple]]:
    """The move that is always possible: gather all that changes its place, then slice."""
    before, after = source.split, target.split
    order = [("all_gather", a, old) for a, old in before.items() if after.get(a) != old]
    order += [(f"p{kind}", a, ()) for a, kind in source.partial if a not in dict(target.partial)]
    order += [("slice", a, new) for a, new in after.items() if before.get(a) != new]
    had = dict(source.partial)
    return order + [("share", a, (kind,)) for a, kind in target.partial if a not in had]


def _apply_step(state: ValuePlacement, name: str, axis: str, where: tuple) -> ValuePlacement:
    if name in ("slice", "psum_scatter"):
        return state.splitting(axis, *where)
    if name == "all_to_all":
        return state.splitting(axis, *where[1])
    if name == "share":
        return replace(state, partial=(*state.partial, (axis, where[0])))
    return state.without(axis)


def move_cost(
    shape: Sequence[int],
    itemsize: int,
    source: ValuePlacement,
    target: ValuePlacement,
    sizes: Sizes,
    cost: CollectiveCost | None = None,
) -> float:
    """The cost of a move of a value of this global shape: `cost`, or bytes that a rank sends."""
    state, total = source, 0.0
    for name, axis, where in steps(source, target, sizes):
        held = itemsize * math.prod(local_shape(shape, state, sizes))
        if name not in ("slice", "share"):
            payload = held * sizes[axis] if name == "all_gather" else held
            total += cost(name, axis, payload) if cost else bytes_sent(name, sizes[axis], payload)
        state = _apply_step(state, name, axis, where)
    return total


def bytes_sent(op: str, n: int, payload_bytes: int) -> int:
    """The bytes that each of n ranks sends in a collective, by ring algorithms."""
    return (2 if op in ("psum", "pmax", "pmin") else 1) * payload_bytes * (n - 1) // n


def move(
    x: torch.Tensor,
    source: ValuePlacement,
    target: ValuePlacement,
    sizes: Sizes,
    equal: Collection[str] = (),
) -> torch.Tensor:
    """This rank's part of a value by `target`, from its part by `source`.

    Collectives: those of `steps`, one each. Integers and booleans move as well. Over the axes
    `equal` a sum's cotangents are equal on all ranks, so that backward sends none.
    """
    state = source
    for name, axis, where in steps(source, target, sizes):
        if name == "psum" and axis in equal:
            x = lax.psum(x, axis, equal_cotangents=True)
        else:
            x = _run_step(x, state, name, axis, where, sizes)
        state = _apply_step(state, name, axis, where)
    return x


def gather_together(
    xs: Sequence[torch.Tensor], sources: Sequence[ValuePlacement], axis: str, sizes: Sizes
) -> list[torch.Tensor]:
    """Values that an axis splits, replicated over it: one all_gather of all of them."""
    every = lax.all_gather(torch.cat([x.reshape(-1) for x in xs]), axis)
    found = []
    parts = every.split([x.numel() for x in xs], 1)
    for x, source, part in zip(xs, sources, parts, strict=True):
        dim, outer = source.split[axis]
        shape = x.unflatten(
            dim, (_count_outside(source.without(axis).dims[dim], outer, sizes), -1)
        ).shape
        found.append(part.unflatten(1, shape).movedim(0, dim + 1).flatten(dim, dim + 2))
    return found


def _run_step(x, state: ValuePlacement, name: str, axis: str, where: tuple, sizes: Sizes):
    n = sizes[axis]
    if name in ("psum", "pmax", "pmin"):
        return getattr(lax, name)(x, axis)
    if name == "share":
        return _keep_on_first(x, axis) if where[0] == "sum" else x
    if name == "all_to_all":
        source, target = where
        return _exchange_dims(x, state, axis, source, target, sizes)
    dim, outer = where
    digits = state.without(axis).dims[dim]
    outside = _count_outside(digits, outer, sizes)
    if name == "all_gather":
        x = x.unflatten(dim, (outside, -1))
        return lax.all_gather(x, axis, axis=dim + 1).flatten(dim, dim + 2)
    x = x.unflatten(dim, (outside, n, -1))
    if name == "psum_scatter":
        x = lax.psum_scatter(x, axis, scatter_dimension=dim + 1)
    else:
        index = lax.axis_index(axis)
        if isinstance(index, int):
            x = x.select(dim + 1, index)
        else:
            index = compat.constant(index, x.device).reshape(1)
            x = x.movedim(dim + 1, 0).index_select(0, index).squeeze(0)
    return x.flatten(dim, dim + 1)


def _keep_on_first(x: torch.Tensor, axis: str) -> torch.Tensor:
    """x on the first rank, zeros on the others: values whose sum it is."""
    first = compat.constant(lax.axis_index(axis) == 0, x.device)
    return torch.where(first, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _exchange_dims(
    x, state: ValuePlacement, axis: str, source, target, sizes: Sizes
) -> torch.Tensor:
    """`x`, whose dim of `source` an axis has split, with that of `target` split instead."""
    (dim, outer), (other, blocks) = source, target
    n = sizes[axis]
    x = x.unflatten(other, (_count_outside(state.dims[other], blocks, sizes), n, -1))
    at = dim if dim < other else dim + 2
    x = x.unflatten(at, (_count_outside(state.without(axis).dims[dim], outer, sizes), -1))
    leaves = other + 2 if dim < other else other + 1
    x = lax.all_to_all(x, axis, leaves, at + 1 if leaves > at else at)
    for place, parts in sorted(((dim, 3), (other, 2))):
        x = x.flatten(place, place + parts - 1)
    return x


def _count_outside(digits: Digits, outer: int, sizes: Sizes) -> int:
    """The blocks outside of a digit that a rank holds."""
    return outer // math.prod(sizes[axis] for blocks, axis in digits if blocks < outer)
