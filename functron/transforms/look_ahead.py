"""Branches and loops before they run: shapes, variation, and derivatives of all of them.

Where nothing is traced, one branch of a `functron.lax.cond` runs. What holds of all of them follows
from a run of each on fake tensors, once for the same code and operands: that they return alike,
the mesh axes over which results vary, and whether they have derivatives in reverse.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from functron.core import compat, tree
from functron.core.closure import describe_call, find_tensors, hoist
from functron.core.errors import Problem, raise_problems
from functron.core.functions import Function
from functron.program.recorder import not_recording
from functron.spmd.axes import BoundAxis, SimulatedAxis, enter, scope, source_line
from functron.spmd.primitives import Vary
from functron.spmd.simulate import varying_axes
from functron.transforms.gradient import IrreversibleError, replace_at


@contextlib.contextmanager
def computing_shapes() -> Iterator[None]:
    """Compute on fake tensors in this with block, on processes without the others."""
    axes = {
        name: replace(axis, recorder=None, membership=None) if isinstance(axis, BoundAxis) else axis
        for name, axis in scope().axes.items()
    }
    with contextlib.ExitStack() as inside:
        inside.enter_context(not_recording())
        inside.enter_context(enter(replace(scope(), axes=axes, check=False)))
        if not compat.faking():
            inside.enter_context(compat.no_dispatch_modes())
            inside.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


class _Probe:
    """A function of fake tensors; those of the same code and operands are equal.

    Attributes:
        run: to a tree of tensors, from which `_find_varying` learns, and which it then forgets.
    """

    def __init__(self, run: Callable[[], tree.Tree], *given: Any):
        self.run: Any = run
        axes = tuple((name, axis and axis.size) for name, axis in scope().axes.items())
        self._key = describe_call(given, _describe), axes, tuple(scope().uneven)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Probe) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _describe(x: torch.Tensor) -> tuple:
    return x.shape, x.dtype, compat.is_batched(x), varying_axes(x)


def make_fake(x: Any) -> Any:
    """A tensor like x that nothing has written to; what is no tensor stays."""
    return torch.empty_like(x) if isinstance(x, torch.Tensor) else x


ResultAxes = tuple[tuple[str, ...], ...] | None


def look_ahead(run: Callable[[], tree.Tree], *given: Any) -> ResultAxes:
    """The axes over which each result varies, whatever runs, by a run on fake tensors.

    It refuses what cannot be, and runs once for the same code and operands. Where nothing is
    simulated it is for shapes alone. On processes, for which it has been simulated, there is
    nothing to learn: None.
    """
    axes = [axis for axis in scope().axes.values() if axis is not None]
    if scope().stages or not all(isinstance(axis, SimulatedAxis) for axis in axes):
        return None
    probe = _Probe(run, *given)
    try:
        hash(probe)
    except TypeError:  # of a node of the user's
        return _find_varying.__wrapped__(probe)
    return _find_varying(probe)


def vary_over(out: tree.Tree, varying: ResultAxes) -> tree.Tree:
    """`out`, of which each leaf varies over these axes, as it would if other branches ran."""
    leaves, structure = tree.flatten(out)
    for i, names in enumerate(varying or ()):
        for name in set(names) - {*varying_axes(leaves[i])}:
            axis: Any = scope().axes[name]
            leaves[i] = Vary.call(leaves[i], axis)
    return tree.unflatten(structure, leaves)


@functools.lru_cache(1024)
def _find_varying(probe: _Probe) -> ResultAxes:
    """The axes over which each result varies; None where it cannot be run without numbers."""
    run, probe.run = probe.run, None  # which the cache is not to keep
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with not_recording(), compat.no_dispatch_modes(), fake, torch.no_grad():
            return tuple(varying_axes(x) for x in tree.leaves(run()))
    except RuntimeError:  # of a function that reads numbers, or calls itself
        return None


Irreversible = tuple[str | None, ...]


def look_back(what: str, branches: Sequence[Callable], operands: tuple) -> Irreversible:
    """Why each result has no derivative in reverse, if it has none in some branch, taken or not.

    So it is in programs that are traced, which have the derivatives of all branches. Of each result
    None where it has one; nothing at all where every one has.
    """
    if not may_reverse() or scope().stages:
        return ()
    hidden = [x for f in branches for x in find_tensors(f)]
    moving = [is_moving(x) for x in (*hidden, *tree.leaves(operands))]
    if not any(moving):
        return ()

    def pull() -> Irreversible:
        rows = [_pull_results(f, operands) for f in branches]
        return tuple(next(filter(None, row), None) for row in zip(*filter(None, rows), strict=True))

    probe = _Probe(pull, what, branches, operands, moving)
    try:
        hash(probe)
    except TypeError:  # of a node of the user's
        return _find_irreversible.__wrapped__(probe)
    return _find_irreversible(probe)


def _pull_results(f: Callable, operands: tuple) -> Irreversible:
    """Why each result of `f` cannot be pulled back, found on tensors without numbers.

    Nothing at all where every one of them has a derivative.
    """
    hidden, close = hoist(f)
    leaves, structure = tree.flatten(operands)
    given = [*hidden, *leaves]
    moving = [i for i, x in enumerate(given) if is_moving(x)]
    values = [make_fake(x) for x in given]

    def run(*chosen: torch.Tensor) -> list:
        full = replace_at(values, moving, chosen)
        return tree.leaves(
            close(full[: len(hidden)])(*tree.unflatten(structure, full[len(hidden) :]))
        )

    def told(places: Sequence[int]) -> str | None:
        def pick(*chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
            made = run(*chosen)
            return tuple(made[place] for place in places if tree.is_inexact(made[place]))

        pulled: Any = torch.func.vjp(pick, *(values[i] for i in moving))
        try:
            pulled[1](tuple(map(torch.ones_like, pulled[0])))
        except IrreversibleError as error:
            return str(error)
        return None

    if not moving:
        return ()
    every = range(len(run(*(values[i] for i in moving))))
    return tuple(told([place]) for place in every) if told(every) else ()


@functools.lru_cache(1024)
def _find_irreversible(probe: _Probe) -> Irreversible:
    run, probe.run = probe.run, None  # which the cache is not to keep
    try:
        with computing_shapes(), torch.enable_grad():
            return run()
    except Exception:  # which tells when it is what runs
        return ()


# --- results


@dataclass(frozen=True)
class BranchResult:
    """Shape, dtype and device of a result, which branches have in common.

    Attributes:
        device: None where it does not matter.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | None = None

    @classmethod
    def of(cls, x: torch.Tensor) -> BranchResult:
        """That of a tensor, which may be on any device."""
        return cls(tuple(x.shape), x.dtype)

    @classmethod
    def here(cls, x: torch.Tensor) -> BranchResult:
        """That of a tensor, with its device."""
        return cls(tuple(x.shape), x.dtype, x.device)

    def __str__(self) -> str:
        away = self.device is not None and self.device.type != "cpu"
        return f"{self.shape} {self.dtype}" + (f" on {self.device}" if away else "")


