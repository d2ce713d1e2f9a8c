"""Gradients of per-rank programs: the same numbers on every mesh, at the memory of plain autograd.

`torch.func.grad` keeps the graph of its backward (it must allow higher orders), which costs more
than twice the peak memory and defeats remat. These use torch's tape when no transform is running
and `torch.func.vjp` otherwise, and keep the graph only where something outside differentiates.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from functron.core import compat, tree
from functron.core.closure import find_held_tensors, hoist, refuse_holders, refuse_orphans
from functron.core.errors import Problem, dataclass_fix, public, raise_problems
from functron.core.scopes import in_phase
from functron.program.recorder import keeper
from functron.spmd.axes import SimulatedAxis, TracedAxis, scope, user_line
from functron.spmd.primitives import Psum, Vary
from functron.spmd.simulate import (
    LOSS_FIX,
    as_share,
    lacks_share,
    no_share,
    share_problem,
    varying_axes,
)
from functron.spmd.spec import (
    P,
    bound_cuts,
    cuts_between,
    is_spec,
    is_uneven,
    real_mask,
    scatter,
    spec_axes,
)
from functron.transforms.capture import Relay, replacing_functions, unwatched


class IrreversibleError(ValueError):
    """A derivative in reverse reached a loop that has none."""


@public
def value_and_grad(
    f: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    axes: Sequence[str] | None = None,
) -> Callable:
    """The function that computes ``f(*args)`` and its gradient with respect to some arguments.

    Inside a mapped program `f` returns the loss, replicated over the mesh (psummed or pmeaned over
    the axes that split the batch), and each rank gets its own *share* of the gradient: summed over
    the ranks that hold the same parameter shard, by `sync_gradients`, the shares are the gradient
    of the loss. The loss counts once, not once per rank: every rank seeds backward with 1 /
    num_ranks, as `shard_map` does at its boundary. (`torch.func.grad` inside a program gives the
    derivative of each rank's own copy instead, which `sync_gradients` refuses.)

    Outside of any mesh it is `torch.func.grad_and_value` with the order of JAX's.

    >>> ft.value_and_grad(lambda x: x**3)(torch.tensor(2.0))
    (tensor(8.), tensor(12.))

    Args:
        f: returns a floating-point scalar; with `has_aux`, ``(scalar, anything)``.
        argnums: the position of the tree to differentiate, or several. Python's floats in them are
            0-dim tensors of torch's default dtype for `f`, and so are their gradients.
        has_aux: whether `f` returns auxiliary values as well.
        axes: the mesh axes over which the loss is replicated; None: all. Along the others every
            rank has a loss and parameters of its own, such as replicas that take local steps: pass
            these axes to `sync_gradients` too.

    Returns:
        A function giving ``(value, gradients)``, or ``((value, aux), gradients)``.

    Raises:
        ValueError: the loss is not a scalar, varies over one of `axes`, or is replicated over
            another axis (under shard_map's check).
        TypeError: a leaf to differentiate is not floating point.
    """

    @public
    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        args = tuple(replace_at(args, positions, [as_float_tensors(args[p]) for p in positions]))
        if (keep := keeper()) is not None:
            _refuse_axes(axes)
            if relay := Relay():
                return _relay_gradients(relay, f, argnums, has_aux, args, kwargs)
            value, grads = keep.value_and_grad(f, positions, has_aux, args, kwargs)
            return value, grads[0] if isinstance(argnums, int) else grads
        chosen = tuple(args[position] for position in positions)
        leaves, structure = tree.flatten(chosen)
        refuse_orphans("value_and_grad", leaves)
        check_leaves(tree.paths(chosen), leaves)
        outside = None  # the auxiliary values without their tensors

        def scalar(*flat):
            nonlocal outside
            out = f(*replace_at(args, positions, tree.unflatten(structure, flat)), **kwargs)
            value, aux = out if has_aux else (out, None)
            check_loss(value, axes)
            tensors, outside = split_output(aux)
            return value, tensors

        value, aux, pullback = _pullback(
            scalar, leaves, is_differentiated_outside(f, (args, kwargs))
        )
        seed = loss_seed(value, axes)
        grads = tree.unflatten(structure, [share(leaf) for leaf in pullback(seed)])
        grads = grads[0] if isinstance(argnums, int) else grads
        assert outside is not None
        return ((value, outside.fill(aux)) if has_aux else value), grads

    return wrapped


def _relay_gradients(relay: Relay, f: Callable, argnums, has_aux: bool, args, kwargs) -> tuple:
    """`value_and_grad` of a function that is kept whole, whose captured values are auxiliary."""
    inner = relay.around(f)

    def with_values(*args, **kwargs) -> tuple:
        out, captured = inner(*args, **kwargs)
        value, aux = out if has_aux else (out, None)
        return value, (aux, captured)

    with unwatched():
        both = value_and_grad(with_values, argnums, has_aux=True)
        (value, (aux, captured)), grads = both(*args, **kwargs)
    relay.take(captured)
    return ((value, aux) if has_aux else value), grads


@public
def grad(
    f: Callable,
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    axes: Sequence[str] | None = None,
) -> Callable:
    """The function that computes the gradient of `f`: `value_and_grad` without the value.

    With `has_aux` it gives ``(gradients, aux)``, as in JAX.

    >>> ft.grad(lambda x: x**3)(torch.tensor(2.0))
    tensor(12.)
    """
    both = value_and_grad(f, argnums, has_aux=has_aux, axes=axes)

    @public
    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


@public
def vjp(f: Callable, *primals: tree.Tree, has_aux: bool = False) -> tuple:
    """``f(*primals)`` and its pullback, which maps a cotangent to the primals' cotangents.

    The pullback frees what the forward kept, so it can be called once (any number of times while
    something outside differentiates). Cotangents are each rank's own; nothing is scaled or reduced,
    and `sync_gradients` takes them for shares: seed with each rank's share of the cotangent.

    >>> out, pullback = ft.vjp(lambda x: x**3, torch.tensor(2.0))
    >>> out, pullback(torch.tensor(1.0))
    (tensor(8.), (tensor(12.),))

    With `has_aux`, `f` returns ``(tree, anything)``, of which the second has no derivative. Complex
    tensors have cotangents as in torch: those of the real part plus i times those of the imaginary
    one, so that ``z -> a * z`` takes the cotangent c to ``conj(a) * c``, where JAX has ``a * c``.

    Returns:
        ``(out, pullback)``, or ``(out, pullback, aux)``; ``pullback(cotangent)`` is a tuple with
        one tree per primal, holding None in place of tensors that are neither floating point nor
        complex.

    Raises:
        TypeError: a primal or result has an object with tensors, such as an unregistered dataclass.
    """
    refuse_holders("vjp cannot see into these", "primal", primals)
    out, pull, aux = _pull_back(f, primals, has_aux)

    @public
    def pullback(cotangent: tree.Tree) -> tuple:
        return tuple(assume_shares(tree_) for tree_ in pull(cotangent))

    return (out, pullback, aux) if has_aux else (out, pullback)


def rule_vjp(f: Callable, *primals: tree.Tree) -> tuple[tree.Tree, Callable]:
    """`vjp` as a part of a derivative: its cotangents are not yet the shares of a gradient."""
    return _pull_back(f, primals, False)[:2]


def _pull_back(f: Callable, primals: tuple, has_aux: bool) -> tuple[tree.Tree, Callable, tree.Tree]:
    leaves, structure = tree.flatten(primals)
    moving = [i for i, leaf in enumerate(leaves) if tree.is_inexact(leaf)]
    outside = rest = TensorSlots(structure, [], [])
    moves: list[bool] = []

    def flat(*values):
        nonlocal outside, rest
        made = f(*tree.unflatten(structure, replace_at(leaves, moving, values)))
        made, aux = made if has_aux else (made, None)
        outputs, outside = split_output(made)
        others, rest = split_output(aux)
        moves[:] = map(tree.is_inexact, outputs)
        moved = tuple(value for value in outputs if tree.is_inexact(value))
        return moved, [value for value in outputs if not tree.is_inexact(value)] + others

    outer = is_differentiated_outside(f, primals)
    moved, others, pull = _pullback(flat, [leaves[i] for i in moving], outer)
    pool = (iter(others), iter(moved))
    outputs = [next(pool[one]) for one in moves]

    def pullback(cotangent: tree.Tree) -> tuple:
        grads = pull(tuple(itertools.compress(outside.select(cotangent), moves)))
        return tree.unflatten(structure, replace_at([None] * len(leaves), moving, grads))

    return outside.fill(outputs), pullback, rest.fill(pool[False])


@public
def assume_shares(grads: tree.Tree) -> tree.Tree:
    """The same values, declared each rank's share: their sum over ranks is the gradient.

    For gradients that `grad`, `value_and_grad` and `vjp` did not make, such as arguments of the
    program: `sync_gradients` refuses others, since they may count the loss once per rank. No
    communication, and no check.

    >>> def program(grads):
    ...     return ft.sync_gradients(ft.assume_shares(grads), P())
    >>> ft.shard_map(program, ft.Mesh(dp=2), P("dp"), P())(torch.tensor([1.0, 2.0]))
    tensor([3.])
    """
    return tree.map(lambda leaf: as_share(leaf) if tree.is_inexact(leaf) else leaf, grads)


@public
def sync_gradients(
    grads: tree.Tree,
    specs: tree.Tree,
    into: tree.Tree = None,
    *,
    dtype: torch.dtype | None = None,
    axes: Sequence[str] | None = None,
    widen: bool = True,
) -> tree.Tree:
    """The gradients, from every rank's shares: each leaf psummed over the axes its spec lacks.

    A rank that holds a shard keeps its own part of the gradient; ranks that hold the same values
    add up theirs. This one rule is right for every mesh, layer and composition. One all-reduce per
    leaf and axis, of the leaf's local bytes; with `into`, one reduce-scatter instead over the axes
    that only `into` mentions, and all-reduces of the result. The padding of `functron.Uneven` dims
    gets zero, so that no update changes it.

    >>> def program(w, x):
    ...     share = ft.grad(lambda w: lax.psum((w * x).sum(), "dp"))(w)
    ...     return ft.sync_gradients(share, P())
    >>> mapped = ft.shard_map(program, ft.Mesh(dp=2), (P(), P("dp")), P())
    >>> mapped(torch.tensor(1.0), torch.tensor([2.0, 5.0]))
    tensor(7.)

    Args:
        grads: results of `grad`, `value_and_grad` or `vjp` inside a mapped program, or sums,
            multiples and other dtypes of them.
        specs: a prefix tree of their specs: the parameters'.
        into: the specs of the results: `specs` with axes appended, such as those of
            `optim.shard_specs`. Dims that they do not divide are padded (`functron.spmd.spec`).
        dtype: reduce in this dtype, such as torch.float32 for bfloat16 gradients, or torch.bfloat16
            for float32 ones, which halves the bytes and rounds every rank's share; results have the
            wider of both dtypes. None: the gradients' own.
        axes: reduce over these alone, as passed to `value_and_grad`; None: over all. Ranks along
            the others keep gradients of their own.
        widen: leaves that no ranks add up have the wider dtype as well; False: they stay in theirs,
            for what computes with them in float32 by itself.

    Raises:
        ValueError: under shard_map's check, other gradients (`torch.func.grad` counts the loss once
            per rank) or synchronised ones; or the specs do not fit.
    """
    leaves, structure = tree.flatten(grads)
    flat = tree.broadcast_prefix(specs, grads, is_leaf=is_spec, what="specs", wanted="a P")
    wanted = flat
    if into is not None:
        wanted = tree.broadcast_prefix(into, grads, is_leaf=is_spec, what="into", wanted="a P")
    paths = tree.paths(grads)
    _check_into(wanted, flat, paths, axes)
    _check_shares(leaves, flat, paths, axes)
    names = [name for name, axis in _choose_axes(axes) if axis is not None]
    out = []
    with in_phase("backward"):
        for leaf, spec, target in zip(leaves, flat, wanted, strict=True):
            leaf = no_share(leaf, [name for name in names if name not in spec_axes(spec)])
            result = leaf.dtype if dtype is None else torch.promote_types(leaf.dtype, dtype)
            cuts = cuts_between(spec, target, leaf.dim())
            chosen = [(name, axis) for name, axis in _choose_axes(axes) if axis is not None]
            summed = [axis for name, axis in chosen if name not in spec_axes(target)]
            if is_uneven(spec):
                mask = real_mask(leaf.shape, spec, leaf.device)
                leaf = leaf if mask is None else leaf.masked_fill(~mask, 0)
            if not widen and dtype == result and not (summed or bound_cuts(leaf.shape, cuts)):
                out.append(leaf)
                continue
            leaf = scatter(leaf if dtype is None else leaf.to(dtype), cuts)
            for axis in summed:
                leaf = Psum.call(leaf, axis)
            out.append(leaf.to(result))
    return tree.unflatten(structure, out)


def _refuse_axes(axes: Sequence[str] | None) -> None:
    if axes is not None:
        raise ValueError(
            f"value_and_grad at {user_line()}: got axes={tuple(axes)} in a function of whole "
            "values, which knows no ranks; wanted None; fix: leave it out, and give "
            "functron.partition the specs"
        )


def _choose_axes(axes: Sequence[str] | None) -> list[tuple[str, Any]]:
    """The axes of the mesh, or those of these names."""
    return [row for row in scope().axes.items() if axes is None or row[0] in axes]


def _check_into(wanted: list, specs: list, paths: list[str], axes: Sequence[str] | None) -> None:
    raise_problems(
        f"sync_gradients at {user_line()}",
        [
            Problem(
                f"into/{path}" if path else "into",
                f"{target}, which scatters over {name!r}",
                f"one over axes that are reduced, {', '.join(map(repr, axes or ()))}",
                f"add {name!r} to axes, or leave it out of into",
            )
            for path, spec, target in zip(paths, specs, wanted, strict=True)
            for name in spec_axes(target or P())
            if axes is not None and name not in axes and name not in spec_axes(spec or P())
        ],
    )


def _check_shares(leaves: list, specs: list, paths: list[str], axes: Sequence[str] | None) -> None:
    if not scope().check:
        return
    chosen = [axis for _, axis in _choose_axes(axes) if isinstance(axis, SimulatedAxis)]
    simulated = any(isinstance(axis, SimulatedAxis) for axis in scope().axes.values())
    problems = []
    for leaf, spec, path in zip(leaves, specs, paths, strict=True):
        summed = [axis for axis in chosen if axis.name not in spec_axes(spec)]
        over = [axis.name for axis in summed if not axis.varies(leaf)]
        made = not simulated or not lacks_share(leaf)
        if over or not made:
            problems.append(Problem(path or "gradient", *share_problem(over, made)))
    raise_problems(f"sync_gradients at {user_line()}", problems)


def loss_seed(value: torch.Tensor, axes: Sequence[str] | None = None) -> torch.Tensor:
    """The cotangent of a loss that is replicated over `axes`, or all: each rank's share of 1."""
    count = 1
    for _, axis in _choose_axes(axes):
        count *= axis.size if axis is not None else 1
    return torch.full_like(value, 1 / count)


def share(leaf: torch.Tensor) -> torch.Tensor:
    """`leaf` typed as varying over every axis, so that a missing sync_gradients is an error."""
    for axis in scope().axes.values():
        if isinstance(axis, SimulatedAxis) and axis.varies(leaf):
            continue
        if isinstance(axis, (SimulatedAxis, TracedAxis)):
            leaf = Vary.call(leaf, axis)
    return leaf if scope().shares is None else as_share(leaf)  # in a trace, what varies is one


def replace_at(values: Sequence, positions: Sequence[int], new: Iterable) -> list:
    """`values` with `new` ones at these positions."""
    found = list(values)
    for position, value in zip(positions, new, strict=True):
        found[position] = value
    return found


class TensorSlots(NamedTuple):
    """A tree without its tensors, which transforms track: they hold them apart.

    Attributes:
        structure: of the tree.
        leaves: None in place of tensors.
        positions: the leaves that were tensors.
    """

    structure: tree.Structure
    leaves: list
    positions: list[int]

    def fill(self, tensors: Iterable[torch.Tensor]) -> tree.Tree:
        """The tree with these tensors."""
        return tree.unflatten(self.structure, replace_at(self.leaves, self.positions, tensors))

    def select(self, other: tree.Tree) -> list:
        """The leaves that a tree of the same structure has in place of the tensors."""
        flat = self.structure.flatten_up_to(other)
        return [flat[i] for i in self.positions]


def split_tensors(value: tree.Tree) -> tuple[list[torch.Tensor], TensorSlots]:
    """The tensors of a tree, and the tree without them."""
    leaves, structure = tree.flatten(value)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    rest = replace_at(leaves, positions, [None] * len(positions))
    return [leaves[i] for i in positions], TensorSlots(structure, rest, positions)


def split_output(value: tree.Tree) -> tuple[list[torch.Tensor], TensorSlots]:
    """`split_tensors` of what a differentiated function returns."""
    refuse_holders("cannot see into what a differentiated function returns", "output", value)
    return split_tensors(value)


def as_float_tensors(value: tree.Tree) -> tree.Tree:
    """`value`, with 0-dim tensors of torch's default dtype in place of Python's floats."""
    leaves, structure = tree.flatten(value)
    if not any(isinstance(x, float) for x in leaves):
        return value
    made = [torch.tensor(x) if isinstance(x, float) else x for x in leaves]
    return tree.unflatten(structure, made)


def check_leaves(paths: list[str], leaves: list) -> None:
    """Raise TypeError unless these leaves to differentiate are floating-point tensors."""
    raise_problems(
        "cannot differentiate with respect to these leaves",
        [
            Problem(
                path,
                str(leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf).__name__,
                "a floating-point tensor, or a float",
                _fix_leaf(leaf),
            )
            for path, leaf in zip(paths, leaves, strict=True)
            if not tree.is_float(leaf)
        ],
        TypeError,
    )


def _fix_leaf(leaf: Any) -> str:
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return f"{float(leaf)}, if a number is meant; or pass it outside argnums"
    return dataclass_fix(leaf) or "pass it as another argument, outside argnums"


def check_loss(value: Any, axes: Sequence[str] | None = None) -> None:
    """Raise ValueError unless `value` is a scalar, replicated over exactly these axes, or all."""
    if not tree.is_float(value) or value.dim():
        got = f"shape {tuple(value.shape)}" if tree.is_float(value) else repr(value)
        raise ValueError(
            f"grad: the function returned {got}; wanted a floating-point scalar (with aux outputs, "
            "pass has_aux=True)"
        )
    check_replicated("grad", "a loss", value, axes)


def check_replicated(
    name: str, what: str, value: torch.Tensor, axes: Sequence[str] | None = None
) -> None:
    """Raise ValueError unless `value` is replicated over exactly these axes, or all.

    Args:
        name: of the transform.
        what: `value` is, of its function.
    """
    if not scope().check:
        return
    require_replicated(value, axes)
    varying, chosen = varying_axes(value), scope().axes if axes is None else axes
    simulated = [x.name for x in scope().axes.values() if isinstance(x, SimulatedAxis)]
    if own := [x for x in simulated if x not in chosen and x not in varying]:
        names = ", ".join(map(repr, own))
        raise ValueError(
            f"{name} at {user_line()}: got {what} that is the same along {names}; wanted each "
            f"rank's own there, since axes={tuple(axes or ())}; fix: do not reduce it over {names},"
            f" or add {names} to axes"
        )
    if together := [x for x in varying if x in chosen]:
        names = ", ".join(map(repr, together))
        raise ValueError(
            f"{name} at {user_line()}: got {what} that varies over {names}; wanted one replicated "
            f"over the mesh; fix: {LOSS_FIX}"
        )


def require_replicated(value: torch.Tensor, axes: Sequence[str] | None = None) -> None:
    """Leave the condition that `value` is replicated in a traced program, for its own check."""
    for _, axis in _choose_axes(axes):
        if isinstance(axis, TracedAxis):
            with compat.no_transforms(), torch.no_grad():  # a statement, of all samples of a vmap
                axis.mark(compat.plain(value), "require_replicated")


def is_differentiated_outside(f: Callable, args: tree.Tree) -> bool:
    """Whether something outside will differentiate what is computed here."""
    if compat.differentiating():
        return True
    if not torch.is_grad_enabled():
        return False
    (hidden, _), flat = hoist(f), [*tree.leaves(args), *replacing_functions()]
    return any(
        isinstance(leaf, torch.Tensor) and compat.requires_grad(leaf)
        for leaf in [*flat, *hidden, *(x for leaf in flat for x in find_held_tensors(leaf))]
    )


def _is_tracked(cotangent: tree.Tree) -> bool:
    """Whether what is computed of a cotangent will be differentiated, by whom came after vjp."""
    taped = torch.is_grad_enabled() and any(map(compat.requires_grad, tree.leaves(cotangent)))
    return taped or compat.differentiating()


def _pullback(f: Callable, leaves: list, keep: bool) -> tuple[Any, list, Callable]:
    """``out, aux = f(*leaves)``, and the function from out's cotangent to those of `leaves`."""
    if relay := Relay():
        structure: Any = None

        def watched(*values):
            nonlocal structure
            (out, aux), captured = inner(*values)
            tensors, structure = tree.flatten(captured)
            return out, [*aux, *tensors]

        inner = relay.around(f)
        with unwatched():
            out, aux, pull = _pullback(watched, leaves, keep)
        assert structure is not None
        own = len(aux) - structure.num_leaves
        relay.take(tree.unflatten(structure, aux[own:]))
        return out, aux[:own], pull
    if not leaves:  # torch.func.vjp wants some
        return *f(), lambda cotangent: []
    if compat.transforms_active() or keep:
        made: Any = torch.func.vjp(f, *leaves, has_aux=True)
        out, pull, aux = made

        def pullback(cotangent):
            again = keep or _is_tracked(cotangent)
            with in_phase("backward"):
                return pull(cotangent, retain_graph=again, create_graph=again)

        return out, aux, pullback

    with torch.enable_grad():
        inputs = [leaf.detach().requires_grad_() for leaf in leaves]
        out, aux = f(*inputs)
    outputs = (out,) if isinstance(out, torch.Tensor) else out
    taped = [value for value in outputs if value.requires_grad]

    def tape_pullback(cotangent):
        given = (cotangent,) if isinstance(out, torch.Tensor) else cotangent
        seeds = [seed for value, seed in zip(outputs, given, strict=True) if value.requires_grad]
        if not taped:
            return [torch.zeros_like(leaf) for leaf in leaves]
        if _is_tracked(seeds):  # by another tape, of which this one is to be no part: f runs again
            made: Any = torch.func.vjp(f, *leaves, has_aux=True)
            with in_phase("backward"):
                return made[1](cotangent)
        with in_phase("backward"):
            return torch.autograd.grad(
                taped, inputs, seeds, allow_unused=True, materialize_grads=True
            )

    single = isinstance(out, torch.Tensor)
    plain = out.detach() if single else tuple(value.detach() for value in out)
    return plain, [value.detach() for value in aux], tape_pullback
