"""Branches and loops by numbers in tensors: cond, switch, while_loop, fori_loop, map, select_n.

A predicate that no vmap batches is the same for everything that runs here, so its number is read
below all transforms, and the chosen branch alone runs. Each process of a bound mesh reads its own.

A predicate that is batched, at the level of a mesh axis in simulation or of a vmap of the user's,
has a number for each row. All branches run then, and their results are selected by row. Operands
are selected on the way in as well, from themselves and from themselves without a derivative: rows
of other branches have the cotangent zero there, whatever a derivative made of it on the way. So a
NaN of a branch that is not taken reaches no derivative, of any order and mode.

Collectives are between ranks, and this is not: where ranks of an axis take different branches,
some would never come to a collective over it. It is refused by the line that calls it. A program
that is traced has both branches, and checks that over the axes that it knows (`traced_flow`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from functron.core import compat, tree
from functron.core.closure import (
    copy_views,
    find_tensors,
    hoist,
    note_writes,
    refuse_holders,
    refuse_orphans,
)
from functron.core.errors import Problem, public, raise_problems, refuse
from functron.core.scopes import in_scopes, scope_names
from functron.program.callbacks import effects_where
from functron.program.check import ROW_INDEX
from functron.program.recorder import active
from functron.spmd.axes import (
    SimulatedAxis,
    TracedAxis,
    enter,
    refuse_uneven,
    scope,
    user_line,
)
from functron.spmd.simulate import no_share, varying_axes
from functron.transforms.capture import refusing_names
from functron.transforms.look_ahead import (
    BranchResult,
    ResultAxes,
    check_alike,
    compare_results,
    derive_alike,
    is_moving,
    look_ahead,
    look_back,
    make_fake,
    mark_irreversible,
    may_reverse,
    vary_over,
)
from functron.transforms.scan import scan
from functron.transforms.traced_flow import trace_switch, trace_while


@public
def cond(
    pred: bool | float | torch.Tensor, true_fun: Callable, false_fun: Callable, *operands: tree.Tree
) -> tree.Tree:
    """``true_fun(*operands) if pred else false_fun(*operands)``; values and derivatives are its.

    >>> x = torch.tensor([0.0, 4.0])
    >>> lax.cond(x.sum() > 0, torch.sqrt, torch.zeros_like, x)
    tensor([0., 2.])
    >>> rows = torch.func.vmap(lambda x: lax.cond(x > 0, torch.sqrt, torch.zeros_like, x))
    >>> torch.func.grad(lambda x: rows(x).sum())(x)
    tensor([0.0000, 0.2500])

    Where the predicate is one for all that runs here, as in a program without vmaps, only the
    branch that it chooses runs. Where it has a number for each rank of a simulated mesh, or each
    row of a vmap, all branches run and results are selected; on processes each rank runs its own
    branch. A branch that is not taken has no part in a derivative, also where it is not finite.
    A program that is traced has both branches, and runs one. Before a call of the same code and
    shapes runs first, both run on fake tensors, and backward. So a derivative in reverse is refused
    that either of them lacks, as of a `while_loop`, also where it is not taken; but not of a
    predicate that is a Python number, nor where functions cannot run without numbers.

    Args:
        pred: a number, which is decided at once, or a 0-dim tensor; of numbers, whether not zero.
        true_fun: returns a tree of tensors, or of numbers, which become 0-dim tensors of torch's
            own dtypes. May close over tensors.
        false_fun: returns a tree of the same structure, shapes and dtypes.
        operands: trees.

    Raises:
        ValueError: a branch has a collective over an axis along which the predicate varies, or
            results differ in structure, shape or dtype; all offenders are listed.
        TypeError: a branch is no function, or an operand has an object with tensors.
    """
    index = _read_predicate("cond", "pred", pred)
    chosen = index.to(torch.int64) if isinstance(index, torch.Tensor) else int(index)
    functions = _check_functions("cond", {"false_fun": false_fun, "true_fun": true_fun})
    return _branch("cond", chosen, functions, operands)


@public
def switch(
    index: int | torch.Tensor, branches: Sequence[Callable], *operands: tree.Tree
) -> tree.Tree:
    """``branches[index](*operands)``, with the index brought into their range; see `cond`.

    >>> branches = [torch.zeros_like, torch.neg, torch.exp]
    >>> lax.switch(torch.tensor(1), branches, torch.tensor([1.0, 2.0]))
    tensor([-1., -2.])
    >>> lax.switch(-7, branches, torch.tensor([1.0, 2.0]))
    tensor([0., 0.])

    Args:
        index: an int, or a 0-dim tensor of integers. Below 0 it is 0, above the last the last.
        branches: functions of `operands` to trees of one structure, with equal shapes and dtypes.
        operands: trees.

    Raises:
        ValueError: as for `cond`.
        TypeError: the index is no integer, there are no branches, or one is no function.
    """
    if not isinstance(branches, (list, tuple)) or not branches:
        got = f"a {type(branches).__name__}" if branches else "none"
        refuse("switch", "branches", got, "a list of functions, of at least one", "", TypeError)
    functions = {f"branches[{k}]": f for k, f in enumerate(branches)}
    chosen = _read_index("switch", "index", index)
    functions = _check_functions("switch", functions)
    last = len(functions) - 1
    if isinstance(chosen, torch.Tensor):
        return _branch("switch", chosen.clamp(0, last), functions, operands)
    return _branch("switch", min(max(chosen, 0), last), functions, operands)


@public
def while_loop(cond_fun: Callable, body_fun: Callable, init_val: tree.Tree) -> tree.Tree:
    """``while cond_fun(carry): carry = body_fun(carry)`` from `init_val` on: the last carry.

    >>> halve = lambda carry: (carry[0] / 2, carry[1] + 1)
    >>> lax.while_loop(lambda carry: carry[0] > 1, halve, (torch.tensor(100.0), 0))
    (tensor(0.7812), tensor(7))

    Where the predicate has a number for each rank of a simulated mesh, or each row of a vmap, the
    loop runs until all are done, and what is done stays as it is; on processes each rank ends by
    itself. It has derivatives in forward mode. Reverse mode would have to keep a number of carries
    that nothing bounds: take `fori_loop` with ints, or `functron.scan`.

    Args:
        cond_fun: of a carry, to a 0-dim bool tensor.
        body_fun: of a carry, to one of the same structure, shapes and dtypes.
        init_val: the first carry: a tree of tensors, or of numbers, which become 0-dim tensors.

    Raises:
        ValueError: the carry changes its structure, shape or dtype; a collective is over an axis
            along which the predicate varies; or, in backward, reverse mode reaches the loop.
        TypeError: a function is none, or the predicate is not bool.
    """
    given = _check_functions("while_loop", {"cond_fun": cond_fun, "body_fun": body_fun})
    refuse_holders("while_loop cannot see into these", "init_val", init_val, tracked=True)
    init = _as_tensors("while_loop", "init_val", init_val, ())
    return _loop("while_loop", given["cond_fun"], given["body_fun"], init)


@public
def fori_loop(
    lower: int | torch.Tensor,
    upper: int | torch.Tensor,
    body_fun: Callable,
    init_val: tree.Tree,
    *,
    unroll: int | bool | None = None,
) -> tree.Tree:
    """``for i in range(lower, upper): carry = body_fun(i, carry)`` from `init_val` on.

    >>> lax.fori_loop(0, 10, lambda i, total: total + i, torch.tensor(0))
    tensor(45)

    With ints as bounds it is a `functron.scan`, which has derivatives of any order and mode, and
    is one equation in a program that is traced. With a tensor among them it is a `while_loop`,
    which has none in reverse.

    Args:
        lower: an int, or a 0-dim tensor of integers.
        upper: likewise; the loop does not run where it is not above `lower`.
        body_fun: of a 0-dim int64 tensor and a carry, to a carry of the same structure, shapes and
            dtypes.
        init_val: the first carry: a tree of tensors, or of numbers, which become 0-dim tensors.
        unroll: of a loop that is a scan, as for `functron.scan`.

    Raises:
        ValueError: as for `while_loop`; or `unroll` is given without ints as bounds.
        TypeError: a bound is no integer, or `body_fun` is no function.
    """
    functions = _check_functions("fori_loop", {"body_fun": body_fun})
    bounds = [
        _read_index("fori_loop", name, value)
        for name, value in (("lower", lower), ("upper", upper))
    ]
    refuse_holders("fori_loop cannot see into these", "init_val", init_val, tracked=True)
    like = [bound for bound in bounds if isinstance(bound, torch.Tensor)]
    init = _as_tensors("fori_loop", "init_val", init_val, like)
    if not like:
        return _count(body_fun, init, range(*bounds), 1 if unroll is None else unroll)
    if unroll is not None:
        got = f"{unroll} with a bound that is a tensor"
        refuse("fori_loop", "unroll", got, "ints, of which the length is known", "leave it out")
    (step,) = functions.values()
    carry = (*(compat.constant(bound, like[0].device) for bound in bounds), init)
    _, _, last = _loop(
        "fori_loop",
        lambda carry: carry[0] < carry[1],
        lambda carry: (carry[0] + 1, carry[1], step(carry[0], carry[2])),
        carry,
    )
    return last


def _count(body_fun: Callable, init: tree.Tree, steps: range, unroll: int | bool) -> tree.Tree:
    def step(carry: tree.Tree, i: torch.Tensor) -> tuple[tree.Tree, None]:
        return _fit_carry("fori_loop", carry, body_fun(i, carry)), None

    step.__name__ = getattr(body_fun, "__name__", "fori_loop")
    device = next((leaf.device for leaf in tree.leaves(init)), None)
    xs = torch.arange(steps.start, max(steps.start, steps.stop), device=device)
    return scan(step, init, xs, unroll=unroll)[0]


@public
def map(f: Callable, xs: tree.Tree, *, batch_size: int | None = None) -> tree.Tree:  # noqa: A001
    """``stack([f(x) for x in xs])`` along the leading dim of a tree, one at a time.

    >>> lax.map(lambda x: x @ x, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([ 5., 25.])

    A `functron.scan` without a carry: it takes the memory of one call, where torch.func.vmap takes
    that of all.

    Args:
        f: returns a tree of tensors.
        xs: a tree of tensors with a common leading dim. Of 0, `f` runs on fake tensors.
        batch_size: so many at a time, by vmap, with what is left over at the end.

    Raises:
        ValueError: leading dims differ, or `batch_size` is less than 1.
    """
    _check_functions("map", {"f": f})
    leaves, structure = tree.flatten(xs)
    sizes = {leaf.shape[0] if leaf.dim() else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        got = f"leaves of shapes {[tuple(leaf.shape) for leaf in leaves]}"
        refuse("map", "xs", got, "leaves with one leading dim")
    rows = sizes.pop()
    if batch_size is None:
        return scan(lambda _, x: (None, _as_tensors("map", "y", f(x), leaves)), None, xs)[1]
    if batch_size < 1:
        refuse("map", "batch_size", batch_size, "at least 1")
    whole = rows - rows % batch_size
    parts = []
    if whole or not rows:
        blocks = [leaf[:whole].unflatten(0, (rows // batch_size, batch_size)) for leaf in leaves]
        step = lambda _, x: (None, _map_rows(f, x))  # noqa: E731
        _, ys = scan(step, None, tree.unflatten(structure, blocks))
        parts.append(tree.map(lambda y: y.flatten(0, 1), ys))
    if whole < rows:
        parts.append(_map_rows(f, tree.map(lambda leaf: leaf[whole:], xs)))
    return tree.map(lambda *ys: torch.cat(ys), *parts) if len(parts) > 1 else parts[0]


def _map_rows(f: Callable, xs: tree.Tree) -> tree.Tree:
    """`f` under vmap, of trees that torch does not know too."""
    leaves, structure = tree.flatten(xs)
    made: Any = None

    def row(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal made
        y = f(tree.unflatten(structure, values))
        flat, made = tree.flatten(_as_tensors("map", "y", y, values))
        return tuple(flat)

    run: Any = torch.func.vmap(row)
    check_writes = note_writes("map: f", leaves, f)
    out = run(*leaves)
    check_writes()
    return tree.unflatten(made, copy_views(out, leaves, f))


@public
def select_n(which: torch.Tensor, *cases: torch.Tensor) -> torch.Tensor:
    """``cases[which]`` element by element; the derivative is that of the chosen one alone.

    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> lax.select_n(torch.tensor([0, 2, 1]), x, 10 * x, 100 * x)
    tensor([  1., 200.,  30.])

    Args:
        which: bool, for at most two cases, of which True is the second; or integers, brought into
            the range of the cases as the index of `switch`. 0-dim, or of the cases' shape.
        cases: tensors of one shape and dtype.

    Raises:
        ValueError: shapes or dtypes differ, or there are no cases, or more than two of a bool.
        TypeError: `which` is neither bool nor of integers.
    """
    if not isinstance(which, torch.Tensor) or which.is_floating_point() or which.is_complex():
        got = which.dtype if isinstance(which, torch.Tensor) else repr(which)
        refuse("select_n", "which", got, "a tensor of bool or integers", "compare it", TypeError)
    if not cases:
        refuse("select_n", "cases", "none", "at least one tensor")
    first, is_bool, problems = cases[0], which.dtype == torch.bool, []
    for k, case in enumerate(cases):
        if not isinstance(case, torch.Tensor):
            problems.append(Problem(f"cases[{k}]", repr(case), "a tensor", "torch.full_like(...)"))
        elif isinstance(first, torch.Tensor) and BranchResult.of(case) != BranchResult.of(first):
            wanted = f"{BranchResult.of(first)}, as cases[0]"
            got = str(BranchResult.of(case))
            problems.append(Problem(f"cases[{k}]", got, wanted, "cast or expand it"))
    if is_bool and len(cases) > 2:
        wanted = "at most 2 for a bool"
        problems.append(Problem("cases", str(len(cases)), wanted, "an index as which"))
    if not problems and which.dim() and which.shape != first.shape:
        wanted = f"(), or {tuple(first.shape)} as the cases"
        problems.append(Problem("which", f"shape {tuple(which.shape)}", wanted, "expand it"))
    raise_problems("select_n", problems)
    lowest = which.logical_not() if is_bool else which <= 0
    return _select([lowest, *(which == k for k in range(1, len(cases) - 1))], cases)


def _select(masks: Sequence[torch.Tensor], cases: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first case whose mask is true, the last where none is."""
    out = cases[-1] if cases[1:] else cases[0].clone()
    for mask, case in reversed([*zip(masks, cases[:-1], strict=False)]):
        out = torch.where(mask, case, out)
    return out


# --- branches


def _branch(
    what: str, index: int | torch.Tensor, functions: dict[str, Callable], operands: tuple
) -> tree.Tree:
    refuse_holders(f"{what} cannot see into these", "operand", operands, tracked=True)
    labels, branches = list(functions), list(functions.values())

    def choose(number: int) -> tree.Tree:
        out = _run_branch(what, labels[number], branches[number], operands)
        out = copy_views(out, operands, branches[number])
        return derive_alike(out, branches, operands)

    if not isinstance(index, torch.Tensor):
        return choose(index)
    _refuse_orphans(what, branches, (index, operands))
    index, recorder = no_share(index), active()
    unread = compat.faking() or compat.proxies_active()  # as in torch.func.linearize
    if compat.is_batched(index) or (recorder is None and unread):
        return _run_all(what, index, functions, operands)
    if recorder is None:
        look = lambda: _run_all(what, index, functions, tree.map(make_fake, operands))  # noqa: E731
        varying = look_ahead(look, what, branches, operands)
        out = vary_over(choose(int(compat.read_number(index))), varying)
        return mark_irreversible(out, look_back(what, branches, operands))
    runs = {label: _name_branch(what, label, f) for label, f in functions.items()}
    return trace_switch(recorder, index, runs, operands, word=what)


def _name_branch(what: str, label: str, f: Callable) -> Callable:
    @functools.wraps(f)
    def run(*operands: tree.Tree) -> tree.Tree:
        return _run_branch(what, label, f, operands)

    return run


def _run_branch(what: str, label: str, f: Callable, operands: tuple) -> tree.Tree:
    check_writes = note_writes(f"{what}: {label}", operands, f)
    out = f(*operands)
    check_writes()
    return _as_tensors(what, label, out, tree.leaves(operands))


def _run_all(
    what: str, index: torch.Tensor, functions: dict[str, Callable], operands: tuple
) -> tree.Tree:
    """The results of all branches, selected by an index for each row of vmaps."""
    word = "index" if what == "switch" else "predicate"
    masks = [index == k for k in range(len(functions))]

    def run(label: str, mask: torch.Tensor) -> tree.Tree:
        f, keep = functions[label], functools.partial(_derive_where, mask)
        hidden, close = hoist(f)
        closed = close([keep(x) for x in hidden]) if hidden else f
        with effects_where(mask):
            return _run_branch(what, label, closed, tree.map(keep, operands))

    with _uneven(index, f"the {word} of lax.{what} at {user_line()}"):
        found = {k: run(k, mask) for k, mask in zip(functions, masks, strict=True)}
    kinds = {label: tree.map(BranchResult.here, out) for label, out in found.items()}
    check_alike(f"{what} at {user_line()}", kinds, functions)
    return tree.map(lambda *cases: _select(masks, cases), *found.values())


def _derive_where(mask: torch.Tensor, x: Any) -> Any:
    """x, with a derivative only where the mask is true; others are zero whatever they came from."""
    return torch.where(mask, x, x.detach()) if is_moving(x) else x


def _uneven(index: torch.Tensor, by: str) -> AbstractContextManager[None]:
    """A with block without collectives over axes along which the index varies.

    In a program that is traced it is for the program's own check to find out.
    """
    told = functools.partial(refuse_uneven, by)
    new = dict.fromkeys(varying_axes(index), told)
    for axis in scope().axes.values():
        if isinstance(axis, TracedAxis):
            new[axis.name] = functools.partial(_require_alike, index, scope().uneven.get(axis.name))
    return enter(replace(scope(), uneven={**scope().uneven, **new})) if new else nullcontext()


def _require_alike(index: torch.Tensor, outer: Callable | None, op: str, name: str) -> None:
    """Leave in the program, where it has a collective, that the index is the same on all ranks."""
    if outer is not None:
        outer(op, name)
    axis: Any = scope().axes[name]
    with compat.no_transforms(), torch.no_grad(), in_scopes((*scope_names(), ROW_INDEX)):
        axis.mark(compat.plain(index), "require_replicated")


# --- loops


def _loop(what: str, cond_fun: Callable, body_fun: Callable, init: tree.Tree) -> tree.Tree:
    functions = cond_fun, body_fun
    _refuse_orphans(what, functions, init)

    def holds(carry: tree.Tree) -> bool | torch.Tensor:
        check_writes = note_writes(f"{what}: cond_fun", carry)
        found = cond_fun(carry)
        check_writes()
        return _read_predicate(what, "cond_fun", found, numbers=False)

    @functools.wraps(body_fun)
    def advance(carry: tree.Tree) -> tree.Tree:
        check_writes = note_writes(f"{what}: body_fun", carry)
        after = body_fun(carry)
        check_writes()
        return _fit_carry(what, carry, after)

    check_closed = note_writes(what, cond_fun, body_fun)
    by = f"the predicate of lax.{what} at {user_line()}"
    look = lambda: _run_fake_loop(by, holds, advance, tree.map(make_fake, init))  # noqa: E731
    if (recorder := active()) is not None:
        if any(isinstance(axis, SimulatedAxis) for axis in scope().axes.values()):
            look_ahead(look, what, *functions, init)  # of a simulation that is compiled
        last = trace_while(recorder, lambda carry: torch.as_tensor(holds(carry)), advance, init)
    elif compat.proxies_active():
        got, wanted = "a trace by make_fx, as of torch.func.linearize", "one by functron.trace"
        refuse(f"{what} at {user_line()}", "the loop", got, wanted, "torch.func.jvp, ft.trace")
    elif compat.faking():
        last = _run_fake_loop(by, holds, advance, init)
    else:
        varying = look_ahead(look, what, *functions, init)
        last = _run_loop(by, holds, advance, init, varying)
        if compat.pushing_forward():
            last = derive_alike(last, functions, init)
    check_closed()
    return _refuse_reverse(what, copy_views(last, init, cond_fun, body_fun))


def _run_loop(
    by: str, holds: Callable, advance: Callable, init: tree.Tree, varying: ResultAxes
) -> tree.Tree:
    going: bool | torch.Tensor = True
    carry = vary_over(init, varying)
    with contextlib.ExitStack() as inside:
        while True:
            with effects_where(going):
                going = _and(going, holds(carry))
            if not isinstance(going, torch.Tensor):
                running = going
            elif compat.is_batched(going):
                inside.enter_context(_uneven(going, by))
                running = compat.read_any(going)
            else:
                running = compat.read_number(going)
                going = True
            with effects_where(going):
                after = vary_over(advance(carry), varying) if running else carry
            if isinstance(going, torch.Tensor):
                # also where nothing is left to do, so that the result varies as if there were
                after = _advance_rows(going, after, carry)
            carry = after
            if not running:
                return carry


def _run_fake_loop(by: str, holds: Callable, advance: Callable, carry: tree.Tree) -> tree.Tree:
    """As many steps as it takes until the carry varies over no more axes; the last is checked."""
    before, known = None, False
    with contextlib.ExitStack() as inside:
        while True:
            with enter(replace(scope(), check=scope().check and known)):
                going = no_share(torch.as_tensor(holds(carry)))
                with _uneven(going, by):
                    carry = _advance_rows(going, advance(carry), carry)
            if known:
                return carry
            inside.enter_context(_uneven(going, by))
            varying = [varying_axes(x) for x in (going, *tree.leaves(carry))]
            known, before = varying == before, varying


def _advance_rows(going: torch.Tensor, after: tree.Tree, before: tree.Tree) -> tree.Tree:
    return tree.map(lambda new, old: torch.where(going, new, old), after, before)


def _and(going: bool | torch.Tensor, more: bool | torch.Tensor) -> bool | torch.Tensor:
    """Whether rows that are going on go on."""
    if isinstance(more, torch.Tensor):
        more = no_share(more)
    return more if going is True else going & more


def _fit_carry(what: str, before: tree.Tree, after: tree.Tree) -> tree.Tree:
    """The carry after a step, which must be like the one before; numbers take its dtypes."""
    leaves, structure = tree.flatten(after)
    if structure == tree.structure(before):
        rows = zip(leaves, tree.leaves(before), strict=True)
        leaves = [_as_like(new, old) for new, old in rows]
        after = tree.unflatten(structure, leaves)
    after = _as_tensors(what, "carry", after, tree.leaves(before))
    raise_problems(
        f"{what}: the carry must keep its structure, shapes and dtypes",
        compare_results(before, after, "carry", "before the step"),
    )
    return after


def _as_like(value: Any, like: torch.Tensor) -> Any:
    """A number as a tensor of the dtype of another, if that holds such numbers."""
    if isinstance(value, torch.Tensor) or not isinstance(value, (bool, int, float, complex)):
        return value
    fits = torch.result_type(like, value) == like.dtype
    return torch.full((), value, dtype=like.dtype, device=like.device) if fits else value


def _refuse_reverse(what: str, carry: tree.Tree) -> tree.Tree:
    """`carry`, through which no derivative in reverse passes."""
    if not may_reverse():
        return carry
    ways = {
        "while_loop": "lax.fori_loop with ints as bounds, or ft.scan, and in them torch.where for "
        "steps that are not to count",
        "fori_loop": "ints as bounds",
    }
    told = (
        f"{what} at {user_line()}: got a derivative in reverse (grad, vjp, backward) of a loop of "
        "which nothing bounds the number of steps, and so of carries to be kept; wanted forward "
        f"mode (torch.func.jvp), or a loop of known length; fix: {ways[what]}; or "
        "lax.stop_gradient where none is meant"
    )

    return mark_irreversible(carry, (told,) * len(tree.leaves(carry)))


# --- what is given


def _check_functions(what: str, functions: dict[str, Any]) -> dict[str, Callable]:
    """The functions, in which no value has a name for `capture`."""
    raise_problems(
        what,
        [
            Problem(name, repr(f), "a function", "lambda *operands: ... returns a constant")
            for name, f in functions.items()
            if not callable(f)
        ],
        TypeError,
    )
    return {name: refusing_names(f, f"{name} of lax.{what}") for name, f in functions.items()}


def _refuse_orphans(what: str, functions: Iterable[Callable], given: tree.Tree) -> None:
    if compat.transforms_active():
        hidden = [x for f in functions for x in find_tensors(f)]
        refuse_orphans(what, [*hidden, *tree.leaves(given)])


def _read_number(what: str, name: str, value: Any, kinds: str, fix: str) -> Any:
    """A Python number or a 0-dim tensor.

    Raises:
        TypeError: it is neither.
        ValueError: it is a tensor of another shape.
    """
    if isinstance(value, torch.Tensor):
        if value.dim():
            got = f"a tensor of shape {tuple(value.shape)}"
            refuse(what, name, got, f"a 0-dim one of {kinds}", fix)
        return value
    if not isinstance(value, (bool, int, float)) and hasattr(value, "item"):  # of numpy
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        got = f"a {type(value).__name__}"
        refuse(what, name, got, f"a number, or a 0-dim tensor of {kinds}", fix, TypeError)
    return value


def _read_predicate(
    what: str, name: str, value: Any, *, numbers: bool = True
) -> bool | torch.Tensor:
    fix = (
        "reduce it with .all() or .any(); for a choice in each element use torch.where, in each "
        "row torch.func.vmap"
    )
    value = _read_number(what, name, value, "bool", fix)
    of_tensor = isinstance(value, torch.Tensor)
    is_bool = value.dtype == torch.bool if of_tensor else isinstance(value, bool)
    if is_bool:
        return value
    if not numbers or (of_tensor and value.is_complex()):
        got = value.dtype if of_tensor else repr(value)
        refuse(what, name, got, "bool", "compare it, as in x > 0", TypeError)
    return value != 0


def _read_index(what: str, name: str, value: Any) -> int | torch.Tensor:
    fix = "for a choice in each element use lax.select_n, in each row torch.func.vmap"
    value = _read_number(what, name, value, "integers", fix)
    if isinstance(value, torch.Tensor):
        kind = value.dtype
        if kind != torch.bool and not kind.is_floating_point and not kind.is_complex:
            return value.to(torch.int64)
    elif isinstance(value, int) and not isinstance(value, bool):
        return value
    got = str(value.dtype) if isinstance(value, torch.Tensor) else repr(value)
    fix = "int(...), or .to(torch.int64) of a tensor"
    return refuse(what, name, got, "an integer", fix, TypeError)


def _as_tensors(what: str, label: str, out: tree.Tree, near: Iterable[Any]) -> tree.Tree:
    """A tree of tensors and numbers with the numbers as tensors, on the device of the first."""
    leaves, structure = tree.flatten(out)
    if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return out
    raise_problems(
        f"{what}: wanted trees of tensors",
        [
            Problem(
                f"{label}/{path}" if path else label,
                f"a {type(leaf).__name__}",
                "a tensor or a number",
                "leave it out; functions can close over it",
            )
            for path, leaf in zip(tree.paths(out), leaves, strict=True)
            if not isinstance(leaf, (torch.Tensor, bool, int, float, complex))
        ],
        TypeError,
    )
    devices = (x.device for x in (*leaves, *near) if isinstance(x, torch.Tensor))
    device = next(devices, torch.device("cpu"))
    return tree.unflatten(structure, [
        leaf if isinstance(leaf, torch.Tensor) else torch.full((), leaf, device=device)
        for leaf in leaves
    ])  # fmt: skip
