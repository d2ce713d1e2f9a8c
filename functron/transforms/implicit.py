"""Solutions of equations, differentiated by what they solve and not by how: JAX's words.

`custom_root` and `custom_linear_solve` take the solver as a function, of which a derivative of any
order and mode is another linear equation; so it may hold a `functron.lax.while_loop`, stop where it
likes, and call what has no derivative. `linear_transpose` is what they are transposed by. All are
per-rank programs: equations may be between ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from functron.core import compat, tree
from functron.core.closure import hoist, note_writes, refuse_holders
from functron.core.errors import Problem, public, raise_problems, refuse, tensor_problem
from functron.program.recorder import active, keeper
from functron.spmd.axes import SimulatedAxis, enter, scope, user_line
from functron.transforms.custom_vjp import custom_vjp
from functron.transforms.derivatives import is_none, jvp
from functron.transforms.gradient import assume_shares, rule_vjp

Solver = Callable[[Callable, tree.Tree], Any]


@public
def linear_transpose(fun: Callable, *primals: tree.Tree) -> Callable:
    """The transpose of a linear function: cotangents of its result to a tuple of its arguments'.

    As `functron.vjp`, without values to evaluate `fun` at: of `primals` structure, shapes, dtypes,
    and what they vary over, are used alone. Where numbers can be read it is checked that `fun` is
    linear, by two more calls: for some p is ``fun(-2 p) = -2 fun(p)``, and zero at zeros? In a
    program that is traced there are none. Each call runs `fun`.

    >>> transpose = ft.linear_transpose(lambda x: torch.stack([x, 2 * x]), torch.tensor(0.0))
    >>> transpose(torch.tensor([3.0, 4.0]))
    (tensor(11.),)

    Args:
        fun: of trees of floating-point tensors, linear in all of them together; returns such a
            tree. What it closes over may be differentiated.
        primals: a tree for each argument.

    Returns:
        A function of a tree like the result of `fun`, giving a tuple with a tree for each argument.
        Inside a mapped program cotangents are each rank's own, as of `functron.vjp`.

    Raises:
        ValueError: (when called) `fun` is not linear, or cotangents are not like its result.
        TypeError: a leaf is not a floating-point tensor.
    """
    title = f"linear_transpose at {user_line()}"
    _check_floats(title, "primals", primals)
    checked = False

    @public
    def transpose(cotangents: tree.Tree) -> tuple:
        nonlocal checked
        zeros = tree.map(torch.zeros_like, primals)
        out, pullback = rule_vjp(fun, *zeros)
        _check_floats(title, "the result", out)
        if not checked and _reads_numbers():
            _check_linear(title, fun, zeros, out)
            checked = True
        _check_like(title, "cotangents", cotangents, out, "the result of fun")
        return tuple(assume_shares(each) for each in pullback(cotangents))

    return transpose


def _reads_numbers() -> bool:
    return active() is None and not compat.faking() and not compat.proxies_active()


def _check_linear(title: str, fun: Callable, zeros: tuple, at_zero: tree.Tree) -> None:
    """Raise ValueError for a function that is not odd, homogeneous and zero at zero."""

    def probe(x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(x.numel(), device=x.device).reshape(x.shape)
        return x.detach() + torch.cos(1.0 + steps).to(x.dtype)  # replicated where x is

    some = tree.map(probe, zeros)
    with torch.no_grad():
        once, twice = fun(*some), fun(*tree.map(lambda x: -2 * x, some))
    rows = zip(tree.leaves(at_zero), tree.leaves(once), tree.leaves(twice), strict=True)
    wrong = False
    for zero, one, two in rows:
        if one.numel():
            near = torch.finfo(one.dtype).eps ** 0.5 * two.abs().amax()
            far = ((two + 2 * one).abs() > near).any() | (zero != 0).any()
            wrong |= compat.read_any(far)
    if wrong:
        got, wanted = "a function that is not linear", "fun(-2 x) = -2 fun(x), and zero at zero"
        fix = "leave out what is added, and products and curves of arguments; or ft.vjp at a point"
        refuse(title, "fun", got, wanted, fix)


class _Closed:
    """Functions, and apart from them what they close over, for which transforms do not look here.

    Attributes:
        tensors: that.
    """

    def __init__(self, functions: tuple):
        self.tensors, self._close = hoist(lambda: functions)

    def restore(self, tensors: list[torch.Tensor]) -> tuple:
        """The functions, closed over these."""
        return self._close(tensors)()


class _System(NamedTuple):
    """A linear system and its solver, and those of its transpose.

    Attributes:
        matvec: of a tree like b.
        vecmat: its transpose; None: to be made.
        solve, transpose_solve: of a function and a tree like b; the latter may be None.
    """

    matvec: Callable
    vecmat: Callable | None
    solve: Solver
    transpose_solve: Solver | None


@public
def custom_linear_solve(
    matvec: Callable,
    b: tree.Tree,
    solve: Callable,
    transpose_solve: Callable | None = None,
    symmetric: bool = False,
    has_aux: bool = False,
) -> tree.Tree:
    """``x = solve(matvec, b)`` of the linear equation ``matvec(x) = b``, differentiated as such.

    Its tangent solves ``matvec(dx) = db - dA x``, by `solve`, and its cotangent the transposed
    equation, by `transpose_solve`: derivatives of any order need solutions alone, so solvers may
    loop until they have converged. What they close over has no derivative by them.

    >>> a, b = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([1.0, 2.0])
    >>> def jacobi(matvec, b):
    ...     step = lambda x: x + (b - matvec(x)) / 4
    ...     far = lambda x: (b - matvec(x)).abs().max() > 1e-6
    ...     return lax.while_loop(far, step, torch.zeros_like(b))
    >>> solve = lambda a: lax.custom_linear_solve(lambda x: a @ x, b, jacobi, symmetric=True)
    >>> solve(a), ft.grad(lambda a: solve(a).sum())(a)
    (tensor([0.2000, 0.6000]), tensor([[-0.0800, -0.2400],
            [-0.0400, -0.1200]]))

    Over ranks: collectives in `matvec` may be over axes that split the unknowns, along which each
    rank has other parts of x and b. Transposed, ranks that hold one value have shares of its
    cotangent, which a solver would take for the cotangent, so that is refused.

    Args:
        matvec: linear, of a tree like `b` to one like it; may close over what is differentiated.
        b: a tree of floating-point tensors.
        solve: ``(matvec, b) -> x``, like `b`; with `has_aux`, ``(x, aux)``.
        transpose_solve: ``(vecmat, b) -> x`` of the transposed equation, for reverse mode; with
            `has_aux` as `solve`.
        symmetric: `matvec` is its own transpose, and `solve` solves both.
        has_aux: whether `solve` returns a tree without derivatives as well.

    Returns:
        x, or ``(x, aux)``.

    Raises:
        ValueError: a solution, or what `matvec` returns, is not like `b`; or in reverse mode, there
            is no `transpose_solve`, or `matvec` has a collective over an axis along which x is
            replicated.
        TypeError: an argument is no function, or a leaf of `b` is not a floating-point tensor.
    """
    title = f"custom_linear_solve at {user_line()}"
    _refuse_partition(title)
    _check_floats(title, "b", b)
    refuse_holders(f"{title} cannot see into these", "b", b, tracked=True)
    if symmetric:
        system = _System(matvec, matvec, solve, transpose_solve or solve)
    else:
        system = _System(matvec, None, solve, transpose_solve)
    return _solve(title, system, b, has_aux)


def _solve(title: str, system: _System, b: tree.Tree, has_aux: bool) -> tree.Tree:
    """The solution of a system by its solver, and of its derivatives by the solvers."""
    closed = _Closed(system)

    def restore(values: list) -> _System:
        return _System(*closed.restore(values))

    def run(values: list, b: tree.Tree) -> Any:
        own = restore(values)
        out = own.solve(_returning_like(title, "matvec", own.matvec, b), b)
        x, aux = _split_aux(title, "solve", out, has_aux)
        _check_like(title, "what solve returned", x, b, "b")
        return (x, aux) if has_aux else x

    def again(values: list, b: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        out = solved(values, b)
        return out if has_aux else (out, None)

    def forward(values: list, b: tree.Tree) -> tuple:
        x, aux = again(values, b)
        return ((x, aux) if has_aux else x), (values, x)

    def backward(kept: tuple, cotangents: tree.Tree) -> tuple:
        (values, x), own = kept, restore(kept[0])
        seed = cotangents[0] if has_aux else cotangents
        if own.transpose_solve is None:
            wanted, fix = "the solver of the transposed equation", "symmetric=True, where it is"
            refuse(title, "transpose_solve", "reverse mode without it", wanted, fix)
        vecmat = own.vecmat or _transpose(_alone(title, own.matvec, x), x)
        turned = _System(vecmat, own.matvec, own.transpose_solve, own.solve)
        moved = _solve(title, turned, seed, has_aux)
        moved = moved[0] if has_aux else moved
        pull = rule_vjp(lambda values: restore(values).matvec(x), values)[1]
        return pull(tree.map(torch.neg, moved))[0], moved

    def push(args: tuple, tangents: tuple) -> tuple:
        (values, b), (moving, moved) = args, tangents
        x, aux = again(values, b)
        by_values = lambda values: restore(values).matvec(x)  # noqa: E731
        shift = jvp(by_values, (values,), (moving,))[1]
        side = tree.map(lambda db, shift: db - shift, moved, shift)
        dx = again(values, side)[0]
        still = tree.map(lambda _: None, aux)
        return ((x, aux), (dx, still)) if has_aux else (x, dx)

    solved = custom_vjp(run, forward, backward, push)
    return solved(closed.tensors, b)


def _transpose(function: Callable, like: tree.Tree) -> Callable:
    """The transpose of a linear function of a tree like this."""
    zeros = tree.map(torch.zeros_like, like)

    def transpose(cotangents: tree.Tree) -> tree.Tree:
        return rule_vjp(function, zeros)[1](cotangents)[0]

    return transpose


def _alone(title: str, matvec: Callable, x: tree.Tree) -> Callable:
    """`matvec`, which is refused where ranks that have the same x talk to each other."""
    axes = [axis for axis in scope().axes.values() if isinstance(axis, SimulatedAxis)]
    shared = [axis.name for axis in axes if not tree.all(tree.map(axis.varies, x))]
    if not shared:
        return matvec

    def told(op: str, name: str) -> None:
        got = f"{op} over {name!r} in matvec, along which x is replicated, in reverse mode"
        wanted = "collectives over axes that split x and b, along which each rank has its own part"
        fix = (
            f"split b over {name!r}, all_gather what matvec takes and psum_scatter what it "
            "returns; or write the derivative by ft.custom_vjp"
        )
        refuse(title, "matvec", got, wanted, fix)

    def alone(v: tree.Tree) -> tree.Tree:
        uneven = {**scope().uneven, **dict.fromkeys(shared, told)}
        with enter(replace(scope(), uneven=uneven)):
            return matvec(v)

    return alone


@public
def custom_root(
    f: Callable,
    initial_guess: tree.Tree,
    solve: Callable,
    tangent_solve: Callable,
    has_aux: bool = False,
) -> tree.Tree:
    """``x = solve(f, initial_guess)`` of the equation ``f(x) = 0``, differentiated as such.

    By the theorem of implicit functions: with g the derivative of f at x, its tangent is
    ``-tangent_solve(g, df)``, with df that of f by what it closes over, and its cotangent the
    transpose of that. So `solve` may loop until it has converged, and runs once. The guess has no
    derivative.

    >>> def newton(f, x):
    ...     step = lambda x: x - f(x) / ft.grad(f)(x)
    ...     return lax.while_loop(lambda x: f(x).abs() > 1e-5, step, x)
    >>> def root(a):
    ...     return lax.custom_root(lambda x: x * x - a, a, newton, lambda g, y: y / g(1.0))
    >>> root(torch.tensor(4.0)), ft.grad(root)(torch.tensor(4.0))
    (tensor(2.), tensor(0.2500))

    Args:
        f: of a tree of floating-point tensors to one like it; may close over what is
            differentiated.
        initial_guess: a tree of floating-point tensors, or of numbers.
        solve: ``(f, initial_guess) -> x``, like the guess; with `has_aux`, ``(x, aux)``.
        tangent_solve: ``(g, y) -> the tangent v with g(v) = y``, for a linear g. It is transposed
            in reverse mode, so its loops are to be in `custom_linear_solve`.
        has_aux: whether `solve` returns a tree without derivatives as well.

    Returns:
        x, or ``(x, aux)``.

    Raises:
        ValueError: the root, what `f` returns, or a tangent is not like the guess.
        TypeError: an argument is no function, or a leaf is not floating point.
    """
    title = f"custom_root at {user_line()}"
    _refuse_partition(title)
    guess = _as_tensors(title, initial_guess)
    refuse_holders(f"{title} cannot see into these", "initial_guess", guess, tracked=True)
    closed = _Closed((f, solve, tangent_solve))
    restore = closed.restore

    def run(values: list, guess: tree.Tree) -> Any:
        f, solve, _ = restore(values)
        out = solve(_returning_like(title, "f", f, guess), guess)
        x, aux = _split_aux(title, "solve", out, has_aux)
        _check_like(title, "what solve returned", x, guess, "initial_guess")
        return (x, aux) if has_aux else x

    def again(values: list, guess: tree.Tree) -> tuple[tree.Tree, tree.Tree]:
        out = solved(values, guess)
        return out if has_aux else (out, None)

    def derive(values: list, x: tree.Tree, moving: list) -> tree.Tree:
        f, _, tangent_solve = restore(values)
        side = jvp(lambda values: restore(values)[0](x), (values,), (moving,))[1]
        v = tangent_solve(functools.partial(_push, f, x), side)
        _check_like(title, "what tangent_solve returned", v, x, "the root")
        return tree.map(torch.neg, v)

    def forward(values: list, guess: tree.Tree) -> tuple:
        x, aux = again(values, guess)
        return ((x, aux) if has_aux else x), (values, x, tree.map(torch.zeros_like, guess))

    def backward(kept: tuple, cotangents: tree.Tree) -> tuple:
        values, x, still = kept
        zeros = tree.map(lambda x: torch.zeros_like(x) if tree.is_inexact(x) else None, values)
        pull = rule_vjp(lambda moving: derive(values, x, moving), zeros)[1]
        return pull(cotangents[0] if has_aux else cotangents)[0], still

    def push(args: tuple, tangents: tuple) -> tuple:
        (values, guess), (moving, _) = args, tangents
        x, aux = again(values, guess)
        dx = derive(values, x, moving)
        still = tree.map(lambda _: None, aux)
        return ((x, aux), (dx, still)) if has_aux else (x, dx)

    solved = custom_vjp(run, forward, backward, push)
    return solved(closed.tensors, guess)


def _push(f: Callable, x: tree.Tree, tangent: tree.Tree) -> tree.Tree:
    """The derivative of `f` at x; numbers stand for tensors that are full of them."""
    given = tree.map(
        lambda x, t: t if isinstance(t, torch.Tensor) else torch.full_like(x, t), x, tangent
    )
    return jvp(f, (x,), (given,))[1]


# --- what is given


def _refuse_partition(title: str) -> None:
    if keeper() is not None:
        got = "a function that functron.partition cuts, whose equations have no rule of placement"
        wanted, fix = "a per-rank program", "ft.shard_map; or solve outside of ft.partition"
        refuse(title, "the equation", got, wanted, fix)


def _as_tensors(title: str, guess: tree.Tree) -> tree.Tree:
    leaves = tree.leaves(guess)
    device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), None)
    numbers = (int, float)
    made = tree.map(
        lambda x: (
            torch.full((), float(x), device=device)
            if isinstance(x, numbers) and not isinstance(x, bool)
            else x
        ),
        guess,
    )
    _check_floats(title, "initial_guess", made)
    return made


def _check_floats(title: str, what: str, given: tree.Tree) -> None:
    problems = []
    for path, x in tree.items(given, is_none):
        at = f"{what}/{path}" if path else what
        if not isinstance(x, torch.Tensor):
            problems.append(tensor_problem(at, x))
        elif not tree.is_float(x):
            wanted = "a floating-point tensor"
            real = "solve for torch.view_as_real of it"
            fix = real if x.is_complex() else "x.to(torch.float32)"
            problems.append(Problem(at, str(x.dtype), wanted, fix))
    raise_problems(title, problems, TypeError)


def _split_aux(title: str, name: str, out: Any, has_aux: bool) -> tuple[tree.Tree, tree.Tree]:
    if not has_aux:
        return out, None
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        got = f"{len(out)} results" if isinstance(out, (tuple, list)) else type(out).__name__
        refuse(title, f"what {name} returned", got, "(x, aux), as has_aux=True says")
    return out[0], out[1]


def _check_like(title: str, what: str, made: tree.Tree, like: tree.Tree, name: str) -> None:
    found = tree.same_structure(like, made, names=(name, what))
    rows: Sequence = list(zip(tree.items(like), found, strict=True))
    raise_problems(
        title,
        [
            Problem(
                f"{what}/{path}" if path else what,
                f"{tuple(y.shape)} {y.dtype}" if isinstance(y, torch.Tensor) else repr(y),
                f"{tuple(x.shape)} {x.dtype}, as {name} has",
                "cast or reshape it",
            )
            for (path, x), y in rows
            if not isinstance(y, torch.Tensor) or (x.shape, x.dtype) != (y.shape, y.dtype)
        ],
    )


def _returning_like(title: str, name: str, f: Callable, like: tree.Tree) -> Callable:
    """`f`, whose results must be like a tree."""

    @functools.wraps(f)
    def checked(x: tree.Tree) -> tree.Tree:
        check_writes = note_writes(f"{title}: {name}", x)
        out = f(x)
        check_writes()
        _check_like(title, f"what {name} returned", out, like, "what it is given")
        return out

    return checked