def check_alike(
    title: str, found: Mapping[str, tree.Tree], functions: Mapping[str, Callable]
) -> None:
    """Raise ValueError for results of branches that differ from those of the first.

    Args:
        found: the `BranchResult` of each result, by branch.
        functions: the branches, by the same names.
    """
    lines = {name: _find_line(f) for name, f in functions.items()}
    (first, like), *others = found.items()
    where = f"in {first}{lines[first]}"
    rows = [compare_results(like, out, name, where, lines[name]) for name, out in others]
    raise_problems(
        f"{title}: branches must return the same structure, shapes and dtypes",
        [problem for row in rows for problem in row],
    )


def _find_line(f: Any) -> str:
    """Where a function is written, as ``" at file:line: source"``; nothing where it is not."""
    f = inspect.unwrap(f)
    while isinstance(f, functools.partial):
        f = inspect.unwrap(f.func)
    code = getattr(f, "__code__", None)
    return f" at {source_line(code.co_filename, code.co_firstlineno)}" if code else ""


def compare_results(
    like: tree.Tree, out: tree.Tree, name: str, where: str, line: str = ""
) -> Iterator[Problem]:
    """The problems of `out` where it is not like another tree of tensors or their kinds."""

    def kinds(value: tree.Tree) -> dict[str, BranchResult]:
        return {
            path: x if isinstance(x, BranchResult) else BranchResult.of(x)
            for path, x in tree.items(value)
        }

    wanted, got = kinds(like), kinds(out)
    fix = "return the same containers and keys; torch.zeros_like stands for what is not there"
    for path in [*wanted, *(path for path in got if path not in wanted)]:
        at = f"{name}/{path}" if path else name
        if path not in got:
            yield Problem(at, f"nothing{line}", f"{wanted[path]}, as {where}", fix)
        elif path not in wanted:
            yield Problem(at, f"{got[path]}{line}", f"nothing, as {where}", fix)
        elif got[path] != wanted[path]:
            cast = "cast or reshape it"
            yield Problem(at, f"{got[path]}{line}", f"{wanted[path]}, as {where}", cast)
    if wanted.keys() == got.keys() and tree.structure(like) != tree.structure(out):
        was = f"{tree.structure(like)}, as {where}"
        yield Problem(name, f"{tree.structure(out)}{line}", was, fix)


