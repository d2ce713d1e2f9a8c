"""Associative scan: all prefixes of a sequence of elements, combined by any associative function.

y_k = x_0 * x_1 * ... * x_k for an associative ``*``, which need not commute: sums, products of
matrices, the affine maps of a linear recurrence. Elements lie along a dim, along mesh axes, or
along a dim that mesh axes divide. Along a dim even and odd elements are combined and the prefixes
of half as many found in the same way (Blelloch 1990); over an axis every rank combines with what it
receives from ranks 1, 2, 4, ... before it (Hillis & Steele 1986). Derivatives are those of its
parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from functron.core import compat, tree
from functron.core.closure import copy_views, note_writes
from functron.core.errors import Problem, public, raise_problems, refuse, tensor_problem
from functron.spmd.axes import Axis, lookup, user_line
from functron.spmd.collectives import pbroadcast, ppermute

Leaves = Sequence[torch.Tensor]
Combine = Callable[[Leaves, Leaves], Leaves]


@public
def associative_scan(
    fn: Callable, elems: tree.Tree, reverse: bool = False, axis: int | str | Sequence[int | str] = 0
) -> tree.Tree:
    """y_k = x_0 * ... * x_k of the elements x along `axis`, with ``a * b = fn(a, b)``.

    Varying or replicated -> varying, of the same shapes. Over a mesh axis of n ranks ceil(log2 n)
    ppermutes follow each other, each of the bytes of one element, of which a rank sends and
    receives at most one; backward the same with the pairs reversed. An element is all of `elems`,
    or with a dim one slice of it, so the bytes do not grow with the length of sequences. Each
    further mesh axis also takes a pbroadcast of an element, backward an all-reduce. `fn` is called
    some 2 log2 times the length of the dim, and once or twice for every ppermute.

    >>> lax.associative_scan(torch.add, torch.arange(4))
    tensor([0, 1, 3, 6])

    Of ``h_t = a_t h_{t-1} + b_t`` with all tokens of a sequence that ranks of cp divide::

        def after(one, two):
            return one[0] * two[0], two[0] * one[1] + two[1]

        _, h = lax.associative_scan(after, (a, b), axis=("cp", 0))

    Args:
        fn: ``(a, b) -> c``, associative: of two elements, or with a dim of two slices of elements
            along it, of any one size; a comes before b. It returns the same structure, shapes and
            dtypes. What it gives on ranks that receive nothing is not used; they give it their own
            element twice.
        elems: a tree of tensors, alike on all ranks in structure, shapes and dtypes.
        reverse: from the last element on: y_k = x_n * ... * x_k, so that a comes after b.
        axis: a dim of every leaf, as JAX's; or the name of a mesh axis, whose ranks have an element
            each; or names, major to minor, with a dim as the last, which they divide:
            ``("cp", 0)``. Axes of size 1, or absent, are left out.

    Raises:
        ValueError: `axis` is none of that, sizes along the dim differ, or `fn` returns something
            else than an element.
        TypeError: `elems` has leaves that are no tensors.
    """
    names, dim = _split_axis(axis)
    axes = lookup(names)
    leaves, structure = tree.flatten(elems)
    dim = _check_elements(elems, dim)

    def combine(before: Leaves, after: Leaves) -> Leaves:
        one, two = tree.unflatten(structure, before), tree.unflatten(structure, after)
        check_writes = note_writes("associative_scan: fn", before, after)
        made = fn(one, two)
        check_writes()
        return _check_result(one, made)

    total = scanned = leaves
    if dim is not None:
        if leaves[0].shape[dim] == 0:
            return elems
        turned = [x.flip(dim) for x in leaves] if reverse else leaves
        scanned = _scan_dim(combine, turned, dim)
        total = [x.narrow(dim, x.shape[dim] - 1, 1) for x in scanned]
    for place, one in enumerate(reversed(axes), 1):
        apart = dim is not None or place > 1  # what ranks combine is not yet what they return
        before, total = _combine_ranks(combine, total, one, reverse, exclusive=apart)
        if apart:
            rest = [b.expand_as(x) for b, x in zip(before, scanned, strict=True)]
            scanned = _choose(_count(one, reverse) > 0, combine(rest, scanned), scanned)
        else:
            scanned = total
        if place < len(axes):
            total = pbroadcast(total, one.name, 0 if reverse else one.size - 1)
    if dim is not None and reverse:
        scanned = [x.flip(dim) for x in scanned]
    out = tree.unflatten(structure, scanned)
    return copy_views(out, elems, fn)


def _scan_dim(combine: Combine, elems: Leaves, dim: int) -> Leaves:
    """All prefixes along a dim: those that end at odd places are the prefixes of pairs."""
    size = elems[0].shape[dim]
    if size < 2:
        return elems
    lead = (slice(None),) * dim

    def cut(values: Leaves, *bounds: int) -> Leaves:
        return [x[(*lead, slice(*bounds))] for x in values]

    odd = _scan_dim(combine, combine(cut(elems, 0, size - 1, 2), cut(elems, 1, size, 2)), dim)
    even = cut(elems, 0, 1)
    if size > 2:
        later = combine(cut(odd, 0, (size - 1) // 2), cut(elems, 2, size, 2))
        even = [torch.cat(pair, dim) for pair in zip(even, later, strict=True)]
    half = size // 2
    pairs = zip(cut(even, 0, half), odd, strict=True)
    both = [torch.stack(pair, dim + 1).flatten(dim, dim + 1) for pair in pairs]
    if size % 2:
        both = [torch.cat(rows, dim) for rows in zip(both, cut(even, half, half + 1), strict=True)]
    return both


def _combine_ranks(
    combine: Combine, own: Leaves, axis: Axis, reverse: bool, exclusive: bool
) -> tuple[Leaves, Leaves]:
    """The combination of ranks before this one, where `exclusive`, and that with this one.

    The first rank has something of its own for the former.
    """
    before, upto, step = own, own, 1
    while step < axis.size:
        pairs = [(rank, rank + step) for rank in range(axis.size - step)]
        arrived = _count(axis, reverse) >= step
        got = ppermute(upto, axis.name, [(b, a) for a, b in pairs] if reverse else pairs)
        # zeros, where nothing arrives, may be outside of the domain of `fn` or of its derivative
        got = _choose(arrived, got, upto)
        if exclusive:
            before = got if step == 1 else _choose(arrived, combine(got, before), before)
        upto = _choose(arrived, combine(got, upto), upto)
        step *= 2
    return before, upto


def _count(axis: Axis, reverse: bool) -> torch.Tensor | int:
    """The number of ranks before this one."""
    return axis.size - 1 - axis.index if reverse else axis.index


def _choose(condition: torch.Tensor | bool, one: Leaves, other: Leaves) -> Leaves:
    pairs = zip(one, other, strict=True)
    return [torch.where(compat.constant(condition, a.device), a, b) for a, b in pairs]


def _split_axis(axis: object) -> tuple[list[str], int | None]:
    """The names of mesh axes and the dim of an argument `axis`."""
    parts = list(axis) if isinstance(axis, (tuple, list)) else [axis]
    dim: Any = parts.pop() if parts and _is_dim(parts[-1]) else None
    names = [part for part in parts if isinstance(part, str)]
    if len(names) < len(parts) or len(set(names)) < len(names) or not (names or _is_dim(dim)):
        wanted = "a dim, the name of a mesh axis, or names, each once, with a dim as the last"
        fix = 'axis=0, axis="cp" or axis=("cp", 0)'
        refuse(f"associative_scan at {user_line()}", "axis", repr(axis), wanted, fix)
    return names, dim


def _is_dim(part: object) -> bool:
    return isinstance(part, int) and not isinstance(part, bool)


def _check_elements(elems: tree.Tree, dim: int | None) -> int | None:
    """The dim, counted from the first one, as JAX counts it: by the first leaf."""
    rows = [(f"elems/{path}" if path else "elems", leaf) for path, leaf in tree.items(elems)]
    if wrong := [tensor_problem(path, x) for path, x in rows if not isinstance(x, torch.Tensor)]:
        _refuse_elements(wrong, TypeError)
    if not rows:
        wanted = "a tensor, or a tree of them"
        _refuse_elements([Problem("elems", "a tree without leaves", wanted)])
    if dim is None:
        return None
    path, first = rows[0]
    if not -first.dim() <= dim < first.dim():
        wanted = f"a dim from {-first.dim()} to {first.dim() - 1}" if first.dim() else "one with it"
        got = f"shape {tuple(first.shape)} and axis={dim}"
        _refuse_elements([Problem(path, got, wanted, "choose a dim of every leaf")])
    dim %= first.dim()
    size, wanted = first.shape[dim], f"{first.shape[dim]} elements in dim {dim}, as {path}"
    if wrong := [
        Problem(at, f"shape {tuple(x.shape)}", wanted)
        for at, x in rows
        if x.dim() <= dim or x.shape[dim] != size
    ]:
        _refuse_elements(wrong)
    return dim


def _refuse_elements(problems: list[Problem], error: type[Exception] = ValueError) -> NoReturn:
    title = f"associative_scan at {user_line()} cannot use these elements"
    raise_problems(title, problems, error)
    raise AssertionError("unreachable")


def _check_result(like: tree.Tree, made: tree.Tree) -> Leaves:
    """The leaves of what `fn` returned, which must be as its first argument."""
    names = "the first argument of fn", "what it returned"
    found = tree.same_structure(like, made, names=names)
    before = tree.leaves(like)
    kinds = [(_describe(old), _describe(new)) for old, new in zip(before, found, strict=True)]
    if any(old != new for old, new in kinds):
        raise_problems(
            f"associative_scan at {user_line()}: fn must return an element like those it takes",
            [
                Problem(path or "result", new, old, "cast or reshape it in fn")
                for path, (old, new) in zip(tree.paths(like), kinds, strict=True)
                if old != new
            ],
        )
    return found


def _describe(x: object) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else repr(x)
