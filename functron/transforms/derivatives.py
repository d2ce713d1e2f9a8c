"""Forward mode, and derivatives of functions whose results are trees: JAX's words, on any mesh.

Forward mode is torch's, by which every operation of functron has a tangent: collectives, `remat`
(whose tangent is computed again as well), `custom_vjp` (whose backward is transposed), `scan`,
parameters that are gathered at use, attention and losses. Where a program keeps calls of transforms
whole (`functron.partition`), what is in a `jvp` is written out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from functron.core import tree
from functron.core.closure import note_writes, refuse_holders, refuse_orphans
from functron.core.errors import Problem, public, raise_problems
from functron.core.scopes import in_phase
from functron.program.recorder import keeper, keeping
from functron.spmd.axes import TracedAxis, scope, user_line
from functron.spmd.simulate import as_share, lacks_share, varying_axes
from functron.transforms.capture import Relay, unwatched
from functron.transforms.custom_vjp import custom_vjp, finding_rules
from functron.transforms.gradient import (
    IrreversibleError,
    TensorSlots,
    as_float_tensors,
    check_leaves,
    check_replicated,
    is_differentiated_outside,
    loss_seed,
    replace_at,
    require_replicated,
    share,
    split_output,
    value_and_grad,
)


class _Flat:
    """A function of trees as one of their floating-point leaves.

    It returns its floating-point results, then all other tensors: results and those of `aux`.

    Attributes:
        moving: the leaves.
        are_floats: which results are floating point, once it has run.
        outside: the results without their tensors, once it has run.
    """

    def __init__(self, f: Callable, primals: tuple, has_aux: bool):
        self._f, self._has_aux = f, has_aux
        self._leaves, self.structure = tree.flatten(primals)
        self._places = [i for i, leaf in enumerate(self._leaves) if tree.is_inexact(leaf)]
        self.moving = [self._leaves[i] for i in self._places]
        self.outside = self._aux = TensorSlots(self.structure, [], [])
        self.are_floats: list[bool] = []

    def __call__(self, *values: torch.Tensor) -> tuple[tuple, list]:
        given = replace_at(self._leaves, self._places, values)
        made = self._f(*tree.unflatten(self.structure, given))
        value, aux = made if self._has_aux else (made, None)
        outputs, self.outside = split_output(value)
        others, self._aux = split_output(aux)
        self.are_floats = list(map(tree.is_inexact, outputs))
        floats = tuple(itertools.compress(outputs, self.are_floats))
        return floats, [x for x in outputs if not tree.is_inexact(x)] + others

    def results(self, floats: Sequence, others: Sequence) -> tuple[tree.Tree, tree.Tree]:
        """The trees of results and of auxiliary values."""
        pool, rest = iter(floats), iter(others)
        out = self.outside.fill([next(pool if one else rest) for one in self.are_floats])
        return out, self._aux.fill(rest)

    def tangents(self, moved: Sequence) -> tree.Tree:
        """The tree of the results' tangents, with None in place of all other leaves."""
        pool, slots = iter(moved), self.outside
        values: list[Any] = [next(pool) if one else None for one in self.are_floats]
        return slots._replace(leaves=[None] * len(slots.leaves)).fill(values)

    def take(self, tangents: tuple, name: str) -> list[torch.Tensor]:
        """The tangents of `moving`, of trees like the arguments'.

        Raises:
            ValueError: they have another structure, shape or dtype.
        """
        paths = tree.paths(tree.unflatten(self.structure, self._leaves))
        nones = [x if tree.is_inexact(x) else None for x in self._leaves]
        wanted = tree.unflatten(self.structure, nones)
        self._refuse_still(tangents, name)
        given = tree.same_structure(wanted, tangents, names=("the primals", "the tangents"))
        given: Any = [
            torch.full_like(x, t) if isinstance(t, float) and not x.dim() else t
            for x, t in zip(self.moving, given, strict=True)
        ]
        rows = list(zip([paths[i] for i in self._places], self.moving, given, strict=True))
        raise_problems(
            f"{name}: tangents must be like the primals",
            [
                Problem(
                    f"tangents/{path}",
                    f"{tuple(t.shape)} {t.dtype}" if isinstance(t, torch.Tensor) else repr(t),
                    f"{tuple(x.shape)} {x.dtype}",
                    "expand or convert it",
                )
                for path, x, t in rows
                if not isinstance(t, torch.Tensor) or (t.shape, t.dtype) != (x.shape, x.dtype)
            ],
        )
        return given

    def _refuse_still(self, tangents: tuple, name: str) -> None:
        """Raise TypeError for tangents of what is neither floating point nor complex."""
        primals = dict(tree.items(tree.unflatten(self.structure, self._leaves)))
        raise_problems(
            f"{name}: only floating-point primals have tangents",
            [
                Problem(
                    f"tangents/{path}",
                    f"one, of a primal of {_describe_kind(primals[path])}",
                    "None",
                    "make the primal floating-point, such as 3.0",
                )
                for path, _ in tree.items(tangents)
                if path in primals and not tree.is_inexact(primals[path])
            ],
            TypeError,
        )