# --- derivatives


def derive_alike(out: tree.Tree, functions: Iterable[Callable], given: tree.Tree) -> tree.Tree:
    """`out`, of which processes have derivatives by the same tensors, whatever each of them ran.

    Otherwise a rank whose branch does without a tensor would not come to the collectives that bring
    the others' derivatives.
    """
    if not any(isinstance(axis, BoundAxis) for axis in scope().axes.values()):
        return out
    hidden = [x for f in functions for x in hoist(f)[0]]
    moving = [x for x in (*hidden, *tree.leaves(given)) if is_moving(x)]
    if not moving:
        return out
    # each derivative of this, of any order, depends on all of them; it is finite, and times zero
    first = [x.flatten()[:1].sum() for x in moving]
    parts = [(x.real if x.is_complex() else x).double() for x in first]
    unread = torch.stack([x.nan_to_num(0.0, 0.0, 0.0).sin() for x in parts]).sum().sin()

    def connect(x: torch.Tensor) -> torch.Tensor:
        if not (x.is_floating_point() or x.is_complex()):
            return x
        always = torch.ones((), dtype=torch.bool, device=x.device)
        return torch.where(always, x, unread.to(x.device, x.dtype))

    return tree.map(connect, out)


def is_moving(x: Any) -> bool:
    """Whether x has a derivative, by something around."""
    moves = isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
    return moves and compat.is_tracked(x, mapped=False)


def may_reverse() -> bool:
    """Whether something around may differentiate in reverse."""
    return "grad" in compat.transform_names() or torch.is_grad_enabled()


def mark_irreversible(out: tree.Tree, told: Irreversible) -> tree.Tree:
    """`out`, of whose leaves derivatives in reverse raise where something is told of them."""
    by_transform = "grad" in compat.transform_names()

    def mark(x: torch.Tensor, words: str | None) -> torch.Tensor:
        reversed_ = words and is_moving(x) and (by_transform or compat.requires_grad(x))
        made: Any = _Irreversible.apply(x, words) if reversed_ else x
        return made

    leaves, structure = tree.flatten(out)
    return tree.unflatten(structure, [*map(mark, leaves, told)]) if told else out


class _Irreversible(Function):
    """y = x, without a derivative in reverse."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x, told):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.told = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, cotangent) -> Any:
        if cotangent is not None:
            raise IrreversibleError(ctx.told)
        return None, None

    @staticmethod
    def jvp(ctx, tangent, _) -> Any:
        return None if tangent is None else tangent.view_as(tangent)

    @staticmethod
    def vmap(info, in_dims, x, told):
        return _Irreversible.apply(x, told), in_dims[0]