def _describe_kind(x: Any) -> str:
    return str(x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__


def _move_floats(primals: tuple, tangents: tuple) -> tuple:
    """The primals, with tensors in place of Python's floats that have tangents."""
    moved = {path for path, _ in tree.items(tuple(tangents))}
    leaves, structure = tree.flatten(tuple(primals))
    rows = zip(tree.paths(tuple(primals)), leaves, strict=True)
    return tree.unflatten(structure, [as_float_tensors(x) if p in moved else x for p, x in rows])


class _WrittenOut:
    """Runs transforms where a keeper would have recorded their calls, which have no tangents."""

    def __init__(self, outer: Any):
        self._outer = outer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outer, name)

    def stops_gradients(self) -> bool:
        return self._outer.stops_gradients(written_out=True)

    def value_and_grad(self, f, positions, has_aux: bool, args, kwargs) -> tuple[Any, tuple]:
        def inside(*args, **kwargs):
            with keeping(self):
                return f(*args, **kwargs)

        with keeping(None):
            return value_and_grad(inside, positions, has_aux=has_aux)(*args, **kwargs)

    def remat(self, f, policy, args, kwargs) -> tree.Tree:
        return f(*args, **kwargs)

    def custom_vjp(self, f, forward, backward, args) -> tree.Tree:
        with keeping(None):
            return custom_vjp(f, forward, backward)(*args)


def _written_out() -> contextlib.AbstractContextManager:
    """Transforms in this with block run, also where a program would keep their calls whole."""
    outer = keeper()
    if outer is None or isinstance(outer, _WrittenOut):
        return contextlib.nullcontext()
    return keeping(_WrittenOut(outer))


def _differentiated_outside(f: Callable, args: tree.Tree) -> bool:
    return keeper() is not None or is_differentiated_outside(f, args)


def _relay(relay: Relay, f: Callable, has_aux: bool, call: Callable) -> tuple:
    """``call(f)``, of an `f` with auxiliary values, whose captured values are handed on."""
    inner = relay.around(f)

    def with_captured(*args, **kwargs) -> tuple:
        out, captured = inner(*args, **kwargs)
        value, aux = out if has_aux else (out, None)
        return value, (aux, captured)

    with unwatched():
        *made, (aux, captured) = call(with_captured)
    relay.take(captured)
    return (*made, aux) if has_aux else tuple(made)


def _push(flat: _Flat, tangents: Sequence) -> tuple[tuple, tuple, list]:
    """Results, tangents of the floating-point ones, and the other tensors."""
    if not flat.moving:
        floats, others = flat()
        return floats, tuple(map(torch.zeros_like, floats)), others
    made: Any = torch.func.jvp(flat, tuple(flat.moving), tuple(tangents), has_aux=True)
    floats, moved, others = made
    # torch's tangents of a real tensor times a complex number are wider than the product
    moved = tuple(t.to(x.dtype) for x, t in zip(floats, moved, strict=True))
    return floats, moved, others


@public
def jvp(f: Callable, primals: tuple, tangents: tuple, *, has_aux: bool = False) -> tuple:
    """``f(*primals)`` and its derivative in the direction of `tangents`, by forward mode.

    It costs about twice what `f` does, and no memory. Of a gradient it is a Hessian-vector product:
    ``ft.jvp(ft.grad(loss), (params,), (v,))[1]``. Inside a mapped program tangents are each rank's
    own, as values are: replicated ones of replicated arguments. Of `grad` there, it is the rank's
    share, for `sync_gradients`.

    >>> ft.jvp(lambda x: x**3, (torch.tensor(2.0),), (torch.tensor(1.0),))
    (tensor(8.), tensor(12.))
    >>> ft.jvp(ft.grad(lambda x: x**3), (torch.tensor(2.0),), (torch.tensor(1.0),))[1]
    tensor(12.)

    Args:
        f: returns a tree; with `has_aux`, ``(tree, anything)``.
        primals: a tuple with a tree for each argument. Python's floats with a tangent are 0-dim
            tensors of torch's default dtype for `f`.
        tangents: trees like them, with None in place of leaves that are neither floating point nor
            complex, and floats for 0-dim ones.
        has_aux: whether `f` returns auxiliary values as well, which have no tangent.

    Returns:
        ``(out, tangent)``, or ``(out, tangent, aux)``; the tangent has None for such leaves too.

    Raises:
        ValueError: tangents are not like the primals.
        TypeError: there is a tangent of what is not floating point; or a primal or result has an
            object with tensors, such as an unregistered dataclass.
    """
    if not isinstance(primals, (tuple, list)) or not isinstance(tangents, (tuple, list)):
        kinds = type(primals).__name__, type(tangents).__name__
        raise TypeError(
            f"jvp at {user_line()}: got primals and tangents of {' and '.join(kinds)}; wanted "
            "tuples, with a tree for each argument of f; fix: jvp(f, (x,), (tangent,))"
        )
    if relay := Relay():
        return _relay(relay, f, has_aux, lambda g: jvp(g, primals, tangents, has_aux=True))
    refuse_holders("jvp cannot see into these", "primal", primals)
    flat = _Flat(f, _move_floats(primals, tangents), has_aux)
    refuse_orphans("jvp", flat.moving)
    check_writes = note_writes("jvp: f", primals, tangents)
    with _written_out():
        floats, moved, others = _push(flat, flat.take(tuple(tangents), "jvp"))
    check_writes()
    out, aux = flat.results(floats, others)
    return (out, flat.tangents(moved), aux) if has_aux else (out, flat.tangents(moved))


@public
def linearize(f: Callable, *primals: tree.Tree, has_aux: bool = False) -> tuple:
    """``f(*primals)`` and its derivative there, a linear function of tangents.

    `f` runs once: what is computed of tangents is the transpose of its backward, which keeps what
    `f` computed for as long as the function lives (`remat` computes its own again). With a
    `functron.lax.while_loop` in `f`, which has no backward, `f` runs again with each tangent as of
    `jvp`: its linear part is that loop, as in JAX; so it does where `f` has a `custom_vjp` or
    `custom_jvp` in it.
    For one tangent `jvp` is cheaper; in a per-rank program that is traced it is what runs, and
    compilers merge what is equal.

    >>> out, push = ft.linearize(lambda x: x**3, torch.tensor(2.0))
    >>> out, push(torch.tensor(1.0)), push(torch.tensor(2.0))
    (tensor(8.), tensor(12.), tensor(24.))

    Args:
        f: returns a tree; with `has_aux`, ``(tree, anything)``.
        primals: a tree for each argument. Python's floats in them are 0-dim tensors of torch's
            default dtype for `f`.
        has_aux: whether `f` returns auxiliary values as well.

    Returns:
        ``(out, push)``, or ``(out, push, aux)``; ``push(*tangents)`` is the tangent of `jvp`.

    Raises:
        ValueError: tangents are not like the primals.
        TypeError: there is a tangent of what is not floating point; or a primal or result has an
            object with tensors, such as an unregistered dataclass.
    """
    if relay := Relay():
        return _relay(relay, f, has_aux, lambda g: linearize(g, *primals, has_aux=True))
    refuse_holders("linearize cannot see into these", "primal", primals)
    flat = _Flat(f, as_float_tensors(primals), has_aux)
    refuse_orphans("linearize", flat.moving)
    with _written_out():
        floats, others, linear = _linear(flat)
    out, aux = flat.results(floats, others)
    are_shares = [not lacks_share(x) for x in floats]

    @public
    def push(*tangents: tree.Tree) -> tree.Tree:
        given = tuple(flat.take(tangents, "linearize"))
        with _written_out():
            moved = linear(given, _differentiated_outside(f, (primals, tangents)))
        rows = zip(moved, are_shares, strict=True)
        return flat.tangents([as_share(x) if is_one else x for x, is_one in rows])

    return (out, push, aux) if has_aux else (out, push)


def _linear(flat: _Flat) -> tuple[tuple, list, Callable[[tuple, bool], Sequence]]:
    """Results, the other tensors, and ``(tangents, differentiated again)`` to results' tangents."""
    traced = any(isinstance(axis, TracedAxis) for axis in scope().axes.values())
    if traced or not flat.moving:  # a program's check goes by what its operations are
        return *flat(*flat.moving), lambda given, again: _push(flat, given)[1]
    with finding_rules() as rules:
        made: Any = torch.func.vjp(flat, *flat.moving, has_aux=True)
    floats, pull, others = made
    if not floats:
        return floats, others, lambda given, again: ()
    if rules:  # of which the transpose of backward may be another derivative than that of jvp
        return floats, others, lambda given, again: _push(flat, given)[1]
    zeros = [torch.zeros_like(x) for x in floats]
    try:
        with in_phase("backward"):
            transpose: Any = torch.func.vjp(lambda *cts: pull(cts), *zeros)[1]
    except IrreversibleError:  # of a loop of unknown length, whose linear part is a loop as well
        return floats, others, lambda given, again: _push(flat, given)[1]
    keep = {"retain_graph": True}
    return floats, others, lambda given, again: transpose(given, **keep, create_graph=again)


class _Chosen(NamedTuple):
    """The arguments to differentiate: their tree, and the function of it alone."""

    value: tree.Tree
    f: Callable

    @classmethod
    def of(cls, name: str, f: Callable, argnums, args: tuple, kwargs: dict) -> _Chosen:
        """Those at the positions `argnums`, which must be floating point."""
        positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        if bad := [p for p in positions if not -len(args) <= p < len(args)]:
            raise ValueError(
                f"{name} at {user_line()}: got argnums={argnums} for {len(args)} positional "
                f"arguments; wanted positions of some; fix: pass argument {bad[0]} by position"
            )
        chosen = tuple(as_float_tensors(args[p]) for p in positions)
        refuse_orphans(name, tree.leaves(chosen))
        check_leaves(tree.paths(chosen), tree.leaves(chosen))
        single = isinstance(argnums, int)

        def of_chosen(value: tree.Tree) -> tree.Tree:
            return f(*replace_at(args, positions, (value,) if single else value), **kwargs)

        return cls(chosen[0] if single else chosen, of_chosen)


def _units(like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The unit vectors of tensors together, ``[total, *shape]`` for each."""
    total, start, units = sum(x.numel() for x in like), 0, []
    for x in like:
        rows = torch.eye(total, dtype=x.dtype, device=x.device)[:, start : start + x.numel()]
        units.append(rows.reshape(total, *x.shape))
        start += x.numel()
    return units


def _refuse_integers(name: str, flat: _Flat) -> None:
    """Raise TypeError unless all results are floating-point tensors."""
    marks = flat.tangents([1] * sum(flat.are_floats))
    paths, leaves = tree.paths(marks, is_none), tree.leaves(marks, is_none)
    raise_problems(
        f"{name} cannot differentiate these results",
        [
            Problem(
                path or "the result",
                "no floating-point tensor",
                "one",
                "return it as auxiliary value, with has_aux=True",
            )
            for path, leaf in zip(paths, leaves, strict=True)
            if leaf is None
        ],
        TypeError,
    )


def _refuse_complex(results: Sequence[torch.Tensor]) -> None:
    """Raise TypeError for complex results, of which a row would be the real part's alone."""
    raise_problems(
        "jacrev cannot differentiate these results",
        [
            Problem(f"result {i}", str(x.dtype), "a floating-point tensor",
                    "return torch.view_as_real(z), or take jacfwd")
            for i, x in enumerate(results) if x.is_complex()
        ],
        TypeError,
    )  # fmt: skip


def is_none(leaf: Any) -> bool:
    """Whether it is None."""
    return leaf is None


def _assemble(flat: _Flat, value: tree.Tree, blocks: Sequence[Sequence]) -> tree.Tree:
    """The tree of results, of trees like `value`, from `blocks[result][leaf]`."""
    structure = tree.structure(value)
    return flat.outside.fill([tree.unflatten(structure, row) for row in blocks])


@public
def jacfwd(
    f: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    axes: Sequence[str] | None = None,
) -> Callable:
    """The function that computes the Jacobian of `f` by forward mode, a column for each element.

    For more results than elements of arguments; `jacrev` for the other way round. All columns are
    computed at once, in a vmap: memory is that of `f` times their number.

    Inside a mapped program every rank pushes the same column, so the arguments must be replicated
    over the mesh: of arguments of which ranks have parts, the columns of several ranks would be
    added up. `jacrev` and derivatives of the mapped function know no such restriction.

    >>> ft.jacfwd(lambda x: x**2)(torch.tensor([1.0, 2.0]))
    tensor([[2., 0.],
            [0., 4.]])

    Args:
        f: returns a tree of floating-point tensors; with `has_aux`, ``(tree, anything)``.
        argnums: the position of the tree to differentiate, or several; Python's floats as of
            `grad`.
        has_aux: whether `f` returns auxiliary values as well.
        axes: the mesh axes over which the arguments are replicated; None: all. Along the others
            every rank's results must depend on its own arguments alone.

    Returns:
        A function giving the tree of results, with a tree like the argument (with several, a tuple
        of trees) in place of each leaf, of shapes ``(*result.shape, *leaf.shape)``; with `has_aux`,
        ``(jacobian, aux)``.

    Raises:
        ValueError: an argument varies over one of `axes` (under shard_map's check).
        TypeError: a leaf to differentiate, or a result, is not floating point.
    """

    @public
    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        if relay := Relay():
            again = lambda g: jacfwd(g, argnums, has_aux=True, axes=axes)(*args, **kwargs)  # noqa: E731
            made = _relay(relay, f, has_aux, again)
            return made if has_aux else made[0]
        chosen = _Chosen.of("jacfwd", f, argnums, args, kwargs)
        _check_arguments("jacfwd", chosen.value, axes)
        flat = _Flat(chosen.f, (chosen.value,), has_aux)
        count = sum(x.numel() for x in flat.moving)

        def column(*tangents: torch.Tensor) -> tuple[tuple, tuple, list]:
            return _push(flat, tangents)

        with _written_out():
            if count:
                floats, columns, others = torch.func.vmap(column)(*_units(flat.moving))
                # torch's tangent of a 0-dim x times a Python number is float64 under vmap
                columns = [x.to(y.dtype) for x, y in zip(columns, floats, strict=True)]
                others = [x.select(0, 0) for x in others]
            else:
                floats, others = flat(*flat.moving)
                columns = [x.new_empty((0, *x.shape)) for x in floats]
        _refuse_integers("jacfwd", flat)
        sizes = [x.numel() for x in flat.moving]
        blocks = [
            [
                part.movedim(0, -1).reshape((*part.shape[1:], *x.shape))
                for part, x in zip(rows.split(sizes), flat.moving, strict=True)
            ]
            for rows in columns
        ]
        jacobian = _assemble(flat, chosen.value, blocks)
        return (jacobian, flat.results(floats, others)[1]) if has_aux else jacobian

    return wrapped


def _check_arguments(name: str, value: tree.Tree, axes: Sequence[str] | None) -> None:
    """Raise ValueError for arguments, pushed by all ranks at once, of which ranks have others."""
    if not scope().check:
        return
    for leaf in tree.leaves(value):
        require_replicated(leaf, axes)
    raise_problems(
        f"{name} at {user_line()}",
        [
            Problem(
                path or "the argument",
                f"one that varies over {', '.join(map(repr, over))}",
                "one that all ranks have: each of them pushes its own, and what they add up would "
                "mix their derivatives",
                "differentiate the mapped function, outside of shard_map; or ft.jacrev, for each "
                "rank's own part; or, where a rank's result depends on its own argument alone, "
                f"leave {', '.join(map(repr, over))} out of axes=(...)",
            )
            for path, leaf in tree.items(value)
            if (over := [x for x in varying_axes(leaf) if axes is None or x in axes])
        ],
    )


@public
def jacrev(
    f: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    axes: Sequence[str] | None = None,
) -> Callable:
    """The function that computes the Jacobian of `f` by reverse mode, a row for each result.

    `grad` of functions with more results than one: inside a mapped program results are replicated
    over the mesh, and what a rank gets is its share of their derivatives, for `sync_gradients`.
    `f` runs once, and backward in a vmap over all rows.

    >>> ft.jacrev(lambda x: x**2)(torch.tensor([1.0, 2.0]))
    tensor([[2., 0.],
            [0., 4.]])

    Args:
        f, argnums, has_aux: as of `jacfwd`.
        axes: the mesh axes over which the results are replicated; None: all. Along the others every
            rank has results of its own (`value_and_grad`).

    Returns:
        As `jacfwd`.

    Raises:
        ValueError: a result varies over one of `axes`, or is replicated over another axis (under
            shard_map's check).
        TypeError: a leaf to differentiate, or a result, is not floating point.
    """

    @public
    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        if relay := Relay():
            again = lambda g: jacrev(g, argnums, has_aux=True, axes=axes)(*args, **kwargs)  # noqa: E731
            made = _relay(relay, f, has_aux, again)
            return made if has_aux else made[0]
        chosen = _Chosen.of("jacrev", f, argnums, args, kwargs)
        flat = _Flat(chosen.f, (chosen.value,), has_aux)
        outer = _differentiated_outside(f, (args, kwargs))
        with _written_out():
            made: Any = torch.func.vjp(flat, *flat.moving, has_aux=True)
            floats, pull, others = made
            _refuse_integers("jacrev", flat)
            _refuse_complex(floats)
            for x in floats:
                check_replicated("jacrev", "a result", x, axes)
            seeds = [
                unit * loss_seed(x.new_empty(()), axes)
                for unit, x in zip(_units(floats), floats, strict=True)
            ]
            with in_phase("backward"):
                rows = _pull_rows(pull, seeds, flat.moving, outer)
        sizes = [x.numel() for x in floats]
        columns = [[share(part) for part in x.split(sizes)] for x in rows]
        blocks = [
            [parts[i].reshape((*y.shape, *parts[i].shape[1:])) for parts in columns]
            for i, y in enumerate(floats)
        ]
        jacobian = _assemble(flat, chosen.value, blocks)
        return (jacobian, flat.results(floats, others)[1]) if has_aux else jacobian

    return wrapped


def _pull_rows(
    pull: Callable, seeds: Sequence[torch.Tensor], like: Sequence[torch.Tensor], keep: bool
) -> Sequence[torch.Tensor]:
    """The cotangents of every row of `seeds`, for each argument."""
    if not seeds or not len(seeds[0]):
        return [x.new_zeros((0, *x.shape)) for x in like]

    def row(*seed: torch.Tensor) -> Any:
        return pull(seed, retain_graph=keep, create_graph=keep)

    return torch.func.vmap(row)(*seeds)


@public
def hessian(
    f: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    axes: Sequence[str] | None = None,
) -> Callable:
    """The function that computes the Hessian of `f`: `jacfwd` of `jacrev`.

    Inside a mapped program arguments and results are replicated over the mesh, and what a rank gets
    is its share, for `sync_gradients`. Where the whole Hessian does not fit, `jvp` of `grad` is its
    product with a vector.

    >>> ft.hessian(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0]))
    tensor([[ 6.,  0.],
            [ 0., 12.]])

    Args:
        f: returns a floating-point tensor, or a tree of some; with `has_aux`, ``(tree, anything)``.
        argnums, has_aux, axes: as of `jacfwd` and `jacrev`.

    Returns:
        A function giving the results' tree, with trees like the argument, of trees like it, in
        place of its leaves; with `has_aux`, ``(hessian, aux)``.

    Raises:
        ValueError, TypeError: as `jacfwd` and `jacrev`.
    """
    reverse = jacrev(f, argnums, has_aux=has_aux, axes=axes)
    return jacfwd(reverse, argnums, has_aux=has_aux, axes=axes)
